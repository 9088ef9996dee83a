"""Returns the package's description and links to scikit-build-core (pyproject.toml).

The description is the README. On a package index, relative links to files do not work. If the
variable NGRAM_NPU_HOME contains the address of the repository, relative links are replaced with
links to the files there, at the version's tag; otherwise only the text of the links remains. A
release sets the variable (docs/guides/release.md).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_RELATIVE_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!\w+:)([^)]+)\)")
_PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}


def make_links_absolute(text: str, home: str, version: str) -> str:
    def replace_link(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        if not home:
            return label
        path = f"README.md{path}" if path.startswith("#") else path
        return f"{image}[{label}]({home}/{'raw' if image else 'blob'}/v{version}/{path})"

    return _RELATIVE_LINK.sub(replace_link, text)


def dynamic_metadata(field: str, _settings: Any) -> dict[str, str]:
    """Returns a metadata field; scikit-build-core calls this for each field in
    [tool.scikit-build.metadata]."""
    home = os.environ.get("NGRAM_NPU_HOME", "").rstrip("/")
    project = Path("pyproject.toml").read_text(encoding="utf-8")
    version = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)[0]
    if field == "urls":
        pages = {name: f"{home}/blob/v{version}/{path}" for name, path in _PAGES.items()}
        return {"Source": home, **pages} if home else {}
    text = Path("README.md").read_text(encoding="utf-8")
    return {"content-type": "text/markdown", "text": make_links_absolute(text, home, version)}
