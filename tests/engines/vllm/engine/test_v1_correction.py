"""The correction of counts in V1's asynchronous runner: compares the operator with vLLM's function
in each call, and counts the device operations of both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, greedy
from ngram_npu.engines.vllm import plugin, v1_device
from torch.utils._python_dispatch import TorchDispatchMode
from v1_runs import METHODS, start_engine
from vllm.v1.worker import gpu_model_runner

STOCK = getattr(gpu_model_runner, plugin.CORRECT)
VIEWS = {"slice", "alias", "detach"}

Function = Callable[..., None]


class Launches(TorchDispatchMode):
    """Counts the operators that launch work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs or {})
        is_no_op = name == "to" and result.dtype == args[0].dtype
        self.count += name not in VIEWS and not is_no_op
        return result


class Comparison:
    """Replaces the runner's function: runs vLLM's on copies, then `ours`, and compares both."""

    def __init__(self, ours: Function) -> None:
        self.ours = ours
        self.launches: dict[Function, set[int]] = {STOCK: set(), ours: set()}
        self.cases = Counter[str]()
        self.different = 0

    def __call__(self, *args: torch.Tensor) -> None:
        _, accepted, prev, _, drafts, _ = args
        copies = [tensor.clone() for tensor in args]
        for function, arguments in ((STOCK, copies), (self.ours, args)):
            with Launches() as calls:
                function(*arguments)
            self.launches[function].add(calls.count)
        self.different += any(
            not torch.equal(ours, theirs) for ours, theirs in zip(args, copies, strict=True)
        )
        previous_drafts = drafts[prev.clamp(min=0)]
        drafted = (prev >= 0) & (previous_drafts > 0)
        self.cases["calls"] += 1
        self.cases["new"] += int((prev < 0).sum())
        self.cases["moved"] += int(((prev >= 0) & (prev != torch.arange(len(prev)))).sum())
        self.cases["undrafted"] += int(((prev >= 0) & ~drafted).sum())
        self.cases["rejected"] += int((drafted & (accepted <= previous_drafts)).sum())
        self.cases["all accepted"] += int((drafted & (accepted > previous_drafts)).sum())


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv(plugin.CORRECTION, "1")
        patches.setattr(gpu_model_runner, plugin.CORRECT, STOCK)  # restored at the end
        with start_engine(model, METHODS["padded_scan"], num_gpu_blocks_override=18) as engine:
            yield engine


def _run_random_requests(engine: Engine, count: int) -> int:
    """Adds requests at random steps, `count` times; some are aborted, preempted or chunked. Returns
    the number of preemptions."""
    rng, vllm = random.Random(5), engine.llm.llm_engine
    before, _ = engine.read_counters()
    for schedule in range(count):
        arrivals = {f"{schedule}-{i}": rng.randrange(4) for i in range(rng.randint(2, 4))}
        for step in range(60):
            for name, at in arrivals.items():
                if at == step:
                    span = [rng.randrange(1000) for _ in range(rng.randint(2, 12))]
                    tokens = (span * 130)[: rng.choice((3, 30, 155, 250))]
                    params = greedy(rng.randint(1, 14))
                    vllm.add_request(name, {"prompt_token_ids": tokens}, params)
            if rng.random() < 0.02:
                vllm.abort_request([rng.choice(list(arrivals))])
            if step > 3 and not vllm.has_unfinished_requests():
                break
            vllm.step()
        else:
            raise AssertionError("a schedule did not end")
    return engine.read_counters()[0] - before


@pytest.mark.parametrize("schedules", [250, pytest.param(1_000, marks=pytest.mark.prove)])
def test_corrected_counts_equal_vllm(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    schedules: int,
) -> None:
    ours = getattr(gpu_model_runner, plugin.CORRECT)
    assert ours is v1_device.update_num_computed_tokens_for_batch_change
    comparison = Comparison(ours)
    monkeypatch.setattr(gpu_model_runner, plugin.CORRECT, comparison)
    preemptions = _run_random_requests(engine, schedules)
    with capsys.disabled():
        print(f"\n{schedules} schedules: {dict(comparison.cases)}, {preemptions} preemptions")
    assert comparison.different == 0
    assert comparison.launches == {STOCK: {12}, ours: {1}}
    assert comparison.cases["calls"] >= 5 * schedules
    assert min(comparison.cases.values()) >= schedules / 10
    assert preemptions >= (100 if schedules == 1_000 else 12)


def test_comparison_detects_wrong_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all drafts had been accepted."""

    def wrong(computed: Any, accepted: Any, prev: Any, counts: Any, drafts: Any, host: Any) -> None:
        STOCK(computed, accepted, prev, drafts[: len(counts)] + 1, drafts, host)

    comparison = Comparison(wrong)
    monkeypatch.setattr(gpu_model_runner, plugin.CORRECT, comparison)
    _run_random_requests(engine, 5)
    assert comparison.different >= 5
