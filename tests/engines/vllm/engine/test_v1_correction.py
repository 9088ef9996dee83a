"""The correction of counts in V1's asynchronous runner: compares the operator with vLLM's function
in each call, and counts the device operations of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import BatchResult, start_engine
from ngram_npu.engines.vllm import plugin, v1_device
from torch.utils._python_dispatch import TorchDispatchMode
from v1_runs import METHODS, make_requests
from vllm.v1.worker import gpu_model_runner

if TYPE_CHECKING:
    from conftest import Runs

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
    """Runs vLLM's function on copies, then `replacement`, and compares the results."""

    def __init__(self, replacement: Function) -> None:
        self._replacement = replacement
        self.launches: dict[Function, set[int]] = {STOCK: set(), replacement: set()}
        self.cases = Counter[str]()
        self.different = 0

    def __call__(self, *args: torch.Tensor) -> None:
        _, accepted, prev, _, drafts, _ = args
        copies = [tensor.clone() for tensor in args]
        for function, arguments in ((STOCK, copies), (self._replacement, args)):
            with Launches() as calls:
                function(*arguments)
            self.launches[function].add(calls.count)
        self.different += any(
            not torch.equal(result, expected) for result, expected in zip(args, copies, strict=True)
        )
        previous_drafts = drafts[prev.clamp(min=0)]
        drafted = (prev >= 0) & (previous_drafts > 0)
        self.cases["calls"] += 1
        self.cases["new"] += int((prev < 0).sum())
        self.cases["moved"] += int(((prev >= 0) & (prev != torch.arange(len(prev)))).sum())
        self.cases["undrafted"] += int(((prev >= 0) & ~drafted).sum())
        self.cases["rejected"] += int((drafted & (accepted <= previous_drafts)).sum())
        self.cases["all accepted"] += int((drafted & (accepted > previous_drafts)).sum())


def test_corrected_counts_equal_vllm(
    model: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are preempted and prefilled in chunks."""
    monkeypatch.setenv(plugin.CORRECTION, "1")
    monkeypatch.setattr(gpu_model_runner, plugin.CORRECT, STOCK)  # restored at the end
    result = BatchResult()
    with start_engine(model, METHODS["trimmed"]) as engine:
        replacement = getattr(gpu_model_runner, plugin.CORRECT)
        assert replacement is v1_device.update_num_computed_tokens_for_batch_change
        comparison = Comparison(replacement)
        monkeypatch.setattr(gpu_model_runner, plugin.CORRECT, comparison)
        engine.serve(make_requests(model), result)
    assert comparison.different == 0
    assert comparison.launches == {STOCK: {12}, replacement: {1}}
    assert comparison.cases["calls"] >= 100
    assert min(comparison.cases.values()) >= 20, comparison.cases
    assert result.preemptions >= 5
    assert result.find_different(runs("none")) == []
