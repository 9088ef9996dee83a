"""Tests the correction of counts in V1's asynchronous runner: compares the operator with vLLM's
function in each call, and counts the device operations of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import BatchResult, start_engine
from ngram_npu.engines.vllm import plugin, v1
from runs import METHODS, make_requests
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.worker import gpu_model_runner

if TYPE_CHECKING:
    from conftest import Runs

STOCK_FUNCTION = getattr(gpu_model_runner, plugin.CORRECT_FUNCTION)
VIEW_OPERATORS = {"slice", "alias", "detach"}

Function = Callable[..., None]


class LaunchCounter(TorchDispatchMode):
    """Counts the operators that launch work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs or {})
        is_no_op = name == "to" and result.dtype == args[0].dtype
        self.count += name not in VIEW_OPERATORS and not is_no_op
        return result


class Comparison:
    """Runs vLLM's function on copies, then `replacement`, and compares the results."""

    def __init__(self, replacement: Function) -> None:
        self._replacement = replacement
        self.launches: dict[Function, set[int]] = {STOCK_FUNCTION: set(), replacement: set()}
        """Numbers of launches per call, for both functions."""
        self.row_counts = Counter[str]()
        """Number of rows of each kind, and number of calls."""
        self.num_different = 0

    def __call__(self, *args: torch.Tensor) -> None:
        _, num_accepted, prev, _, drafts, _ = args
        copies = [tensor.clone() for tensor in args]
        for function, arguments in ((STOCK_FUNCTION, copies), (self._replacement, args)):
            with LaunchCounter() as counter:
                function(*arguments)
            self.launches[function].add(counter.count)
        self.num_different += any(
            not torch.equal(result, expected) for result, expected in zip(args, copies, strict=True)
        )
        previous_drafts = drafts[prev.clamp(min=0)]
        had_drafts = (prev >= 0) & (previous_drafts > 0)
        self.row_counts["calls"] += 1
        self.row_counts["new"] += int((prev < 0).sum())
        self.row_counts["moved"] += int(((prev >= 0) & (prev != torch.arange(len(prev)))).sum())
        self.row_counts["undrafted"] += int(((prev >= 0) & ~had_drafts).sum())
        self.row_counts["rejected"] += int((had_drafts & (num_accepted <= previous_drafts)).sum())
        is_accepted = had_drafts & (num_accepted > previous_drafts)
        self.row_counts["all accepted"] += int(is_accepted.sum())


def test_corrected_counts_equal_those_of_vllm(
    model: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests are preempted or prefilled in chunks."""
    monkeypatch.setenv(plugin.CORRECTION, "1")
    monkeypatch.setattr(
        gpu_model_runner, plugin.CORRECT_FUNCTION, STOCK_FUNCTION
    )  # restored at the end
    result = BatchResult()
    with start_engine(model, METHODS["async"]) as engine:
        replacement = getattr(gpu_model_runner, plugin.CORRECT_FUNCTION)
        assert replacement is v1.update_num_computed_tokens_for_batch_change
        comparison = Comparison(replacement)
        monkeypatch.setattr(gpu_model_runner, plugin.CORRECT_FUNCTION, comparison)
        engine.serve(make_requests(model), result)
    assert comparison.num_different == 0
    assert comparison.launches == {STOCK_FUNCTION: {12}, replacement: {1}}
    assert comparison.row_counts["calls"] >= 50
    assert min(comparison.row_counts.values()) >= 3, comparison.row_counts
    assert result.preemptions >= 3
    assert result.find_different(runs("none")) == []
