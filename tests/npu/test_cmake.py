"""Tests how the build finds CANN, and the build's messages if CANN or a variable is missing.

`make test-slow` tests the rest of the build, with stand-ins that check the known requirements of
CANN.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from npu.npu_process import BUILD, ROOT

CMAKE_FOLDERS = (  # of ascendc.cmake, the newest layout of CANN first
    "tools/tikcpp/ascendc_kernel_cmake",
    "compiler/tikcpp/ascendc_kernel_cmake",
    "ascendc_devkit/tikcpp/samples/cmake",
)


def run_cmake(
    backend: str, *, environment: dict[str, str] | None = None, **variables: str | Path
) -> str:
    """Returns the output of cmake/cann.cmake, with the prefix FAILS if it fails."""
    cann_variables = {"ASCEND_HOME_PATH", "SOC_VERSION"}
    definitions = {"NGRAM_NPU_ASCENDC": backend, **variables}
    command = ["cmake", *(f"-D{name}={value}" for name, value in definitions.items())]
    result = subprocess.run(
        [*command, "-P", ROOT / "cmake/cann.cmake"],
        env={k: v for k, v in os.environ.items() if k not in cann_variables} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    output = " ".join((result.stdout + result.stderr).split())
    return ("FAILS " if result.returncode else "") + output


def make_cann(root: Path, folder: str) -> Path:
    path = root / folder / "ascendc.cmake"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str | Path]:
    """CMake variables with the paths of a CANN, which a test creates, and of a torch_npu."""
    library = tmp_path / "torch_npu/lib/libtorch_npu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    return {
        "ASCEND_HOME_PATH": tmp_path / "cann",
        "SOC_VERSION": "Ascend910B3",
        "NGRAM_NPU_TORCH_NPU": tmp_path / "torch_npu",
    }


def test_build_finds_cann_in_each_layout_and_prefers_the_newest(
    tmp_path: Path, variables: dict[str, Any]
) -> None:
    for folder in reversed(CMAKE_FOLDERS):
        file = make_cann(tmp_path / "cann", folder)
        expected = f"The NPU backend is built for Ascend910B3 and {tmp_path}/torch_npu, with {file}"
        for backend in ("ON", "AUTO"):
            assert run_cmake(backend, **variables).removeprefix("-- ") == expected


@pytest.mark.parametrize("cached", [{}, {"ASCEND_HOME_PATH": "", "SOC_VERSION": ""}])
def test_environment_variables_replace_missing_or_empty_cached_variables(
    tmp_path: Path, variables: dict[str, Any], cached: dict[str, str]
) -> None:
    make_cann(tmp_path / "cann", CMAKE_FOLDERS[0])
    torch_npu = variables.pop("NGRAM_NPU_TORCH_NPU")
    environment = {name: str(value) for name, value in variables.items()}
    output = run_cmake("AUTO", environment=environment, NGRAM_NPU_TORCH_NPU=torch_npu, **cached)
    assert "built for Ascend910B3" in output


def test_missing_cann_disables_or_fails_the_build(tmp_path: Path) -> None:
    reason = "ASCEND_HOME_PATH is not set (source CANN's set_env.sh)"
    assert run_cmake("AUTO") == f"-- The NPU backend is left out: {reason}"
    assert re.match(rf"FAILS .*NGRAM_NPU_ASCENDC=ON: {re.escape(reason)}", run_cmake("ON"))
    file_reason = f"there is no ascendc.cmake under ASCEND_HOME_PATH={tmp_path} "
    output = run_cmake("AUTO", ASCEND_HOME_PATH=tmp_path)
    assert f"-- The NPU backend is left out: {file_reason}" in output
    output = run_cmake("ON", ASCEND_HOME_PATH=tmp_path)
    assert output.startswith("FAILS ")
    assert file_reason in output


@pytest.mark.parametrize("backend", ["ON", "AUTO"])
def test_missing_soc_version_or_torch_npu_fails_the_build(
    tmp_path: Path, variables: dict[str, Any], backend: str
) -> None:
    make_cann(tmp_path / "cann", CMAKE_FOLDERS[0])
    soc_version = variables.pop("SOC_VERSION")
    output = run_cmake(backend, **variables)
    assert output.startswith("FAILS ")
    assert "SOC_VERSION is not set" in output
    assert "-DNGRAM_NPU_ASCENDC=OFF" in output
    (tmp_path / "torch_npu/lib/libtorch_npu.so").unlink()
    output = run_cmake(backend, SOC_VERSION=soc_version, **variables)
    assert output.startswith("FAILS ")
    assert f"NGRAM_NPU_TORCH_NPU={tmp_path}/torch_npu has no lib/libtorch_npu.so" in output


@pytest.mark.parametrize(
    ("has_kernels", "chips"),
    [
        (True, ("Ascend910B1", "ascend910b4-1", "Ascend910_9362", "Ascend950PR_9599")),
        # 910B without a number is CANN's name for a chip of the previous generation.
        (False, ("Ascend910B", "Ascend910A", "Ascend310P3", "Tesla")),
    ],
)
def test_chip_without_kernels_fails_the_build(
    tmp_path: Path, variables: dict[str, Any], has_kernels: bool, chips: tuple[str, ...]
) -> None:
    make_cann(tmp_path / "cann", CMAKE_FOLDERS[0])
    for chip in chips:
        output = run_cmake("ON", **{**variables, "SOC_VERSION": chip})
        assert output.startswith("FAILS ") != has_kernels
        message = (
            f"built for {chip} and " if has_kernels else f"SOC_VERSION={chip}: expected a 910B"
        )
        assert message in output


@pytest.mark.slow  # needs `make test-slow`
def test_only_the_launcher_and_the_kernels_are_installed() -> None:
    files = [path.relative_to(BUILD / "launch") for path in (BUILD / "launch").rglob("*.[os]*")]
    assert {path.name for path in files if path.parent.name == "ngram_npu"} == {
        "libngram_npu_launch.so",
        "libngram_npu_cpu.so",
        "ngram_npu_kernels.o",
    }
    assert {str(path.parent) for path in files} == {"ngram_npu"}
