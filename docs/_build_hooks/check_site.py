"""Opens every page of the built site in headless Chromium, at the width of a desktop and of a phone, and searches.

``python docs/_build_hooks/check_site.py build/site`` prints a line for each fault and then exits with 1. Without
Chromium it opens no page.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WIDTHS = (1400, 390)
WORDS = {
    "gradient checkpointing": "tutorial.html",
    "activation checkpointing": "tutorial.html",
    "clip_grad_max_norm": "graph.html",
    "offload": "reference/policies.html",
    "--resume": "training.html",
    "OOM": "howto/cuda_out_of_memory.html",
    "CUDA out of memory": "howto/cuda_out_of_memory.html",
    "out of memory": "howto/cuda_out_of_memory.html",
    "OutOfMemoryError": "howto/cuda_out_of_memory.html",
    "batch size": "howto/fit.html",
    "QLoRA": "howto/finetuning.html",
    "memory budget": "planning.html",
}
"""Words that readers search for, and the page that has to be the first one found."""
_FREE = 10  # so that neither end of a pipe is 3 or 4, which the browser reads and writes
_START = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])"""

_STILL = """(() => {
  const style = document.createElement("style");
  style.textContent = "* { transition: none !important }";
  document.head.append(style);
})()"""
"""Without transitions, which would still be running after the window has another width."""

_LAYOUT = """(() => {
  const root = document.documentElement, faults = [], wide = window.innerWidth > 1000;
  if (root.scrollWidth > root.clientWidth)
    faults.push(`the page is ${root.scrollWidth - root.clientWidth} pixels wider than the window`);
  for (const code of document.querySelectorAll("pre > code, pre:not(:has(code))")) {
    const hidden = code.scrollWidth - code.clientWidth;
    const scrolls = ["auto", "scroll"].includes(getComputedStyle(code).overflowX);
    if (hidden > 1 && (wide || !scrolls))
      faults.push(`${hidden} pixels of a code block are cut off: ${code.textContent.trim().split("\\n")[0]}`);
  }
  return faults;
})()"""

_SEARCH = """(async () => {
  const input = document.querySelector(".md-search__input");
  input.focus();
  input.value = WORD;
  for (const kind of ["focus", "input", "keyup"]) input.dispatchEvent(new Event(kind, {bubbles: true}));
  for (let turn = 0; turn < 100; turn++) {
    const links = [...document.querySelectorAll("a.md-search-result__link")].map(link => link.href);
    if (links.length) return links;
    await new Promise(resolve => setTimeout(resolve, 100));
  }
  return [];
})()"""


class Browser:
    """One tab of a headless Chromium, which speaks its DevTools protocol over two pipes."""

    def __init__(self, program: str, profile: str) -> None:
        ours_in, theirs_out = self._pipe()
        theirs_in, ours_out = self._pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        command = [program, *flags, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(  # noqa: S603 - no shell, and no input of a user
            [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb", buffering=0)
        self._numbers = itertools.count(1)
        self.events: list[tuple[str, dict[str, Any]]] = []
        """Events since a page was opened: names and parameters, as the protocol has them."""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    @staticmethod
    def _pipe() -> tuple[int, int]:
        ends = os.pipe()
        moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FREE) for end in ends)
        for end in ends:
            os.close(end)
        return moved[0], moved[1]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            data += byte
        answer: dict[str, Any] = json.loads(data)
        if "method" in answer:
            self.events.append((answer["method"], answer.get("params", {})))
        return answer

    def open(self, url: str) -> None:
        """Opens a page and waits until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while all(name != "Page.loadEventFired" for name, _ in self.events):
            self._read()

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression in JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(timeout=30)
        self._in.close()
        self._out.close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves a folder on a free port of this machine; the search needs a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def faults_of(site: Path, browser: Browser, url: str) -> Iterator[str]:
    """Yields what is wrong with the site."""
    for page in sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html")):
        browser.open(f"{url}/{page}")
        browser.evaluate(_STILL)
        for width in WIDTHS:
            browser.resize(width)
            yield from (f"{page} at {width} pixels: {fault}" for fault in browser.evaluate(_LAYOUT))
    browser.resize(WIDTHS[0])
    for word, page in WORDS.items():
        browser.open(f"{url}/index.html")
        links = browser.evaluate(_SEARCH.replace("WORD", json.dumps(word)))
        if not links or f"/{page}" not in links[0]:
            yield f"the search for {word!r} does not find {page} first, but of {len(links)}: {links[:3]}"


def chromium() -> str | None:
    """Returns the path of Chromium, if it is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def check(site: Path) -> list[str]:
    """Returns what is wrong with the site in ``site``, in lines."""
    program = chromium()
    if program is None:
        raise RuntimeError("Chromium is not installed")
    with served(site) as url, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            return list(faults_of(site, browser, url))
        finally:
            browser.close()


if __name__ == "__main__":
    if chromium() is None:
        print("Chromium is not installed: the pages are not opened")
        sys.exit(0)
    found = check(Path(sys.argv[1]))
    print(*found, sep="\n")
    sys.exit(bool(found))
