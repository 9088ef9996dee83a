"""Builds a changed copy of the project in a separate build folder, and runs the tests that should
notice the fault, in stages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pybind11
import pytest
from twins import ROOT

from tools.verify.mutants.mutant import Mutant

SCRATCH = ROOT / "build" / "mutants"
SOURCE, BUILD, STAGE = (SCRATCH / part for part in ("source", "build", "stage"))
CPP_TESTS = BUILD / "tests/cpp"
COPIED = ("CMakeLists.txt", "cmake", "csrc", "python/ngram_npu", "tests/cpp")
JOBS = f"-j{os.cpu_count()}"
SECONDS = 600
"""Tests that take longer do not end."""


class BrokenMutantError(Exception):
    """The fault does not compile, so it does not test the tests."""


def caught(mutant: Mutant) -> str:
    """The stage at which the tests noticed the fault, and how; empty if none did."""
    copy_sources({mutant.file: mutant.changed()})
    for name, stage in stages_for(mutant.file).items():
        if said := stage():
            return f"{name}: {said}"
    return ""


def copy_sources(changed: Mapping[str, str]) -> None:
    """A file that is the same stays untouched, so that only what depends on the others is built."""
    wanted = {}
    for part in COPIED:
        path = ROOT / part
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                wanted[file.relative_to(ROOT)] = file.read_bytes()
    for name, text in changed.items():
        wanted[Path(name)] = text.encode()
    for file in SOURCE.rglob("*"):
        if file.is_file() and file.relative_to(SOURCE) not in wanted:
            file.unlink()
    for name, content in wanted.items():
        copy = SOURCE / name
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def build(*targets: str) -> None:
    if not (BUILD / "build.ninja").exists():
        launcher = shutil.which("ccache") or ""
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        configure = ["cmake", "-G", "Ninja", "-S", SOURCE, "-B", BUILD]
        configure += ["-DNGRAM_NPU_CUDA=OFF", "-DNGRAM_NPU_ASCENDC=OFF"]
        configure += ["-DNGRAM_NPU_TESTS=ON"]
        # A change may leave something unused, and none is timed.
        configure += ["-DNGRAM_NPU_WERROR=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
        configure += [
            "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF",
            "-DSKBUILD_PROJECT_VERSION=mutant",
        ]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja', path=tools)}"]
        configure += [f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", BUILD, JOBS, "--target", *targets]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BrokenMutantError(done.stdout[-4000:])


def cpp_suite() -> str:
    build(f"{CPP_TESTS.relative_to(BUILD)}/all")
    command = ["ctest", "--test-dir", CPP_TESTS, JOBS, "--stop-on-failure", "--output-on-failure"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout[-4000:] if done.returncode != 0 else ""


def python_tests(*files: str, choice: str = "") -> Callable[[], str]:
    def run() -> str:
        build("_C", "ngram_npu", "ngram_npu_cpu")
        shutil.rmtree(STAGE, ignore_errors=True)
        shutil.copytree(SOURCE / "python", STAGE)
        command = ["cmake", "--install", BUILD, "--prefix", STAGE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        environment = {"PYTHONPATH": str(STAGE)}
        # An editable install would come before it.
        probe = "import ngram_npu; assert ngram_npu.__version__ == 'mutant', 'make install first'"
        subprocess.run([sys.executable, "-c", probe], env={**os.environ, **environment}, check=True)
        return failing_tests([*files, "-k", choice], environment, SECONDS)

    return run


def failing_tests(arguments: Sequence[str], environment: Mapping[str, str], seconds: int) -> str:
    """pytest's output up to the first failure; empty if all tests pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "CI": "1", **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "the tests do not end"
    if done.returncode == pytest.ExitCode.OK:
        return ""
    if done.returncode != pytest.ExitCode.TESTS_FAILED and done.returncode > 0:
        raise RuntimeError(f"the tests could not be run: {done.stdout}{done.stderr}")
    # A process that dies at once prints nothing, but that is not a success.
    return done.stdout[-4000:] or f"pytest ended with {done.returncode}"


ON_THE_CPU = "not cuda_ and not ascendc_"
PARITY = ("tests/ops/test_errors.py", "tests/ops/test_parity.py")  # the quick one first
INDEX = tuple(f"tests/index/test_{name}.py" for name in ("index", "ladder_index"))
CSRC_STAGES = {
    "C++ suite": cpp_suite,
    "errors and parity": python_tests(*PARITY, choice=ON_THE_CPU),
    "index": python_tests(*INDEX, choice=ON_THE_CPU),
}
INDEX_STAGES = {
    "C++ suite": cpp_suite,
    "index": python_tests(*INDEX, choice=ON_THE_CPU),
    "errors and parity": python_tests(*PARITY, choice=f"index_ and {ON_THE_CPU}"),
}
PYTHON_STAGES = {
    "async state": python_tests(
        *(
            f"tests/async_state/test_{name}.py"
            for name in ("config", "state", "failures", "on_host", "loop")
        )
    ),
}


HOST_STAGES = {"host drafting": python_tests("tests/host_drafting")}


def stages_for(file: str) -> dict[str, Callable[[], str]]:
    """The stages that may notice a fault in the file; others are left out to save minutes."""
    if file in ("python/ngram_npu/host_drafting.py", "csrc/numpy/stream_drafter.cpp"):
        return HOST_STAGES
    if file.startswith("python/"):
        return PYTHON_STAGES
    return INDEX_STAGES if "index" in file else CSRC_STAGES
