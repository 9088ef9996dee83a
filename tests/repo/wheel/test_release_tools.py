"""Tests that the checks of a release find wrong distributions, wheels and torch libraries. The
wheels of a release are not built here, because each takes minutes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import wheels
from tools.package_metadata import dynamic_metadata, make_links_absolute
from tools.release_check import REPOSITORY, REQUIRED_FILES, find_problems, find_relative_links

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


@pytest.mark.parametrize("home", ["https://g.h/p", "https://g.h/p/", ""])
def test_metadata_links_point_to_the_repository(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    links = "[a b](docs/a.md#c) ![d](e.svg) [f](https://g.h/i) [j](#k)"
    assert make_links_absolute(links, "https://g.h/p", "1.2.3") == (
        "[a b](https://g.h/p/blob/v1.2.3/docs/a.md#c) ![d](https://g.h/p/raw/v1.2.3/e.svg) "
        "[f](https://g.h/i) [j](https://g.h/p/blob/v1.2.3/README.md#k)"
    )
    assert make_links_absolute(links, "", "1.2.3") == "a b d [f](https://g.h/i) j"
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("NGRAM_NPU_HOME", home)
    text = dynamic_metadata("readme", {})["text"]
    assert text.startswith("# ngram_npu\n")
    assert find_relative_links(text) == []
    assert find_relative_links(Path("README.md").read_text())
    urls = dynamic_metadata("urls", {})
    assert urls.get("Source") == (home.rstrip("/") or None)
    for url in urls.values():
        assert (REPOSITORY / re.sub(r".*/blob/v[\d.]+/", "", url)).exists() or url == urls["Source"]


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


def test_plan_build_for_another_machine_sets_cross_compilation() -> None:
    nvcc = Path("/cuda/bin/nvcc")
    defines, environment = wheels.plan_build("3.10", "x86_64", "x86_64", nvcc)
    assert defines[-2:] == ["NGRAM_NPU_CUDA=ON", "CMAKE_CUDA_COMPILER=/cuda/bin/nvcc"]
    assert environment == {}
    defines, environment = wheels.plan_build("3.10", "aarch64", "x86_64", nvcc)
    assert set(wheels.CROSS_DEFINES) <= set(defines)
    assert environment["SETUPTOOLS_EXT_SUFFIX"] == ".cpython-310-aarch64-linux-gnu.so"


CMAKE_PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES CXX)
set(NGRAM_NPU_CUDA ON)
add_library(ngram_npu_options INTERFACE)
add_subdirectory({manylinux} manylinux)
add_library(user SHARED user.cpp)
target_link_libraries(user PRIVATE ngram_npu_manylinux rt)
"""
FUNCTIONS = ("dlmopen", "dlsym", "pthread_create", "pthread_spin_lock", "sem_wait", "shm_open")


def test_manylinux_library_links_functions_of_an_old_glibc(tmp_path: Path) -> None:
    manylinux = REPOSITORY / "cmake" / "manylinux"
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_PROJECT.format(manylinux=manylinux))
    calls = [
        f'extern "C" int {name}(); int u_{name}() {{ return {name}(); }}' for name in FUNCTIONS
    ]
    (tmp_path / "user.cpp").write_text("\n".join(calls))
    ninja = f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).parent / 'ninja'}"
    for command in (["-S", tmp_path, "-G", "Ninja", ninja], ["--build", "."]):
        subprocess.run(["cmake", *command], cwd=tmp_path, check=True, capture_output=True)
    symbols = subprocess.check_output(
        ["readelf", "-W", "--dyn-syms", tmp_path / "libuser.so"], text=True
    )
    versions = dict(re.findall(r"UND (\w+)@GLIBC_2\.(\d+)", symbols))
    assert set(FUNCTIONS) <= set(versions)
    assert all(int(minor) <= 28 for minor in versions.values()), versions
