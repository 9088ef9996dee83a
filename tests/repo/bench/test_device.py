"""Tests the benchmark on a device, with the CPU as the device and a clock of the host."""

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

from tools.bench import device, measure
from tools.bench.__main__ import main, make_options, make_parser
from tools.bench.data import Workload, make_workload
from tools.bench.ops import OPS, base
from tools.bench.options import BenchError, Options, Size

OPTIONS = Options(sizes=(Size(6, 300),), rounds=3, data_kind="zipf", frontend="torch")
MEASURE_US = device.measure_us
DEVICE_OPS = {name: op for name, op in OPS.items() if "eager" in (op.device_peers or ())}


def measure_us_with_clock(work: device.Work, restore: device.Work, _: str) -> float:
    restore()
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


@pytest.fixture(autouse=True)
def _use_cpu_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "measure_us", measure_us_with_clock)
    monkeypatch.setattr(measure, "measure", device.measure)


@pytest.mark.parametrize(("policy", "k"), [("earliest", 1), ("latest", 4)])
@pytest.mark.parametrize("op", DEVICE_OPS)
def test_eager_peer_computes_the_same_as_the_operator(op: str, policy: str, k: int) -> None:
    options = replace(OPTIONS, match_policy=policy, k=k, peers=("eager",))
    skip_reasons: dict[str, str] = {}
    (result,) = DEVICE_OPS[op].run(options, skip_reasons)
    assert skip_reasons == {}
    assert result["same_drafts"] is True
    assert (result["size"], result["steps_per_round"]) == ("6x300", device.STEPS)
    assert 0 < result["drafted_share"] <= 1
    assert result["ratio"]["eager"] > 0


def test_fault_at_a_later_size_keeps_earlier_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "require_device", lambda op, name: "cpu")
    monkeypatch.setenv("NGRAM_NPU_BENCH_VLLM_PATH", str(tmp_path))
    file = tmp_path / "out.json"
    command = ["ngram_step_", "--device=cuda", "--rounds=1", "--data-kind=zipf", f"--json={file}"]
    command += ["--match-policy=latest", "--peer=eager", "--peer=vllm-v2", "--sizes", "2x40"]
    assert main(command) == 0
    document = json.loads(file.read_text())
    assert set(document["results"][0]["ratio"]) == {"eager"}
    assert "speculator.py, which does not exist" in document["skipped"]["vllm-v2"]
    assert "unfinished" not in document

    def fail_at_batch_3(size: Size, options: Options) -> Workload:
        if size.batch == 3:
            raise RuntimeError("CUDA error")
        return make_workload(size, options)

    monkeypatch.setattr(base, "make_workload", fail_at_batch_3)
    with pytest.raises(RuntimeError, match="CUDA error"):
        main([*command, "4x40", "3x40"])
    document = json.loads(file.read_text())
    assert [result["size"] for result in document["results"]] == ["2x40", "4x40"]
    assert document["unfinished"] is True


def test_make_gpu_runs_known_benches_within_nine_minutes() -> None:
    command = ["make", "--dry-run", "gpu-build", "gpu-test", "gpu-bench"]
    root = Path(__file__).resolve().parents[3]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert sum(map(int, re.findall(r"timeout (\d+) ", output))) <= 540
    benches = re.findall(r"-m tools\.bench (.*)", output)
    assert len(benches) == 7
    for line in benches:
        arguments = vars(make_parser().parse_args(shlex.split(line)))
        assert make_options(arguments).device == "cuda"
        assert OPS[arguments["op"]].device_peers is not None


class FakeGpu:
    """Replaces the functions of `torch.cuda` that the timing calls. `host` is the time on the host
    and `busy_until` the time at which the GPU finishes its work, both in us."""

    def __init__(self, launch_us: float) -> None:
        self.launch_us = launch_us
        self.host = self.busy_until = 0.0

    def _sleep(self, cycles: int) -> None:
        self.busy_until = max(self.busy_until, self.host) + cycles / 2000

    def replay(self) -> None:
        self.host += self.launch_us
        self.busy_until = max(self.busy_until, self.host) + 7

    def Event(self, enable_timing: bool) -> SimpleNamespace:  # noqa: N802
        event = SimpleNamespace(time=-1.0)
        event.record = lambda: event.__dict__.update(time=self.busy_until)
        event.query = lambda: event.time <= self.host
        event.synchronize = lambda: self.__dict__.update(host=max(self.host, event.time))
        event.elapsed_time = lambda end: (end.time - event.time) / 1e3
        return event


@pytest.mark.parametrize("launch_us", [5, 130, 3000])
def test_time_of_slow_launches_is_not_measured_as_device_time(
    launch_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(launch_us)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu._sleep)
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    restores: list[int] = []
    assert MEASURE_US(gpu.replay, lambda: restores.append(1), "cuda") == pytest.approx(7)
    assert (len(restores) > 1) == (launch_us > 130)  # if so, the GPU waits longer in another run
    gpu.launch_us = 1e9
    with pytest.raises(BenchError, match="the host took longer"):
        MEASURE_US(gpu.replay, lambda: None, "cuda")
