"""The published files match each other; a wrong wheel or source distribution is found."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.release_check import NEEDED, problems


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('version = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n\n## 1.2.2\n")
    (tmp_path / "dist").mkdir()
    return tmp_path


def _publish(root: Path, files: tuple[str, ...], metadata: str) -> None:
    with tarfile.open(root / "dist" / "ngram_npu-1.2.3.tar.gz", "w:gz") as archive:
        for name in files:
            archive.addfile(tarfile.TarInfo(f"ngram_npu-1.2.3/{name}"), io.BytesIO())
    with zipfile.ZipFile(root / "dist" / "ngram_npu-1.2.3-cp311-cp311-linux.whl", "w") as archive:
        archive.writestr("ngram_npu-1.2.3.dist-info/METADATA", metadata)


RIGHT = "Name: ngram-npu\nVersion: 1.2.3\n\n# ngram_npu\n"


def test_a_right_release_passes(root: Path) -> None:
    _publish(root, NEEDED, RIGHT)
    assert problems(root / "dist", root) == []


def test_wrong_releases_are_found(root: Path) -> None:
    assert "got 0, 0" in problems(root / "dist", root)[0]
    _publish(root, (*NEEDED[1:], "build/a.so"), "Name: ngram-npu\nVersion: 1.2.2\n\nText\n")
    (root / "CHANGELOG.md").write_text("## 1.2.2\n")
    (root / "pyproject.toml").write_text('version = "1.2.4"\n')
    found = problems(root / "dist", root)
    for says in (
        "expected 1.2.4 at its head, got ['1.2.2']",
        ".whl: expected version 1.2.4",
        ".tar.gz: expected version 1.2.4",
        "lacks LICENSE",
        "holds build/a.so",
        "metadata say 1.2.2",
        "description is not the README",
    ):
        assert any(says in problem for problem in found), (says, found)
