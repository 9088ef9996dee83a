"""The command line end to end, on sizes that take no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ngram_npu import _C

from tools.bench import environment, report
from tools.bench.cli import main
from tools.bench.ops import OPS
from tools.bench.ops.crossover import wake
from tools.bench.options import Options

QUICK = ["--rounds", "2", "--steps", "2", "--data-kind", "random"]
SPREAD = ("median", "p10", "p90", "mad", "min")


def check_document(found: dict[str, Any]) -> None:
    """The form that documents and plots rely on."""
    assert found["schema"] == 1
    for key, kind in {
        "op": str, "command": str, "date": str, "note": str, "machine": dict, "versions": dict,
        "settings": dict, "skipped": dict, "results": list,
    }.items():  # fmt: skip
        assert isinstance(found[key], kind), key
    assert {"cpu", "cores", "caches", "instruction_set"} <= found["machine"].keys()
    assert {"python", "numpy", "torch", "numba", "ngram_npu", "vllm"} <= found["versions"].keys()
    assert found["command"].startswith(f"python -m tools.bench {found['op']}")
    assert found["results"] or found["skipped"]


def check_comparison(result: dict[str, Any]) -> None:
    assert {"size", "batch", "context", "config", "cache", "frontend", "data"} <= result.keys()
    for figures in (result["ours"], *result["peers"].values()):
        assert {f"{name}_us" for name in SPREAD} <= figures.keys()
        assert 0 < figures["min_us"] <= figures["median_us"] <= figures["worst_step_us"]
        assert figures["what"]
    assert result["ratio"].keys() == result["ratio_spread"].keys() == result["peers"].keys()
    for peer, ratio in result["ratio"].items():
        assert ratio == result["ratio_spread"][peer]["median"] > 0


def run(*arguments: str, json_file: Path) -> dict[str, Any]:
    assert main([*arguments, "--json", str(json_file)]) == 0
    found: dict[str, Any] = json.loads(json_file.read_text())
    check_document(found)
    return found


@pytest.mark.parametrize("op", ["ngram_propose", "ngram_step_"])
@pytest.mark.parametrize("cache", ["hot", "l2-cold"])
def test_comparison(op: str, cache: str, tmp_path: Path) -> None:
    peers = ["--peer", "read", "--peer", "ours:match=latest"]
    found = run(op, "--sizes", "2x64", "3x128", "--cache", cache, *peers, *QUICK,
                json_file=tmp_path / "out.json")  # fmt: skip
    assert [r["size"] for r in found["results"]] == ["2x64", "3x128"]
    for result in found["results"]:
        check_comparison(result)
        assert result["cache"] == cache
        assert list(result["ratio"]) == ["read", "ours:match=latest"]


def test_absent_peer_is_skipped_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    found = run("ngram_step_", "--sizes", "1x64", "--peer", "vllm-numba", "--peer", "read",
                "--vllm-path", str(empty), *QUICK, json_file=tmp_path / "out.json")  # fmt: skip
    assert list(found["skipped"]) == ["vllm-numba"]
    assert list(found["results"][0]["peers"]) == ["read"]
    assert "skipped vllm-numba: " in capsys.readouterr().out
    assert str(tmp_path) not in json.dumps(found)


def test_call_overhead(tmp_path: Path) -> None:
    found = run("call-overhead", "--sizes", "1x64", "--peer", "proposer", "--peer", "no-op", *QUICK,
                json_file=tmp_path / "out.json")  # fmt: skip
    (result,) = found["results"]
    check_comparison(result)
    assert result["peers"]["no-op"]["median_us"] < result["ours"]["median_us"]


def test_vllm_propose(tmp_path: Path) -> None:
    found = run("vllm-propose", "--sizes", "4x256", "--peer", "ours:match=latest", *QUICK,
                json_file=tmp_path / "out.json")  # fmt: skip
    (result,) = found["results"]
    check_comparison(result)
    assert result["ours"]["what"].startswith("ngram_npu.vllm.NgramProposer.propose, engine: index")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.bench.ops import memory

    monkeypatch.setattr(memory, "STEPS", 300)
    monkeypatch.setattr(memory, "VARIANTS", ("numpy", "numpy-sliced"))
    found = run("memory", "--sizes", "4x256", json_file=tmp_path / "out.json")
    assert [r["variant"] for r in found["results"]] == ["numpy", "numpy-sliced"]
    for result in found["results"]:
        assert result["growth_bytes"] < 1 << 20


def test_memory_sees_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    import numpy as np

    from tools.bench.ops import memory

    buffer = np.ones(4 << 20, np.int32)
    memory._forget_peak()
    before = memory.resident()
    buffer.copy()
    assert memory._peak() - before > buffer.nbytes // 2
    assert memory.resident() - before < buffer.nbytes // 2


def test_crossover_figures() -> None:
    """One thread 100 us for 1M tokens; two take 50 + 30: equal at 30 * 2 / 100 of a million."""
    result = {
        "batch": 1, "context": 1_000_000, "ours": {"median_us": 80.0},
        "peers": {"ours:threads=1": {"median_us": 100.0}},
    }  # fmt: skip
    found = wake(result, threads=2)
    assert found["wake_us"] == 30.0
    assert found["break_even_tokens"] == 600_000


def test_every_op_has_sizes_and_known_peers() -> None:
    for op in OPS.values():
        assert op.sizes_of(Options())
        assert {p for p in op.peers if not p.startswith("ours:")} <= set(op.peer_makers)


@pytest.mark.parametrize(
    "wrong",
    [
        ["ngram_step_", "--sizes", "many"],
        ["ngram_step_", "--sizes", "1x64", "--peer", "nobody", *QUICK],
        ["ngram_step_", "--sizes", "1x64", "--engine", "magic", *QUICK],
        ["ngram_step_", "--config", "4"],
        ["ngram_step_", "--config", "4,2"],
        ["ngram_step_", "--sizes", "1x64", "--data", "nowhere.jsonl"],
    ],
)
def test_wrong_use_is_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == 2
    assert capsys.readouterr().err.startswith("tools.bench: ")


def test_thread_limit_is_put_back(tmp_path: Path) -> None:
    before = _C.num_threads()
    run("ngram_step_", "--sizes", "1x64", "--peer", "none", "--threads", "1", *QUICK,
        json_file=tmp_path / "out.json")  # fmt: skip
    assert _C.num_threads() == before


def test_command_keeps_no_private_path() -> None:
    given = [
        "op",
        "--json",
        "/a/b",
        "--sizes",
        "1x1k",
        "--vllm-path=/c",
        "--data",
        "/d",
        "--k",
        "3",
    ]
    assert report.command_line(given) == "python -m tools.bench op --sizes 1x1k --k 3"


def test_caches_are_read_from_the_system(tmp_path: Path) -> None:
    for number, (level, kind, size, cpus) in enumerate(
        [
            ("1", "Data", "48K", "0"),
            ("1", "Instruction", "32K", "0"),
            ("3", "Unified", "32M", "0-3,8"),
        ]
    ):
        index = tmp_path / f"index{number}"
        index.mkdir()
        (index / "level").write_text(level + "\n")
        (index / "type").write_text(kind + "\n")
        (index / "size").write_text(size + "\n")
        (index / "shared_cpu_list").write_text(cpus + "\n")
    found = environment.caches(tmp_path)
    assert found == {"L1d": "48K, shared by 1", "L3": "32M, shared by 5"}
    assert environment.caches(tmp_path / "none") == {}
