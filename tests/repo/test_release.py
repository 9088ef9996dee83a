"""Tests that the check of a release finds wrong distributions, and that documents and pre-commit
install what the build needs."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from tools.release_check import REPOSITORY, find_problems


def test_wrong_release_is_rejected(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    (tmp_path / "pyproject.toml").write_text('version = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n\n## 1.2.2\n")
    assert [problem.rpartition(", ")[2] for problem in find_problems(dist, tmp_path)] == [
        "got 0 and 0"
    ]
    (dist / "ngram_npu-1.2.3.tar.gz").touch()
    with zipfile.ZipFile(dist / "ngram_npu-1.2.3-cp311-cp311-linux.whl", "w") as wheel:
        metadata = "Name: ngram-npu\n\n[a](https://a.b/c) [b](docs/a.md)\n"
        wheel.writestr("ngram_npu-1.2.3.dist-info/METADATA", metadata)
    assert find_problems(dist, tmp_path) == []
    links = ["ngram_npu-1.2.3-cp311-cp311-linux.whl: the description links to docs/a.md"]
    assert find_problems(dist, tmp_path, tag="v1.2.3") == links
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.2\n")
    (tmp_path / "pyproject.toml").write_text('version = "1.2.4"\n')
    assert find_problems(dist, tmp_path, tag="v1.2.3") == [
        "CHANGELOG.md: newest version: expected 1.2.4, got ['1.2.2']",
        "tag: expected v1.2.4, got v1.2.3",
        "ngram_npu-1.2.3-cp311-cp311-linux.whl: expected version 1.2.4",
        "ngram_npu-1.2.3.tar.gz: expected version 1.2.4",
        *links,
    ]


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
