"""The correction of counts in V1's runner: the operator in the place of vLLM's function, call by
call, in an engine that schedules asynchronously; and what each of the two asks of torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import METHODS, Engine, engine
from ngram_npu.engines.vllm import plugin, v1_device
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.worker import gpu_model_runner

STOCK = getattr(gpu_model_runner, plugin.CORRECT)
VIEWS = {"slice", "alias", "detach"}

Function = Callable[..., None]


class Launches(TorchDispatchMode):
    """Counts the operators that do something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs or {})
        converts_nothing = name == "to" and result.dtype == args[0].dtype
        self.count += name not in VIEWS and not converts_nothing
        return result


class Compared:
    """The runner's function: runs vLLM's on copies, then ``ours``, and compares."""

    def __init__(self, ours: Function) -> None:
        self.ours = ours
        self.launches: dict[Function, set[int]] = {STOCK: set(), ours: set()}
        self.seen = Counter[str]()
        self.different = 0

    def __call__(self, *args: torch.Tensor) -> None:
        _, accepted, prev, _, drafts, _ = args
        copies = [tensor.clone() for tensor in args]
        for function, given in ((STOCK, copies), (self.ours, args)):
            with Launches() as calls:
                function(*given)
            self.launches[function].add(calls.count)
        self.different += any(
            not torch.equal(ours, theirs) for ours, theirs in zip(args, copies, strict=True)
        )
        at = prev.clamp(min=0)
        drafted = (prev >= 0) & (drafts[at] > 0)
        self.seen["calls"] += 1
        self.seen["new"] += int((prev < 0).sum())
        self.seen["moved"] += int(((prev >= 0) & (prev != torch.arange(len(prev)))).sum())
        self.seen["undrafted"] += int(((prev >= 0) & ~drafted).sum())
        self.seen["rejected"] += int((drafted & (accepted <= drafts[at])).sum())
        self.seen["all accepted"] += int((drafted & (accepted > drafts[at])).sum())


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(plugin.CORRECTION, "1")
        patched.setattr(gpu_model_runner, plugin.CORRECT, STOCK)  # to be restored
        with engine(model, METHODS["padded_scan"], num_gpu_blocks_override=18) as made:
            yield made


def _schedules(running: Engine, count: int) -> int:
    """Random requests that come at random steps, as many as ``count`` times; aborted, preempted, in
    chunks. Returns the number of preemptions."""
    steps, vllm = random.Random(5), running.llm.llm_engine
    before = running._counters()["preemptions"]
    for schedule in range(count):
        arrivals = {f"{schedule}-{i}": steps.randrange(4) for i in range(steps.randint(2, 4))}
        for step in range(60):
            for name, at in arrivals.items():
                if at == step:
                    span = [steps.randrange(1000) for _ in range(steps.randint(2, 12))]
                    tokens = (span * 130)[: steps.choice((3, 30, 155, 250))]
                    params = SamplingParams(
                        temperature=0, max_tokens=steps.randint(1, 14), ignore_eos=True
                    )
                    vllm.add_request(name, {"prompt_token_ids": tokens}, params)
            if steps.random() < 0.02:
                vllm.abort_request([steps.choice(list(arrivals))])
            if step > 3 and not vllm.has_unfinished_requests():
                break
            vllm.step()
        else:
            raise AssertionError("a schedule did not end")
    return running._counters()["preemptions"] - before


@pytest.mark.parametrize("schedules", [250, pytest.param(1_000, marks=pytest.mark.prove)])
def test_the_counts_are_those_of_vllm_s_function(
    running: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    schedules: int,
) -> None:
    ours = getattr(gpu_model_runner, plugin.CORRECT)
    assert ours is v1_device.update_num_computed_tokens_for_batch_change
    compared = Compared(ours)
    monkeypatch.setattr(gpu_model_runner, plugin.CORRECT, compared)
    preemptions = _schedules(running, schedules)
    with capsys.disabled():
        print(f"\n{schedules} schedules: {dict(compared.seen)}, {preemptions} preemptions")
    assert compared.different == 0
    assert compared.launches == {STOCK: {12}, ours: {1}}
    assert compared.seen["calls"] >= 5 * schedules
    assert min(compared.seen.values()) >= schedules / 10
    assert preemptions >= (100 if schedules == 1_000 else 12)


def test_wrong_counts_are_noticed(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all drafts had been accepted."""

    def wrong(computed: Any, accepted: Any, prev: Any, counts: Any, drafts: Any, host: Any) -> None:
        STOCK(computed, accepted, prev, drafts[: len(counts)] + 1, drafts, host)

    compared = Compared(wrong)
    monkeypatch.setattr(gpu_model_runner, plugin.CORRECT, compared)
    _schedules(running, 5)
    assert compared.different >= 5
