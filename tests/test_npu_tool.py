"""tools/npu without an NPU: arguments, commands, and what it writes of a bench on the CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
    assert found["machine"]["versions"]["torch"] == torch.__version__
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
    done = SimpleNamespace(returncode=code, stdout=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    exit_code, found = run("--steps", "parity,bench", "--device", "cpu", "--sizes", "1x64")
    assert found["parity"]["ok"] is ok
    assert exit_code == (0 if ok else 1)
    assert ("bench" in found) is ok  # nothing is measured that is not right


def test_a_build_that_fails_is_written_down(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fails)
    code, found = run("--device", "cpu", "--soc-version", "Ascend910B3")
    assert code == 1
    assert "CalledProcessError" in found["build"]["error"]
    assert "parity" not in found


@pytest.mark.parametrize(("kernels", "reason"), [(9, ""), (0, "torch_npu is not installed")])
def test_a_build_is_good_where_its_kernels_load(
    run: Run, monkeypatch: pytest.MonkeyPatch, kernels: int, reason: str
) -> None:
    backends = {"npu": {"name": "npu", "kernels": kernels, "reason": reason}}
    done = SimpleNamespace(stdout="a warning\n" + json.dumps(backends))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    code, found = run("--steps", "build", "--device", "cpu", "--soc-version", "Ascend910B3")
    assert code == (0 if kernels else 1)
    assert found["build"]["kernels"] == kernels
    assert found["build"]["soc_version"] == "Ascend910B3"
    assert found["build"].get("error", "") == reason
