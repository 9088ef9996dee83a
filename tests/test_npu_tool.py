"""tools/npu without an NPU: arguments, commands, and what it writes of a bench on the CPU."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ngram_npu.vllm.ascend import triton_ngram_spec_decode

from tools.npu import bench, check

BENCH = ["--steps", "bench", "--device", "cpu", "--sizes", "2x1k", "--rounds", "2"]
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "npu.json"
        code = check.main([*arguments, "--json", str(file)])
        return code, json.loads(file.read_text()) if file.exists() else {}

    return run


def test_dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a dry run runs nothing")

    monkeypatch.setattr(subprocess, "run", forbidden)
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    assert check.main(["--dry-run", "--soc-version", "Ascend910B3"]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("==")] == [
        "== build",
        "== parity",
        "== bench",
    ]
    assert "cmake.define.NGRAM_NPU_ASCENDC=ON" in said
    assert "cmake.define.SOC_VERSION=Ascend910B3" in said
    assert "'npu]' tests/ops/test_parity.py" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "build,test"], "'test' is none of build, parity, bench"),
        (["--sizes", "1x1k,0x4"], "'0x4': expected BATCHxCONTEXT"),
        (["--rounds", "0"], "must be at least 1, got 0"),
        (["--device", "gpu"], "invalid choice: 'gpu'"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert check.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_what_is_written_without_a_peer(run: Run) -> None:
    code, found = run(*BENCH)
    assert code == 0
    assert found["command"] == "python -m tools.npu " + " ".join(BENCH)
    assert found["machine"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert "unknown" not in found["machine"]
    assert "build" not in found
    assert list(found["bench"]["skipped"]) == [bench.PEER]
    (result,) = found["bench"]["results"]
    assert result["size"] == "2x1k"
    assert result["ratio"] is None
    assert result["same_drafts"] is None
    assert result["us"]["ours"]["device"]["min"] > 0


def _wrong(*arguments: Any, **lookup: Any) -> tuple[torch.Tensor, ...]:
    following, drafts, counts, sampled = triton_ngram_spec_decode(*arguments, **lookup)
    return following, drafts + 1, counts, sampled


def test_beside_a_peer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([2.0, 6.0, 2.0, 8.0])  # ours, theirs, ours, theirs
    monkeypatch.setattr(bench, "find_peer", lambda: (triton_ngram_spec_decode, ""))
    monkeypatch.setattr(bench, "timed", lambda *_: dict.fromkeys(("device", "host"), next(turns)))
    code, found = run(*BENCH)
    (result,) = found["bench"]["results"]
    assert code == 0
    assert found["bench"]["skipped"] == {}
    assert result["same_drafts"] is True
    assert result["us"][bench.PEER]["device"]["median"] == 7
    assert result["ratio"][bench.PEER]["median"] == 3.5


def test_a_peer_that_drafts_otherwise(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_peer", lambda: (_wrong, ""))
    code, found = run(*BENCH)
    assert code == 1
    assert found["bench"]["ok"] is False
    assert found["bench"]["results"][0]["same_drafts"] is False


@pytest.mark.parametrize(
    ("said", "code", "ok"),
    [
        ("18 passed, 90 deselected in 3.1s", 0, True),
        ("17 passed, 1 failed in 3.1s", 1, False),
        ("108 deselected in 0.1s", 5, False),
        ("108 deselected in 0.1s", 0, False),
    ],
)
def test_parity_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch, said: str, code: int, ok: bool
) -> None:
    done = subprocess.CompletedProcess([], code, said)
    monkeypatch.setattr(check, "_run", lambda *_, **__: done)
    exit_code, found = run("--steps", "parity,bench", "--device", "cpu", "--sizes", "1x64")
    assert found["parity"]["ok"] is ok
    assert exit_code == (0 if ok else 1)
    assert ("bench" in found) is ok  # nothing is measured that is not right


def test_a_build_that_fails_is_written_down(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Here no package can be imported and no device is there, as where nothing was ever built."""
    fails = "import sys; print('x' * 99_999); print('no compiler', file=sys.stderr); sys.exit(3)"
    install = [sys.executable, "-c", fails, "SOC_VERSION=Ascend910B3"]
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setattr(check, "_build_commands", lambda _: [install, []])
    monkeypatch.setitem(sys.modules, "ngram_npu.replay", None)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    code, found = run("--device", "npu")
    assert code == 1
    assert found["build"]["error"] == "pip ended with 3"
    assert found["build"]["output"].endswith("no compiler\n")
    assert len(found["build"]["output"]) == check.KEPT
    assert "no compiler" in capfd.readouterr().out
    assert "parity" not in found
    assert "ModuleNotFoundError" in found["machine"]["unknown"]["npu"]
    assert "ModuleNotFoundError" in found["machine"]["unknown"]["processor"]
    assert found["machine"]["versions"]["numpy"]


def test_a_package_that_does_not_start_is_written_down(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = [sys.executable, "-c", "", "SOC_VERSION=Ascend910B3"]
    doctor = [sys.executable, "-c", "raise ImportError('undefined symbol')"]
    monkeypatch.setattr(check, "_build_commands", lambda _: [install, doctor])
    code, found = run("--steps", "build", "--device", "cpu")
    assert code == 1
    assert "ImportError: undefined symbol" in found["build"]["output"]


def test_parity_that_fails_says_which_and_how(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('op', ['right', 'wrong'])\n"
        "def test_samples(op): assert op == 'right', 'got 1, expected 2'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    monkeypatch.setattr(check, "_parity_commands", lambda _: [command])
    code, found = run("--steps", "parity", "--device", "cpu")
    assert code == 1
    assert (found["parity"]["passed"], found["parity"]["failed"]) == (1, 1)
    (failing,) = found["parity"]["failing"]
    assert failing.endswith("test_one.py::test_samples[wrong]")
    assert "got 1, expected 2" in found["parity"]["output"]


def test_an_error_is_told_with_its_cause(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("does not load") from OSError("libascend.so is missing")

    monkeypatch.setitem(check._RUN, "build", fails)
    _, found = run("--device", "cpu")
    expected = "RuntimeError: does not load (from OSError: libascend.so is missing)"
    assert found["build"]["error"] == expected


def test_what_was_found_is_written_when_interrupted(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(check._RUN, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("--device", "cpu")
    found = json.loads((tmp_path / "npu.json").read_text())
    assert found["build"] == {"ok": False, "error": "interrupted"}
    assert "versions" in found["machine"]


@pytest.mark.parametrize(("kernels", "reason"), [(9, ""), (0, "torch_npu is not installed")])
def test_a_build_is_good_where_its_kernels_load(
    run: Run, monkeypatch: pytest.MonkeyPatch, kernels: int, reason: str
) -> None:
    backends = {"npu": {"name": "npu", "kernels": kernels, "reason": reason}}
    done = subprocess.CompletedProcess([], 0, "a warning\n" + json.dumps(backends))
    monkeypatch.setattr(check, "_run", lambda *_, **__: done)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    code, found = run("--steps", "build", "--device", "cpu", "--soc-version", "Ascend910B3")
    assert code == (0 if kernels else 1)
    assert found["build"]["kernels"] == kernels
    assert found["build"]["soc_version"] == "Ascend910B3"
    assert found["build"].get("error", "") == reason
