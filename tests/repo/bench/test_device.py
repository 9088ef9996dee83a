"""The bench on a device, with the CPU in its place: everything but the clock is the same."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools.bench import device
from tools.bench.__main__ import _options, _parser, main
from tools.bench.data import Workload, make_workload
from tools.bench.ops import OPS, base
from tools.bench.options import BenchError, Options, Size

OPTIONS = Options(sizes=(Size(6, 300),), rounds=3, data_kind="zipf", frontend="torch")
TIME_US = device.time_us
MEASURED = {name: op for name, op in OPS.items() if "eager" in (op.device_peers or ())}


def by_the_clock(work: device.Work, restore: device.Work, _: str) -> float:
    restore()
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is measured as a device is."""
    monkeypatch.setattr(device, "time_us", by_the_clock)
    monkeypatch.setattr(base, "measure", device.measure)


@pytest.mark.parametrize("policy", ["earliest", "latest"])
@pytest.mark.parametrize("op", MEASURED)
def test_what_a_run_finds(op: str, policy: str) -> None:
    """Eager torch drafts, merges and corrects what ours does, or this would raise."""
    options = replace(OPTIONS, match_policy=policy, peers=("eager",))
    skipped: dict[str, str] = {}
    (result,) = MEASURED[op].run(options, skipped)
    assert skipped == {}
    assert result["same_drafts"] is True
    assert (result["size"], result["steps_per_round"]) == ("6x300", device.STEPS)
    assert 0 < result["drafted_share"] <= 1
    assert result["ratio"]["eager"] > 0


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fault at a later size leaves what was measured before."""
    monkeypatch.setattr(device, "require", lambda op, name: "cpu")
    monkeypatch.setenv("NGRAM_NPU_BENCH_VLLM_PATH", str(tmp_path))
    file = tmp_path / "found.json"
    command = ["ngram_step_", "--device", "cuda", "--rounds", "1", "--data-kind", "zipf"]
    command += ["--match-policy", "latest", "--peer", "eager", "--peer", "vllm-v2"]
    command += ["--json", str(file), "--sizes", "2x40"]
    assert main(command) == 0
    found = json.loads(file.read_text())
    assert set(found["results"][0]["ratio"]) == {"eager"}
    assert found["skipped"].keys() == {"vllm-v2"}
    assert "speculator.py in the folder given as vLLM's" in found["skipped"]["vllm-v2"]
    assert "unfinished" not in found

    def broken(size: Size, options: Options) -> Workload:
        if size.batch == 3:
            raise RuntimeError("CUDA error")
        return make_workload(size, options)

    monkeypatch.setattr(base, "make_workload", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        main([*command, "4x40", "3x40"])
    found = json.loads(file.read_text())
    assert [result["size"] for result in found["results"]] == ["2x40", "4x40"]
    assert found["unfinished"] is True


def test_what_make_gpu_does() -> None:
    """Its stages end within nine minutes, and their benches are known."""
    command = ["make", "--dry-run", "gpu-build", "gpu-test", "gpu-bench"]
    root = Path(__file__).resolve().parents[3]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert sum(map(int, re.findall(r"timeout (\d+) ", told))) <= 540
    benches = re.findall(r"-m tools\.bench (.*)", told)
    assert len(benches) == 7
    for line in benches:
        given = vars(_parser().parse_args(shlex.split(line)))
        assert _options(given).device == "cuda"
        assert OPS[given["op"]].device_peers is not None


class Device:
    """Clocks of a host and of a GPU that works off what the host gives it, in microseconds; with
    the calls of `torch.cuda` that the timing needs."""

    def __init__(self, launch_us: float) -> None:
        self.launch_us = launch_us
        self.host = self.busy_until = 0.0

    def _sleep(self, cycles: int) -> None:
        self.busy_until = max(self.busy_until, self.host) + cycles / 2000

    def replay(self) -> None:
        self.host += self.launch_us
        self.busy_until = max(self.busy_until, self.host) + 7

    def Event(self, enable_timing: bool) -> SimpleNamespace:  # noqa: N802
        event = SimpleNamespace(at=-1.0)
        event.record = lambda: event.__dict__.update(at=self.busy_until)
        event.query = lambda: event.at <= self.host
        event.synchronize = lambda: self.__dict__.update(host=max(self.host, event.at))
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3
        return event


@pytest.mark.parametrize("launch_us", [5, 130, 3000])
def test_a_late_host_does_not_count(launch_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device(launch_us)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu._sleep)
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    restored: list[int] = []
    assert TIME_US(gpu.replay, lambda: restored.append(1), "cuda") == pytest.approx(7)
    assert (len(restored) > 1) == (launch_us > 130)
    gpu.launch_us = 1e9
    with pytest.raises(BenchError, match="the host is slower"):
        TIME_US(gpu.replay, lambda: None, "cuda")
