"""The host runs ahead: no step reads from the device, and the trace times both."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from examples.runner import Runner, Sampling, Trace
from runner import worlds

WAITING = {"item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
"""Operators that on a GPU make the host wait for the device."""


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert name not in WAITING, f"{name} waits for the device"
        assert not by_mask, f"{name} with a mask waits for the device"
        return op(*args, **kwargs or {})


@pytest.mark.parametrize(("temperature", "beside"), [(0.0, None), (0.8, None), (0.0, "good")])
def test_a_padded_step_reads_nothing_from_the_device(
    model: Any, draft_models: Any, temperature: float, beside: str | None
) -> None:
    draft_model = None if beside is None else draft_models[beside]
    runner = worlds.runner(model, sampling=Sampling(temperature), draft_model=draft_model)
    with NoWaiting():
        texts = runner.generate(worlds.prompts(8), worlds.NEW_TOKENS)
    assert all(len(text) == worlds.NEW_TOKENS for text in texts)


def test_reading_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Runner._forward

    def reading(self: Runner, step: Any, inputs: Any) -> Any:
        inputs.positions.max().item()
        return forward(self, step, inputs)

    monkeypatch.setattr(Runner, "_forward", reading)
    with pytest.raises(AssertionError, match="item waits"), NoWaiting():
        worlds.runner(model).generate(worlds.prompts(1), 2)


class Event:
    """An event of a GPU that starts 5 ms behind the host; events are 2 ms apart."""

    now = 5.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 2.0
        self.at = Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_a_gpu_times_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    trace = Trace(torch.device("cuda"))
    with trace.span("forward", 0, device=True):
        pass
    with trace.span("schedule", 1):
        pass
    assert not waits
    seconds = trace.seconds()
    assert waits
    assert seconds["forward"] == pytest.approx(0.002)
    assert 0 <= seconds["schedule"] < 0.002
    tracks = [(name, track) for name, _, track, *_ in trace.spans()]
    assert tracks == [("forward", 0), ("forward", 1), ("schedule", 0)]


def test_trace_of_asynchronous_run_has_each_phase_once_per_step(model: Any, tmp_path: Path) -> None:
    runner = worlds.runner(model, trace=True)
    runner.generate(worlds.prompts(3), worlds.NEW_TOKENS)
    phases = ["schedule", "begin", "forward", "sample", "draft", "reconcile"]
    assert list(runner.trace.seconds()) == phases
    runner.trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    host = [event for event in spans if event["tid"] == tracks["host"]]
    device = [event for event in spans if event["tid"] == tracks["device"]]
    assert {event["name"] for event in device} == {"begin", "forward", "sample", "draft"}
    assert {event["args"]["step"] for event in device} == set(range(runner.figures.steps))
    for first, second in itertools.pairwise(host):
        assert first["ts"] + first["dur"] <= second["ts"] + 0.2  # rounded
    # The host is one step ahead: a step's results arrive after the next step's launch.
    order = [(event["name"], event["args"]["step"]) for event in host]
    assert order.index(("draft", 1)) < order.index(("reconcile", 0)) < order.index(("schedule", 2))


def test_trace_of_runner_without_trace_is_empty(model: Any) -> None:
    runner = worlds.runner(model)
    runner.generate([[65, 66]], 4)
    assert runner.trace.seconds() == {}
