"""How the build finds CANN, and its messages if something is missing. `make launch` tests the rest
of the build, with stand-ins that check what CANN is known to require."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from npu.npu_process import BUILD, ROOT

FOLDERS = (
    "tools/tikcpp/ascendc_kernel_cmake",
    "compiler/tikcpp/ascendc_kernel_cmake",
    "ascendc_devkit/tikcpp/samples/cmake",
)


def find(wish: str, *, environment: dict[str, str] | None = None, **given: str | Path) -> str:
    """cmake's output; checks that it fails if `wish` is FAILS."""
    known = {"ASCEND_HOME_PATH", "SOC_VERSION"}
    definitions = {"NGRAM_NPU_ASCENDC": wish, **given}
    done = subprocess.run(
        [
            "cmake",
            *(f"-D{name}={value}" for name, value in definitions.items()),
            "-P",
            ROOT / "cmake/cann.cmake",
        ],
        env={k: v for k, v in os.environ.items() if k not in known} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join((done.stdout + done.stderr).split())
    return ("FAILS " if done.returncode else "") + said


@pytest.fixture
def torch_npu(tmp_path: Path) -> Path:
    library = tmp_path / "torch_npu/lib/libtorch_npu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    return tmp_path / "torch_npu"


def make_cann(root: Path, folder: str) -> Path:
    path = root / folder / "ascendc.cmake"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("wish", ["ON", "AUTO"])
def test_cann_is_found(tmp_path: Path, torch_npu: Path, folder: str, wish: str) -> None:
    file = make_cann(tmp_path / "cann", folder)
    said = find(
        wish,
        ASCEND_HOME_PATH=tmp_path / "cann",
        SOC_VERSION="Ascend910_9391",
        NGRAM_NPU_TORCH_NPU=torch_npu,
    )
    expected = f"The NPU backend is built for Ascend910_9391, by {file}, for {torch_npu}"
    assert said.removeprefix("-- ") == expected


def test_by_the_environment(tmp_path: Path, torch_npu: Path) -> None:
    make_cann(tmp_path / "cann", FOLDERS[0])
    variables = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "SOC_VERSION": "Ascend910B3"}
    said = find("AUTO", environment=variables, NGRAM_NPU_TORCH_NPU=torch_npu)
    assert "built for Ascend910B3" in said


def test_by_the_environment_where_a_build_before_had_none(tmp_path: Path, torch_npu: Path) -> None:
    make_cann(tmp_path / "cann", FOLDERS[0])
    variables = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "SOC_VERSION": "Ascend910B3"}
    cached = {"ASCEND_HOME_PATH": "", "SOC_VERSION": "", "NGRAM_NPU_TORCH_NPU": torch_npu}
    assert "built for Ascend910B3" in find("AUTO", environment=variables, **cached)


def test_the_newest_layout_goes_first(tmp_path: Path, torch_npu: Path) -> None:
    first, *_ = [make_cann(tmp_path / "cann", folder) for folder in FOLDERS]
    said = find(
        "ON",
        ASCEND_HOME_PATH=tmp_path / "cann",
        SOC_VERSION="Ascend910B3",
        NGRAM_NPU_TORCH_NPU=torch_npu,
    )
    assert f"by {first}," in said


def test_without_cann(tmp_path: Path) -> None:
    no_variable = "ASCEND_HOME_PATH is not set (source CANN's set_env.sh)"
    assert find("AUTO") == f"-- The NPU backend is left out: {no_variable}"
    assert re.match(rf"FAILS .*NGRAM_NPU_ASCENDC=ON: {re.escape(no_variable)}", find("ON"))
    no_file = f"there is no ascendc.cmake under ASCEND_HOME_PATH={tmp_path} "
    assert f"-- The NPU backend is left out: {no_file}" in find("AUTO", ASCEND_HOME_PATH=tmp_path)
    said = find("ON", ASCEND_HOME_PATH=tmp_path)
    assert said.startswith("FAILS ")
    assert no_file in said


@pytest.mark.parametrize("wish", ["ON", "AUTO"])
def test_what_is_missing_beside_cann(tmp_path: Path, torch_npu: Path, wish: str) -> None:
    make_cann(tmp_path / "cann", FOLDERS[0])
    cann = tmp_path / "cann"
    said = find(wish, ASCEND_HOME_PATH=cann, NGRAM_NPU_TORCH_NPU=torch_npu)
    assert said.startswith("FAILS ")
    assert "SOC_VERSION is not set" in said
    assert "-DNGRAM_NPU_ASCENDC=OFF" in said
    (torch_npu / "lib/libtorch_npu.so").unlink()
    said = find(
        wish, ASCEND_HOME_PATH=cann, SOC_VERSION="Ascend910B3", NGRAM_NPU_TORCH_NPU=torch_npu
    )
    assert said.startswith("FAILS ")
    assert f"NGRAM_NPU_TORCH_NPU={torch_npu} has no lib/libtorch_npu.so" in said


@pytest.mark.parametrize(
    ("chip", "kernels"),
    [
        ("Ascend910B1", True),
        ("ascend910b4-1", True),
        ("Ascend910_9362", True),
        ("Ascend950PR_9599", True),
        ("Ascend910B", False),  # CANN's name for a chip of the generation before
        ("Ascend910A", False),
        ("Ascend310P3", False),
        ("Tesla", False),
    ],
)
def test_chips_without_kernels_are_refused(
    tmp_path: Path, torch_npu: Path, chip: str, kernels: bool
) -> None:
    make_cann(tmp_path / "cann", FOLDERS[0])
    said = find(
        "ON",
        ASCEND_HOME_PATH=tmp_path / "cann",
        SOC_VERSION=chip,
        NGRAM_NPU_TORCH_NPU=torch_npu,
    )
    if kernels:
        assert f"built for {chip}," in said
    else:
        assert said.startswith("FAILS ")
        assert f"SOC_VERSION={chip}: there are kernels for the 910B" in said


NEEDED = {"ASCEND_CANN_PACKAGE_PATH", "RUN_MODE", "SOC_VERSION", "ASCEND_KERNEL_LAUNCH_ONLY"}


@pytest.mark.parametrize("left_out", [None, *sorted(NEEDED)])
def test_what_the_stand_in_demands(tmp_path: Path, left_out: str | None) -> None:
    (tmp_path / "lib64").mkdir()
    given = dict.fromkeys(NEEDED, "ON") | {
        "ASCEND_CANN_PACKAGE_PATH": str(tmp_path),
        "SOC_VERSION": "Ascend910B3",
    }
    given.pop(left_out or "", None)
    definitions = [f"-D{name}={value}" for name, value in given.items()]
    done = subprocess.run(
        ["cmake", *definitions, "-P", ROOT / "tests/npu/cann/ascendc.cmake"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is (left_out is None)
    if left_out is not None:
        assert f"{left_out} is not set" in done.stderr


@pytest.mark.slow  # needs `make launch`
def test_what_is_built_is_installed_in_the_package() -> None:
    """CANN itself makes `lib`, which pyproject.toml keeps out of the wheel."""
    found = {path.relative_to(BUILD / "launch") for path in (BUILD / "launch").rglob("*.so")}
    assert {path.name for path in found if path.parent.name == "ngram_npu"} == {
        "libngram_npu_launch.so",
        "libngram_npu_ascendc.so",
        "libngram_npu_cpu.so",
    }
    others = {str(path.parent) for path in found} - {"ngram_npu"}
    exclude = re.search(r"^wheel\.exclude = (.+)$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert exclude is not None
    assert all(f'"{folder}/**"' in exclude[1] for folder in others)
