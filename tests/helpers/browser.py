"""Opens pages in headless Chromium without a network, with the driver that checks the site."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_FAULTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
_OFFLINE = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}


def load_script(name: str) -> ModuleType:
    """Loads a script of the docs, which is in no package."""
    spec = spec_from_file_location(name, Path(__file__).parents[2] / f"docs/_build_hooks/{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK_SITE = load_script("check_site")
needs_chromium = pytest.mark.skipif(CHECK_SITE.chromium() is None, reason="needs Chromium")


class Page:
    def __init__(self, browser: Any, path: Path) -> None:
        self._browser = browser
        for domain in ("Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")
        browser.call("Network.emulateNetworkConditions", **_OFFLINE)
        browser.resize(1400, 1500)
        browser.open(path.resolve().as_uri())
        self.evaluate = browser.evaluate

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window, and waits until the page has drawn."""
        self._browser.resize(width, height)
        self.wait(1)

    @property
    def faults(self) -> list[dict[str, object]]:
        """What the page has written to the console, and errors."""
        return [parameters for name, parameters in self._browser.events if name in _FAULTS]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has asked for, beside itself."""
        urls = [p["request"]["url"] for name, p in self._browser.events if name == "Network.requestWillBeSent"]
        return [url for url in urls[1:] if not url.startswith(("data:", "blob:"))]

    def point_at(self, x: float, y: float) -> None:
        """Moves the pointer, and waits until the page has drawn."""
        self._browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.wait(0.3)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self._browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.wait(0.3)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Moves the pointer with the left button pressed."""
        for kind, (x, y) in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            self._browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        self.wait(0.5)

    def wait(self, seconds: float) -> None:
        self.evaluate(f"new Promise(resolve => setTimeout(resolve, {1000 * seconds}))")

    def set_dark(self) -> None:
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        self._browser.call("Emulation.setEmulatedMedia", features=dark)
        self.wait(0.5)

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        self.evaluate("document.documentElement.style.overflow = 'hidden'")
        self.wait(0.5)
        path.write_bytes(base64.b64decode(self._browser.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def opened(path: Path) -> Iterator[Page]:
    """Opens a file in a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = CHECK_SITE.Browser(CHECK_SITE.chromium(), profile)
        try:
            yield Page(browser, path)
        finally:
            browser.close()
