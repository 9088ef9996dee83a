"""Wheels for manylinux: a cross build is named for its machine, a wrong tag and a failed trial are
noticed. Builds themselves take minutes each and run for a release."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import wheels


def test_only_a_build_for_another_machine_names_it() -> None:
    nvcc = Path("/cuda/bin/nvcc")
    defines, changes = wheels.plan("3.10", "x86_64", "x86_64", nvcc)
    common = ["NGRAM_NPU_MANYLINUX=ON", "NGRAM_NPU_ASCENDC=OFF", "NGRAM_NPU_WERROR=ON"]
    assert defines == [*common, "NGRAM_NPU_CUDA=ON", "CMAKE_CUDA_COMPILER=/cuda/bin/nvcc"]
    assert changes == {}
    without, _ = wheels.plan("3.10", "x86_64", "x86_64", None)
    assert without == [*common, "NGRAM_NPU_CUDA=OFF"]
    crossed, changes = wheels.plan("3.10", "aarch64", "x86_64", nvcc)
    assert crossed == [*common, *wheels.CROSS]
    assert changes == {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": ".cpython-310-aarch64-linux-gnu.so",
    }


def test_cuda_option_selects_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "debian_nvcc", lambda folder: tmp_path / "debian")
    (tmp_path / "debian").touch()
    (tmp_path / "given").touch()
    assert wheels.find_nvcc("off") is None
    assert wheels.find_nvcc("debian") == tmp_path / "debian"
    assert wheels.find_nvcc(str(tmp_path / "given")) == tmp_path / "given"
    with pytest.raises(SystemExit, match="off or the path of nvcc, got missing"):
        wheels.find_nvcc("missing")


PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES CXX)
set(NGRAM_NPU_CUDA ON)
add_library(ngram_npu_options INTERFACE)
add_subdirectory({manylinux} manylinux)
add_library(user SHARED user.cpp)
target_link_libraries(user PRIVATE ngram_npu_manylinux rt)
"""
CALLS = ("dlmopen", "dlsym", "pthread_create", "pthread_spin_lock", "sem_wait", "shm_open")


def test_functions_of_the_cuda_runtime_are_taken_from_an_old_glibc(tmp_path: Path) -> None:
    manylinux = wheels.pythons.ROOT / "cmake" / "manylinux"
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(manylinux=manylinux))
    declared = "".join(
        f'extern "C" int {name}(); int u_{name}() {{ return {name}(); }}\n' for name in CALLS
    )
    (tmp_path / "user.cpp").write_text(declared)
    ninja = f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).parent / 'ninja'}"
    for command in (["-S", tmp_path, "-G", "Ninja", ninja], ["--build", "."]):
        subprocess.run(["cmake", *command], cwd=tmp_path, check=True, capture_output=True)
    symbols = subprocess.check_output(
        ["readelf", "-W", "--dyn-syms", tmp_path / "libuser.so"], text=True
    )
    versions = dict(re.findall(r"UND (\w+)@GLIBC_2\.(\d+)", symbols))
    assert set(CALLS) <= set(versions)
    assert all(int(minor) <= 28 for minor in versions.values()), versions


@pytest.mark.parametrize(
    ("tag", "right"),
    [
        ("cp312-cp312-manylinux_2_28_aarch64", True),
        ("cp312-cp312-manylinux_2_27_aarch64", True),
        ("cp312-cp312-manylinux_2_35_aarch64", False),
        ("cp312-cp312-manylinux_2_28_x86_64", False),
        ("cp312-cp312-linux_aarch64", False),
        ("cp311-cp311-manylinux_2_28_aarch64", False),
    ],
)
def test_a_wrong_tag_is_found(tag: str, right: bool) -> None:
    problem = wheels.tag_problem(f"ngram_npu-1.2.3-{tag}.whl", "3.12", "aarch64")
    assert (problem == "") is right


def test_an_emulated_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails if its command fails, and says what it lacks."""
    said, failed = wheels.tried([sys.executable, "-c", "print(1); exit(3)"], {})
    assert (said, failed) == ("1\nexit status 3", True)
    assert not wheels.tried([sys.executable, "-c", "import os; os.environ['A_B']"], {"A_B": ""})[1]
    monkeypatch.setattr(wheels, "BUILD", tmp_path)
    said, failed = wheels.emulated("3.12", "aarch64", tmp_path / "a.whl")
    assert said.startswith("built, not tried: no ")
    assert not failed
