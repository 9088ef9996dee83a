"""The published files match each other; a wrong wheel or source distribution is found."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.package_metadata import absolute, dynamic_metadata
from tools.release_check import NEEDED, REPOSITORY, problems, relative_links


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('version = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n\n## 1.2.2\n")
    (tmp_path / "dist").mkdir()
    return tmp_path


BINARY = b"PK\0\0"


def _publish(
    root: Path, files: tuple[str, ...], metadata: str, binaries: tuple[str, ...] = ()
) -> None:
    """Both distributions; `binaries` go into both."""
    with tarfile.open(root / "dist" / "ngram_npu-1.2.3.tar.gz", "w:gz") as archive:
        for name in (*files, *binaries):
            member = tarfile.TarInfo(f"ngram_npu-1.2.3/{name}")
            member.size = len(BINARY) if name in binaries else 0
            archive.addfile(member, io.BytesIO(BINARY))
    with zipfile.ZipFile(root / "dist" / "ngram_npu-1.2.3-cp311-cp311-linux.whl", "w") as wheel:
        wheel.writestr("ngram_npu-1.2.3.dist-info/METADATA", metadata)
        for name in binaries:
            wheel.writestr(name, BINARY)


RIGHT = "Name: ngram-npu\nVersion: 1.2.3\n\n# ngram_npu\n"


def test_a_right_release_passes(root: Path) -> None:
    own = ("docs/a.png", "ngram_npu/libngram_npu.so", "ngram_npu/_C.cpython-311-x86_64.so")
    _publish(root, NEEDED, RIGHT, own)
    assert problems(root / "dist", root) == []


@pytest.mark.parametrize(
    "name", ["other-1.0-py3-none-any.whl", "tools/a.pyc", "ngram_npu/libother.so", "tests/a.png"]
)
def test_a_binary_that_is_not_the_projects_own_is_found(root: Path, name: str) -> None:
    _publish(root, NEEDED, RIGHT, (name,))
    found = problems(root / "dist", root)
    assert [line.partition(": ")[2] for line in found] == [f"holds the binary {name}"] * 2


def test_wrong_releases_are_found(root: Path) -> None:
    assert "got 0, 0" in problems(root / "dist", root)[0]
    wrong = "Name: ngram-npu\nVersion: 1.2.2\n\nText [a](docs/a.md)\n"
    _publish(root, NEEDED[1:], wrong, ("build/a.so",))
    (root / "CHANGELOG.md").write_text("## 1.2.2\n")
    (root / "pyproject.toml").write_text('version = "1.2.4"\n')
    found = problems(root / "dist", root)
    for says in (
        "expected 1.2.4 at its head, got ['1.2.2']",
        ".whl: expected version 1.2.4",
        ".tar.gz: expected version 1.2.4",
        "lacks LICENSE",
        "holds the binary build/a.so",
        "metadata say 1.2.2",
        "description is not the README",
        "description links to docs/a.md",
    ):
        assert any(says in problem for problem in found), (says, found)


TEXT = "[a b](docs/a.md#c) ![d](e.svg) [f](https://g.h/i) [j](#k)"


def test_links_of_the_description_lead_home() -> None:
    assert absolute(TEXT, "https://g.h/p", "1.2.3") == (
        "[a b](https://g.h/p/blob/v1.2.3/docs/a.md#c) ![d](https://g.h/p/raw/v1.2.3/e.svg) "
        "[f](https://g.h/i) [j](https://g.h/p/blob/v1.2.3/README.md#k)"
    )
    assert absolute(TEXT, "", "1.2.3") == "a b d [f](https://g.h/i) j"


@pytest.mark.parametrize("home", ["https://g.h/p", "https://g.h/p/", ""])
def test_the_metadata_with_and_without_a_home(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("NGRAM_NPU_HOME", home)
    text = dynamic_metadata("readme", {})["text"]
    assert text.startswith("# ngram_npu\n")
    assert relative_links(text) == []
    assert relative_links(Path("README.md").read_text()), "no link: the rewriting is of no use"
    urls = dynamic_metadata("urls", {})
    assert urls.get("Source") == (home.rstrip("/") or None)
    for url in urls.values():
        assert (REPOSITORY / re.sub(r".*/blob/v[\d.]+/", "", url)).exists() or url == urls["Source"]


@pytest.mark.parametrize("page", ["README.md", "docs/guides/ascend.md"])
def test_documented_build_installs_the_build_requirements_only(page: str) -> None:
    """Where it is installed, others serve models: nothing there may change."""
    text = (REPOSITORY / page).read_text()
    project = (REPOSITORY / "pyproject.toml").read_text()
    (requires,) = re.findall(r"^requires = \[(.*)\]", project, re.MULTILINE)
    (block,) = (b for b in re.findall(r"```.*?```", text, re.DOTALL) if "--no-build-iso" in b)
    (packages,) = re.findall(r"pip install (scikit-build-core [\w -]+?)(?: +#.*)?$", block, re.M)
    build = {*re.findall(r'"([\w-]+)', requires), "ninja"}
    assert build <= set(packages.split()) <= build | {"numpy"}
    assert "requirements" not in block


def test_pre_commit_installs_the_tools_of_make_lint() -> None:
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    tools = re.findall(r"\[([\w-]+==[\d.]+)\]", hooks)
    assert {tool.partition("==")[0] for tool in tools} == {"ruff", "clang-format"}
    required = (REPOSITORY / "tools/requirements-dev.txt").read_text().splitlines()
    assert set(tools) <= set(required)
    assert ".venv" not in hooks
