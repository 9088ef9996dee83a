"""Checks the distributions of a release: ``make release-check`` builds them.

python -m tools.release_check DIST
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
NEEDED = ("LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "csrc/schemas.h")


def problems(dist: Path, root: Path = REPOSITORY) -> list[str]:
    """What is wrong with the one wheel and the one source distribution in a folder."""
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    version = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)[0]
    changes = re.findall(r"^## (\S+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    found = []
    if changes[:1] != [version]:
        found.append(f"CHANGELOG.md: expected {version} at its head, got {changes[:1]}")
    wheels, sources = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        return [
            *found,
            f"{dist}: expected 1 wheel and 1 .tar.gz, got {len(wheels)}, {len(sources)}",
        ]
    stem = f"ngram_npu-{version}"
    for path in (*wheels, *sources):
        if not path.name.startswith((f"{stem}-", f"{stem}.")):
            found.append(f"{path.name}: expected version {version}")
    with tarfile.open(sources[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                found += _foreign(sources[0], member.name.partition("/")[2], file.read())
    found += [f"{sources[0].name}: lacks {name}" for name in NEEDED if name not in names]
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in archive.namelist():
            found += _foreign(wheels[0], name, archive.read(name))
        entry = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(entry))
    if metadata["Version"] != version:
        found.append(f"{wheels[0].name}: its metadata say {metadata['Version']}")
    if not str(metadata.get_payload()).startswith("# ngram_npu"):
        found.append(f"{wheels[0].name}: its description is not the README")
    links = relative_links(str(metadata.get_payload()))
    return found + [f"{wheels[0].name}: its description links to {link}" for link in links]


def relative_links(text: str) -> list[str]:
    """The links that lead nowhere on a package index."""
    return re.findall(r"\]\((?!\w+://)([^)]+)\)", text)


def _foreign(archive: Path, name: str, content: bytes) -> list[str]:
    """A line if the file is a binary that is not the project's own."""
    own = any(re.fullmatch(pattern, name) for pattern in OWN_BINARIES)
    return [f"{archive.name}: holds the binary {name}"] if b"\0" in content and not own else []


if __name__ == "__main__":
    sys.exit("\n".join(problems(Path(sys.argv[1]))) or 0)
