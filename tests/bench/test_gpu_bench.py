"""The comparison on a GPU, with the CPU in its place: everything but the clock is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu.host import Host

from tools.bench.__main__ import main
from tools.bench.data import Workload, make_workload
from tools.bench.gpu import ops, peers, runtime
from tools.bench.gpu.ops import GPU_OPS, LATEST, SCAN, STEPS, GpuOp
from tools.bench.gpu.ours import Fused, Step
from tools.bench.options import BenchError, Options, Size

OPTIONS = Options(sizes=(Size(6, 300),), rounds=3, data_kind="nomatch")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(ops, "runtime_of", lambda op, device: found)
    return found


@pytest.mark.parametrize(
    ("op", "peers", "compared"),
    [
        ("ngram_propose", (LATEST,), None),
        ("ngram_step_", (LATEST, "read"), None),
        ("ngram_step_", ("ours:max_n=4",), True),
        ("ngram_index_step_", (SCAN, LATEST), True),
        ("index-build", (), None),
        ("correct_spec_state_", (), None),
    ],
)
def test_what_a_run_finds(
    op: str, peers: tuple[str, ...], compared: bool | None, host: Host
) -> None:
    reported: list[dict[str, Any]] = []
    results, skipped = GPU_OPS[op].run(replace(OPTIONS, peers=peers), reported.append)
    assert skipped == {}
    assert results == reported
    (result,) = results
    assert (result["size"], result["steps_per_round"]) == ("6x300", STEPS)
    assert result["same_drafts"] is compared
    assert result["clocks_before_and_after"] == ["1980 MHz"] * 2
    if op in ("index-build", "correct_spec_state_"):
        assert result["drafted_share"] is None
    else:
        assert result["drafted_share"] > 0.5
    assert set(result["ratio"]) == set(peers)
    assert result["ours"]["median_us"] > 0
    assert host.laps == (1 + len(peers)) * (3 + 2)
    # Who need not read the tokens is not compared to that.
    assert ("ours_over_read" in result["floors"]) == (
        op in ("ngram_propose", "ngram_step_", "index-build")
    )


def test_a_floor_is_of_the_live_tokens() -> None:
    options = replace(OPTIONS, sizes=(Size(6, 4096, "-one-long"),), peers=("read",))
    (result,), _ = GPU_OPS["ngram_step_"].run(options, lambda _: None)
    assert 4 * 4096 < result["floors"]["live_bytes"] <= 4 * (4096 + 5 * 3)
    ragged = make_workload(Size(200, 1 << 15, "-ragged"), OPTIONS).lengths[0]
    assert ragged.max() == 1 << 15
    assert 512 < np.median(ragged) < 4096


class Clockwork(runtime.Cuda):
    """Graphs are lists, and each work takes what it says."""

    def _graph(self, works: list[Any]) -> Any:
        return works

    def _time(self, graph: Any, restore: Any = lambda: None) -> float:
        restore()
        return float(sum(work() for work in graph))

    def _spoil(self) -> float:
        return 100.0


@pytest.mark.parametrize("cold", [False, True])
def test_a_time_is_without_what_empties_the_cache(
    cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    restored: list[int] = []
    cuda = Clockwork()
    once = cuda.prepare([lambda: 3.0, lambda: 4.0], lambda: restored.append(1), cold)
    assert once() == 7.0
    # Once more for plain calls, of which the host's part is taken.
    assert len(restored) == 2
    assert cuda.host_us > 0


def test_floors() -> None:
    assert Host().floors(3.0, 16_000) == {
        "copy_gb_per_s": 4000.0,
        "read_gb_per_s": 4000.0, "empty_node_us": 1.5, "ours_above_empty_us": 1.5,
        "live_bytes": 16_000, "read_us": 0.004, "ours_over_read": 750.0,
    }  # fmt: skip


def test_a_lap_begins_where_the_last_one_began() -> None:
    workload = make_workload(Size(3, 200), OPTIONS)
    contestant = Step(workload, OPTIONS)
    contestant.load(workload)
    laps = []
    for _ in range(2):
        contestant.restore()
        laps.append([contestant.drafts(contestant.step(n)) for n in range(STEPS)])
        assert contestant.num_tokens.tolist() == workload.lengths[STEPS].tolist()
    assert laps[0] == laps[1]


def test_corrections_stay_within_their_blocks() -> None:
    workload = make_workload(Size(5, 100), OPTIONS)
    contestant = Fused(workload, OPTIONS)
    contestant.restore()
    for number in range(workload.steps):
        contestant.step(number)
    assert (contestant.tensors["slot_mapping"] >= 0).all()


class Broken(Step):
    """A peer's code, which may fail anywhere."""

    where = ""

    def __init__(self, *args: Any) -> None:
        self._fail("made")
        super().__init__(*args)

    def step(self, number: int) -> Any:
        self._fail("run")
        return super().step(number)

    def drafts(self, result: Any) -> Any:
        drafts = super().drafts(result)
        return drafts[::-1] if self.where == "compared" else drafts

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise TypeError("of /some/where/else.py\n:  no such argument" + 300 * "!")


