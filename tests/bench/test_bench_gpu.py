"""The comparison on a GPU, with the CPU in its place: everything but the clock is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_host import Host

from tools.bench.cli import main
from tools.bench.data import Workload, make_workload
from tools.bench.gpu import ops, runtime, vllm_peers
from tools.bench.gpu.contestant import GpuContestant
from tools.bench.gpu.measure import STEPS, floors
from tools.bench.gpu.ops import GPU_OPS, LATEST, SCAN, drafting
from tools.bench.gpu.ours import Correction, Fused, IndexStep, Step
from tools.bench.options import BenchError, Options, Size
from tools.bench.report import lines

OPTIONS = Options(sizes=(Size(6, 300),), rounds=3, data_kind="nomatch", device="cuda")


@pytest.mark.parametrize(
    ("op", "peers", "compared"),
    [
        ("ngram_propose", (LATEST,), None),
        ("ngram_step_", (LATEST,), None),
        ("ngram_step_", ("ours:max_n=4",), True),
        ("ngram_index_step_", (SCAN, LATEST), True),
        ("correct_spec_state_", (), None),
    ],
)
def test_what_a_run_finds(op: str, peers: tuple[str, ...], compared: bool | None) -> None:
    runtime = Host()
    options = Options(**{**OPTIONS.__dict__, "peers": peers})
    reported: list[dict[str, Any]] = []
    results, skipped = GPU_OPS[op].run(options, reported.append, runtime)
    assert skipped == {}
    assert results == reported
    (result,) = results
    assert (result["size"], result["steps_per_round"]) == ("6x300", STEPS)
    assert result["same_drafts"] is compared
    if op == "correct_spec_state_":
        assert result["drafted_share"] is None
    else:
        assert result["drafted_share"] > 0.5
    assert set(result["ratio"]) == set(peers)
    assert result["ours"]["median_us"] > 0
    assert runtime.laps == (1 + len(peers)) * (3 + 2)
    assert lines(result)[0].split()[3:4] == ["ours"]
    reads = op in ("ngram_propose", "ngram_step_")
    assert ("of reading the live tokens" in lines(result)[-1]) == reads
    assert "above an empty graph node" in lines(result)[-1]


def test_floors() -> None:
    workload = make_workload(Size(4, 1000), Options(data_kind="random"))
    found = floors(Step(workload, OPTIONS, "cpu"), workload, Host(), [3.0, 2.0, 9.0])
    assert found["live_bytes"] == 16_000
    assert found["read_us"] == 0.004
    assert found["ours_over_read"] == 750.0
    assert found["ours_above_empty_us"] == 1.5


@pytest.mark.parametrize("kind", [IndexStep, Fused])
def test_who_need_not_read_the_tokens_is_not_compared_to_that(kind: Any) -> None:
    workload = make_workload(Size(4, 1000), Options(data_kind="random"))
    found = floors(kind(workload, OPTIONS, "cpu"), workload, Host(), [3.0])
    assert set(found) == {"copy_gb_per_s", "empty_node_us", "ours_above_empty_us"}


def test_the_checked_data_make_drafts() -> None:
    workload = drafting(make_workload(Size(3, 500), Options(data_kind="random")))
    assert 0 <= workload.token_ids.min() <= workload.token_ids.max() < 11
    assert workload.sampled.min() == -1


def test_contestants_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Step.drafts
    monkeypatch.setattr(
        Step,
        "drafts",
        lambda self, result: honest(self, result)[:: -1 if self.name != "ours" else 1],
    )
    options = Options(**{**OPTIONS.__dict__, "peers": ("ours:max_n=4",)})
    with pytest.raises(BenchError, match="draft differently"):
        GPU_OPS["ngram_step_"].run(options, lambda _: None, Host())


def test_a_lap_begins_where_the_last_one_began() -> None:
    workload = make_workload(Size(3, 200), OPTIONS)
    contestant = Step(workload, OPTIONS, "cpu")
    contestant.load(workload)
    laps = []
    for _ in range(2):
        contestant.restore()
        laps.append([contestant.drafts(contestant.step(n)) for n in range(STEPS)])
        assert contestant.num_tokens.tolist() == workload.lengths[STEPS].tolist()
    assert laps[0] == laps[1]


def test_corrections_stay_within_their_blocks() -> None:
    workload = make_workload(Size(5, 100), OPTIONS)
    contestant = GPU_OPS["correct_spec_state_"].makers["fused"](workload, OPTIONS, "cpu")
    assert isinstance(contestant, Correction)
    contestant.restore()
    for number in range(workload.steps):
        contestant.step(number)
    assert (contestant.tensors["slot_mapping"] >= 0).all()


def test_unknown_names() -> None:
    for peers in (("nobody",), ("ours:engine=hash",)):
        options = Options(**{**OPTIONS.__dict__, "peers": peers})
        with pytest.raises(BenchError, match=r"expected one of|engine"):
            GPU_OPS["ngram_step_"].run(options, lambda _: None, Host())


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


class Capturing(Host):
    """A capture refuses what a plain call does not."""

    def prepare(self, works: list[Any], restore: Any, cold: bool) -> Any:
        contestant = restore.__self__
        if isinstance(contestant, Broken):
            contestant._fail("captured")
        return super().prepare(works, restore, cold)


@pytest.mark.parametrize("where", ["made", "run", "compared", "captured"])
def test_a_peer_that_fails_is_left_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "where", where)
    op = replace(GPU_OPS["ngram_step_"], peer_makers={"broken": Broken})
    options = replace(OPTIONS, sizes=(Size(6, 300), Size(4, 200)), peers=("broken", LATEST))
    results, skipped = op.run(options, lambda _: None, Capturing())
    assert [set(result["ratio"]) for result in results] == [{LATEST}, {LATEST}]
    if where == "compared":
        assert "broken and ours draft differently" in skipped["broken"]
    else:
        assert skipped["broken"].startswith("TypeError: of else.py : no such argument!!!")
        assert len(skipped["broken"]) == 300


@pytest.mark.parametrize("where", ["made", "run", "captured"])
def test_ours_must_not_fail(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "where", where)
    op = replace(GPU_OPS["ngram_step_"], makers={"scan": Broken})
    with pytest.raises(TypeError):
        op.run(replace(OPTIONS, peers=()), lambda _: None, Capturing())


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of it but the GPU; a fault at a later size leaves what was measured before."""
    file = tmp_path / "found.json"
    command = ["ngram_step_", "--device", "cuda", "--rounds", "1", "--data-kind", "nomatch"]
    command += ["--peer", LATEST, "--peer", "vllm-v2", "--json", str(file), "--sizes", "2x40"]
    monkeypatch.setattr(ops, "cuda", lambda op: Host())
    monkeypatch.setattr(runtime, "Cuda", Host)
    monkeypatch.setattr(vllm_peers, "has_triton", lambda: False)
    assert main(command) == 0
    found = json.loads(file.read_text())
    assert set(found["results"][0]["ratio"]) == {LATEST}
    assert found["skipped"] == {"vllm-v2": "Triton is not installed"}
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
    cuda = runtime.Cuda.__new__(runtime.Cuda)
    restored: list[int] = []
    assert cuda._time(device, lambda: restored.append(1)) == pytest.approx(7)
    first = len(restored)
    assert (first > 1) == (launch_us > 130)
    assert cuda._time(device, lambda: restored.append(1)) == pytest.approx(7)
    assert len(restored) == first + 1, "the longer wait was not kept"
    device.launch_us = 1e9
    with pytest.raises(BenchError, match="the host is slower"):
        cuda._time(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ngram_step_", "--device", "cuda", "--data-kind", "nomatch"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    assert main(["memory", "--device", "cuda"]) == 2
    assert "not measured on a GPU" in capsys.readouterr().err


def test_the_base_contestant_is_no_contestant() -> None:
    workload = make_workload(Size(1, 40), OPTIONS)
    with pytest.raises(TypeError, match="abstract"):
        GpuContestant(workload, OPTIONS, "cpu")  # type: ignore[abstract]
