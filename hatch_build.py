"""Completes the metadata of a release: the addresses of the project, and a README whose links work outside of it.

``GRAPHCKPT_REPOSITORY`` is the address of the repository, as the release checklist and CI set it. Without it, as in an
install from a checkout, the README is as it stands, and no addresses are named.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
_CHECKOUT = "From a clone of this repository:\n\n"


class ReleaseMetadata(MetadataHookInterface):
    """Fills in what ``pyproject.toml`` declares as dynamic."""

    def update(self, metadata: dict) -> None:
        """Adds ``urls`` and ``readme``."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get("GRAPHCKPT_REPOSITORY", "").rstrip("/")
        if address:
            tree = f"{address}/blob/v{metadata['version']}"
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{tree}/docs/index.md",
                "Changelog": f"{tree}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
            text = _published(text, address, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _published(text: str, address: str, version: str) -> str:
    """Returns the README as an index of packages shows it: with absolute links, and installed by its name."""
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)([^)]+)\)", rf"![\1]({address}/raw/v{version}/\2)", text)
    text = _LINK.sub(rf"]({address}/blob/v{version}/\1)", text)
    return text.replace(_CHECKOUT, "").replace("pip install . ", "pip install graphckpt ").replace("'.[", "'graphckpt[")
