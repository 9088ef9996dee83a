"""Tests the wheel: its tag, the requirements of its build, its use without source tree, compiler or
torch, and the imports and exports of its libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import ngram_npu
import pytest
from ngram_npu import _library
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

WHEEL = Path(os.environ.get("NGRAM_NPU_WHEEL", "")).resolve()
ROOT = Path(__file__).resolve().parents[2]
needs_wheel = pytest.mark.skipif(
    WHEEL.suffix != ".whl", reason="`make test` names the wheel in NGRAM_NPU_WHEEL"
)


@needs_wheel
@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="the NPU backend needs CANN")
def test_wheel_has_the_tag_of_auditwheel_and_vendors_no_library() -> None:
    assert WHEEL.stem.rpartition("-")[2].startswith("manylinux_"), WHEEL.name
    with zipfile.ZipFile(WHEEL) as wheel:
        libraries = {Path(name).name.split(".")[0] for name in wheel.namelist() if ".so" in name}
    assert all(name == "_C" or name.startswith("libngram_npu") for name in libraries), libraries


@pytest.mark.parametrize(
    ("environment", "torch", "cuda"),
    [
        ({}, "ON", "AUTO"),
        ({"NGRAM_NPU_TORCH": "0"}, "OFF", "AUTO"),
        ({"NGRAM_NPU_TORCH": "OFF", "NGRAM_NPU_CUDA": "OFF"}, "OFF", "OFF"),
    ],
)
def test_build_options_in_environment_combine(
    environment: dict[str, str], torch: str, cuda: str
) -> None:
    """CMake always gets both options, because a build folder keeps those of earlier builds."""
    settings = SettingsReader.from_file(
        ROOT / "pyproject.toml", state="wheel", env=environment
    ).settings
    assert settings.cmake.define == {"NGRAM_NPU_TORCH": torch, "NGRAM_NPU_CUDA": cuda}
    assert settings.build.requires == (["torch==2.13.0"] if torch == "ON" else [])
    project = (ROOT / "pyproject.toml").read_text()
    (requirements,) = re.findall(r"^requires = .*$", project, re.MULTILINE)
    assert "torch==" not in requirements


LIBRARIES = _library.cpu_library_path().parent

USER_CODE = """
import sys
import numpy as np
import ngram_npu

assert "torch" not in sys.modules
tokens = np.array([[1, 2, 3, 1, 2, 0]], np.int32)
lengths = np.array([5], np.int32)
proposer = ngram_npu.NgramProposer(ngram_npu.NgramConfig())
step = proposer.step(tokens, lengths, np.array([[3]], np.int32))
assert step.draft_token_ids.tolist() == [[1, 2, 3, 1, 2]], step
"""


@needs_wheel
def test_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    pip = [home / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", WHEEL], check=True)
    shutil.rmtree(home / "include", ignore_errors=True)

    conversation = tmp_path / "one.jsonl"
    turn = {"prompt_token_ids": [1, 2, 3, 9], "completion_token_ids": [1, 2, 3, 9]}
    conversation.write_text(json.dumps({"id": "1", "turns": [turn]}))
    variables = {"PATH": str(home / "bin")}  # neither a compiler nor system tools
    for command in (
        [home / "bin/python", "-c", USER_CODE],
        [home / "bin/ngram-npu", "doctor"],
        [home / "bin/python", "-m", "ngram_npu_cli", "doctor"],
        [home / "bin/ngram-npu", "replay", "--tokenizer", "ids", conversation],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "torch is not installed" in subprocess.check_output(
        [home / "bin/ngram-npu", "doctor"], cwd=tmp_path, env=variables, text=True
    )


def _read_symbols(library: str) -> tuple[set[str], set[str]]:
    """Returns the symbols that a library exports, and those that it needs without a version:
    symbols of the C and C++ runtimes have versions, which auditwheel checks."""
    command = ["readelf", "-W", "--dyn-syms", next(LIBRARIES.glob(library))]
    rows = [line.split() for line in subprocess.check_output(command, text=True).splitlines()]
    symbols = [row[6:8] for row in rows if len(row) >= 8 and row[4] in {"GLOBAL", "UNIQUE"}]
    exported = {name.split("@")[0] for index, name in symbols if index != "UND"}
    return exported, {name for index, name in symbols if index == "UND" and "@" not in name}


@pytest.mark.parametrize(
    ("library", "exports"),
    [
        ("libngram_npu.so", r"ngram_npu_\w+"),
        ("libngram_npu_cpu.so", r"ngram_npu_cpu_\w+"),
        ("_C*.so", r"PyInit__C"),
    ],
)
def test_library_exports_only_its_own_symbols(library: str, exports: str) -> None:
    exported, _ = _read_symbols(library)
    assert exported
    assert {name for name in exported if not re.fullmatch(exports, name)} == set()


def test_torch_library_needs_only_the_stable_abi() -> None:
    """The only other symbols are those with which it raises ValueError."""
    _, needed = _read_symbols("libngram_npu.so")
    allowed = r"(aoti_)?torch_\w+|PyErr_SetString|PyExc_ValueError|ngram_npu_cpu_\w+"
    assert {name for name in needed if not re.fullmatch(allowed, name)} == set()


def test_torch_library_raises_value_errors_through_pybind11() -> None:
    """From 2.15 on, torch converts all other exceptions of operators to RuntimeError. The tests of
    errors detect such exceptions only with that torch (.github/workflows/ci.yml)."""
    assert b"N8pybind1111value_errorE" in (LIBRARIES / "libngram_npu.so").read_bytes()


def test_architecture_with_ptx_has_its_own_launch_bounds() -> None:
    """Only the number of an architecture distinguishes the code for PTX from that for a binary."""
    text = (ROOT / "CMakeLists.txt").read_text()
    (architectures,) = re.findall(r'set\(NGRAM_NPU_CUDA_ARCHITECTURES "([^"]+)"', text)
    (number,) = re.findall(r"(\d+)-virtual", architectures)
    assert f"{number}-real" not in architectures
    guard = f"#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == {number}0\n"
    lookup = (ROOT / "csrc" / "cuda" / "lookup.cuh").read_text()
    assert guard + "constexpr int32_t kLookupBlocks = 1;\n#else" in lookup


def test_minimum_torch_version_is_the_same_everywhere() -> None:
    major, minor = _library._MINIMUM_TORCH
    assert f'torch = ["torch>={major}.{minor}"]' in (ROOT / "pyproject.toml").read_text()
    target = f"TORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000ULL"
    assert target in (ROOT / "csrc/api/CMakeLists.txt").read_text()


@needs_wheel  # an editable install uses the source tree
def test_tests_import_the_installed_package() -> None:
    assert Path(sys.prefix).resolve() in Path(ngram_npu.__file__).resolve().parents
