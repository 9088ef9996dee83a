"""Checks the distributions of a release: those of ``make release-check``, or those to publish.

python -m tools.release_check DIST [TAG]
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OWN_BINARIES = (
    r"docs/.*\.png",
    r"ngram_npu/(_C\.[\w-]+\.so|libngram_npu\w*\.so|ngram_npu_kernels\.o)",
)
REQUIRED_FILES = ("LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml")
REQUIRED_FILES += ("csrc/schemas.h",)


def find_problems(dist: Path, root: Path = REPOSITORY, tag: str = "") -> list[str]:
    """Returns the problems of the distributions in a folder and of the tag."""
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
        return [*problems, f"{dist}: expected wheels and 1 .tar.gz, got {counts}"]
    source = sources[0]
    for path in (*wheels, source):
        if not re.match(rf"ngram_npu-{re.escape(version)}[-.]", path.name):
            problems.append(f"{path.name}: expected version {version}")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                name = member.name.partition("/")[2]
                problems += find_foreign_binary(source, name, file.read())
    problems += [
        f"{source.name}: {name} is missing" for name in REQUIRED_FILES if name not in names
    ]
    for wheel in wheels:
        problems += check_wheel(wheel, version, is_published=bool(tag))
    return problems


def check_wheel(wheel: Path, version: str, is_published: bool) -> list[str]:
    """Returns the problems of a wheel's files and metadata. Relative links are a problem of
    published wheels only, in which the workflow has replaced them."""
    problems = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            problems += find_foreign_binary(wheel, name, archive.read(name))
        entry = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(entry))
    description = str(metadata.get_payload())
    if metadata["Version"] != version:
        got = metadata["Version"]
        problems.append(f"{wheel.name}: metadata: expected version {version}, got {got}")
    if not description.startswith("# ngram_npu"):
        problems.append(f"{wheel.name}: metadata: expected the README as the description")
    links = find_relative_links(description) if is_published else []
    return problems + [f"{wheel.name}: the description links to {link}" for link in links]


def find_relative_links(text: str) -> list[str]:
    """Returns the relative links, which do not work on a package index."""
    return re.findall(r"\]\((?!\w+://)([^)]+)\)", text)


def find_foreign_binary(archive: Path, name: str, content: bytes) -> list[str]:
    is_own = any(re.fullmatch(pattern, name) for pattern in OWN_BINARIES)
    return [] if is_own or b"\0" not in content else [f"{archive.name}: foreign binary {name}"]


if __name__ == "__main__":
    sys.exit("\n".join(find_problems(Path(sys.argv[1]), tag="".join(sys.argv[2:]))) or 0)