@pytest.mark.parametrize("where", ["made", "run", "compared", "captured"])
def test_a_peer_that_fails_is_left_out_and_ours_is_not(
    where: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = host.prepare

    def capture(works: list[Any], restore: Any, cold: bool) -> Any:
        """It refuses what a plain call does not."""
        if isinstance(restore.__self__, Broken):
            restore.__self__._fail("captured")
        return honest(works, restore, cold)

    monkeypatch.setattr(host, "prepare", capture)
    monkeypatch.setattr(Broken, "where", where)
    options = replace(OPTIONS, sizes=(Size(6, 300), Size(4, 200)), peers=("broken", LATEST))
    op = GpuOp("ngram_step_", {"scan": Step, "broken": Broken}, (), (), {"broken": Broken})
    results, skipped = op.run(options, lambda _: None)
    assert [set(result["ratio"]) for result in results] == [{LATEST}, {LATEST}]
    if where == "compared":
        assert "broken and ours draft differently" in skipped["broken"]
    else:
        assert skipped["broken"].startswith("TypeError: of else.py : no such argument!!!")
        assert len(skipped["broken"]) == 300
    with pytest.raises((BenchError, TypeError), match=r"draft differently|no such argument"):
        op.run(replace(OPTIONS, peers=("ours:engine=broken",)), print)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of it but the GPU; a fault at a later size leaves what was measured before."""
    file = tmp_path / "found.json"
    command = ["ngram_step_", "--device", "cuda", "--rounds", "1", "--data-kind", "nomatch"]
    command += ["--peer", LATEST, "--peer", "vllm-v2", "--json", str(file), "--sizes", "2x40"]
    monkeypatch.setattr(runtime, "describe", lambda device: {"name": device})
    monkeypatch.setattr(peers, "has_triton", lambda: False)
    assert main(command) == 0
    found = json.loads(file.read_text())
    assert set(found["results"][0]["ratio"]) == {LATEST}
    assert found["skipped"] == {"vllm-v2": "Triton is not installed"}
    assert found["machine"]["cuda"] == {"name": "cuda"}
    assert "unfinished" not in found

    def broken(size: Size, options: Options) -> Workload:
        if size.batch == 3:
            raise RuntimeError("CUDA error")
        return make_workload(size, options)

    monkeypatch.setattr(ops, "make_workload", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        main([*command, "4x40", "3x40"])
    found = json.loads(file.read_text())
    assert [result["size"] for result in found["results"]] == ["2x40", "4x40"]
    assert found["unfinished"] is True


class Device:
    """Clocks of a host and of a device that works off what the host gives it, in microseconds;
    with the calls of `torch.cuda` and of a graph that the timing needs."""

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
    device = Device(launch_us)
    monkeypatch.setattr(torch.cuda, "_sleep", device._sleep)
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    cuda = runtime.Cuda()
    restored: list[int] = []
    assert cuda._time(device, lambda: restored.append(1)) == pytest.approx(7)
    first = len(restored)
    assert (first > 1) == (launch_us > 130)
    assert cuda._time(device, lambda: restored.append(1)) == pytest.approx(7)
    assert len(restored) == first + 1, "the longer wait was not kept"
    device.launch_us = 1e9
    with pytest.raises(BenchError, match="the host is slower"):
        cuda._time(device)
