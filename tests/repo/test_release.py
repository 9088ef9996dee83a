"""Tests that the check of a release finds wrong distributions, and that documents and pre-commit
install what the build needs."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.release_check import REPOSITORY, REQUIRED_FILES, find_problems

BINARY = b"PK\0\0"
METADATA = "Name: ngram-npu\nVersion: 1.2.3\n\n# ngram_npu\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project of version 1.2.3 with an empty folder `dist`."""
    (tmp_path / "pyproject.toml").write_text('version = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n\n## 1.2.2\n")
    (tmp_path / "dist").mkdir()
    return tmp_path


def write_distributions(
    root: Path, files: tuple[str, ...], metadata: str, binaries: tuple[str, ...] = ()
) -> None:
    """Writes a wheel and a source distribution; `binaries` go into both."""
    with tarfile.open(root / "dist" / "ngram_npu-1.2.3.tar.gz", "w:gz") as archive:
        for name in (*files, *binaries):
            member = tarfile.TarInfo(f"ngram_npu-1.2.3/{name}")
            member.size = len(BINARY) if name in binaries else 0
            archive.addfile(member, io.BytesIO(BINARY))
    with zipfile.ZipFile(root / "dist" / "ngram_npu-1.2.3-cp311-cp311-linux.whl", "w") as wheel:
        wheel.writestr("ngram_npu-1.2.3.dist-info/METADATA", metadata)
        for name in binaries:
            wheel.writestr(name, BINARY)


def test_wrong_release_is_rejected(root: Path) -> None:
    assert "got 0 and 0" in find_problems(root / "dist", root)[0]
    wrong_metadata = "Name: ngram-npu\nVersion: 1.2.2\n\nText [a](docs/a.md)\n"
    binaries = "build/a.so", "docs/a.png", "ngram_npu/libngram_npu.so"
    write_distributions(root, REQUIRED_FILES[1:], wrong_metadata, binaries)
    (root / "CHANGELOG.md").write_text("## 1.2.2\n")
    (root / "pyproject.toml").write_text('version = "1.2.4"\n')
    problems = "\n".join(find_problems(root / "dist", root, tag="v1.2.3"))
    for message in (
        "tag: expected v1.2.4, got v1.2.3",
        "newest version: expected 1.2.4, got ['1.2.2']",
        ".whl: expected version 1.2.4",
        ".tar.gz: expected version 1.2.4",
        "LICENSE is missing",
        "metadata: expected version 1.2.4, got 1.2.2",
        "metadata: expected the README as the description",
        "the description links to docs/a.md",
    ):
        assert message in problems
    assert re.findall("foreign binary (.*)", problems) == ["build/a.so"] * 2


@pytest.mark.parametrize("page", ["README.md", "docs/guides/ascend.md"])
def test_documented_build_installs_build_requirements_only(page: str) -> None:
    """The environment may be that of a server, so no other package in it may change."""
    text = (REPOSITORY / page).read_text()
    project = (REPOSITORY / "pyproject.toml").read_text()
    (requires,) = re.findall(r"^requires = \[(.*)\]", project, re.MULTILINE)
    (block,) = (b for b in re.findall(r"```.*?```", text, re.DOTALL) if "--no-build-iso" in b)
    (packages,) = re.findall(r"pip install (scikit-build-core [\w -]+?)(?: +#.*)?$", block, re.M)
    required = {*re.findall(r'"([\w-]+)', requires), "ninja"}
    assert required <= set(packages.split()) <= required | {"numpy"}
    assert "requirements" not in block


def test_pre_commit_installs_the_versions_of_make_lint() -> None:
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    tools = re.findall(r"\[([\w-]+==[\d.]+)\]", hooks)
    assert {tool.partition("==")[0] for tool in tools} == {"ruff", "clang-format"}
    assert set(tools) <= set((REPOSITORY / "tools/requirements-dev.txt").read_text().splitlines())
    assert ".venv" not in hooks
