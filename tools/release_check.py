"""Checks the versions and links of a release's distributions: those of ``make release-check``, or
those to publish.

python -m tools.release_check DIST [TAG]
"""

from __future__ import annotations

import re
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def find_problems(dist: Path, root: Path = REPOSITORY, tag: str = "") -> list[str]:
    """Returns the problems of the distributions in a folder and of the tag. Relative links are a
    problem of published wheels only, in which the workflow has replaced them."""
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    version = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)[0]
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\S+)", changelog, re.MULTILINE)[:1]
    problems = []
    if newest != [version]:
        problems.append(f"CHANGELOG.md: newest version: expected {version}, got {newest}")
    if tag not in ("", f"v{version}"):
        problems.append(f"tag: expected v{version}, got {tag}")
    wheels, sources = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if not wheels or len(sources) != 1:
        counts = f"{len(wheels)} and {len(sources)}"
        problems.append(f"{dist}: expected wheels and 1 .tar.gz, got {counts}")
    for path in (*wheels, *sources):
        if not re.match(rf"ngram_npu-{re.escape(version)}[-.]", path.name):
            problems.append(f"{path.name}: expected version {version}")
    for wheel in wheels if tag else ():
        links = re.findall(r"\]\((?!\w+://)([^)]+)\)", read_description(wheel))
        problems += [f"{wheel.name}: the description links to {link}" for link in links]
    return problems


def read_description(wheel: Path) -> str:
    """Returns the README that a package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        entry = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return str(message_from_bytes(archive.read(entry)).get_payload())


if __name__ == "__main__":
    sys.exit("\n".join(find_problems(Path(sys.argv[1]), tag="".join(sys.argv[2:]))) or 0)
