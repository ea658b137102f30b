"""A hook of the build: the README whose links work on PyPI, where there is no repository beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

FILES = "https://github.com/bayou-ml/bayou/blob/main/"
PICTURES = "https://raw.githubusercontent.com/bayou-ml/bayou/main/"


def absolute(text: str) -> str:
    """Return Markdown whose relative links and pictures lead to the repository.

    Args:
        text: of README.md.
    """
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{PICTURES}", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{FILES}", text)


class ReadmeHook(MetadataHookInterface):
    """Sets the readme of the project to README.md with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text)}
