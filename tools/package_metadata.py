"""What pyproject.toml leaves to the build: the package's description and its links.

The description is the README. A package index cannot follow links to the repository's files: with
NGRAM_NPU_HOME, the address of the project's home, they lead there, to the version's tag; without
it their text remains. A release sets it (docs/guides/release.md).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_RELATIVE = re.compile(r"(!?)\[([^\]]+)\]\((?!\w+:)([^)]+)\)")
_PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}


def absolute(text: str, home: str, version: str) -> str:
    """The text; each link to a file of the repository leads home, or is replaced by its text."""

    def link(found: re.Match[str]) -> str:
        picture, says, path = found.groups()
        if not home:
            return says
        path = f"README.md{path}" if path.startswith("#") else path
        return f"{picture}[{says}]({home}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return _RELATIVE.sub(link, text)


def dynamic_metadata(field: str, _settings: Any) -> dict[str, str]:
    """Called by scikit-build-core for each field under [tool.scikit-build.metadata]."""
    home = os.environ.get("NGRAM_NPU_HOME", "").rstrip("/")
    project = Path("pyproject.toml").read_text(encoding="utf-8")
    version = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)[0]
    if field == "urls":
        pages = {name: f"{home}/blob/v{version}/{path}" for name, path in _PAGES.items()}
        return {"Source": home, **pages} if home else {}
    text = Path("README.md").read_text(encoding="utf-8")
    return {"content-type": "text/markdown", "text": absolute(text, home, version)}
