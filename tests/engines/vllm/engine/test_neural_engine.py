"""Tests the V2 runner with a neural drafter and n-gram drafts: the text equals that without
speculation, and each row's draft is the one that the reference chooses."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engines import STORE, BatchResult, Engine, K, Method, StoreDraftCounter, start_engine
from ngram_npu import NgramConfig
from ngram_npu.draft_costs import DraftCosts
from ngram_npu.engines.vllm.neural import NeuralDrafterWrapper
from ngram_npu.engines.vllm.patching import class_mismatch
from ops.reference import merge_drafts_, ngram_propose
from runs import make_requests
from vllm.v1.worker.gpu import spec_decode
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

if TYPE_CHECKING:
    from conftest import Runs

AUTO_LOOKUP: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "overlap": True}
"""Arguments of the reference for the default lookup."""
NEURAL = {"neural": True}
ADAPTIVE = {"enable_adaptive_verification": True}
METHODS = {
    "draft model": Method("draft_model", NEURAL, asynchronous=True),
    "eagle": Method("eagle", NEURAL),
    "store": Method("eagle", {**NEURAL, **STORE}, asynchronous=True),
    "adaptive": Method("draft_model", NEURAL, True, ADAPTIVE),
}


@dataclass
class NeuralRun(BatchResult):
    """Results of one batch of requests from one engine with a neural drafter."""

    num_replaced: int = 0
    """Number of rows, over all steps, that got an n-gram draft instead of their neural draft."""
    num_kept: int = 0
    """Number of rows, over all steps, that sampled a token and kept their neural draft."""
    neural_results: int = 0
    """Number of verification results of neural drafts that the acceptance estimator received."""
    ngram_results: int = 0
    """Number of verification results of n-gram drafts that the acceptance estimator received."""


class NeuralRecorder:
    """Compares the drafts in every step with those that the reference chooses. The choice depends
    on the acceptance of neural drafts, of which the reference has its own copy."""

    def __init__(self, engine: Engine, method: Method, result: NeuralRun) -> None:
        runner = engine.runner
        self._state, self._result = runner.req_states, result
        lookup = runner.speculator.ngram_npu
        self._compares_drafts = "store" not in (method.options or {}) and not method.is_adaptive
        self._acceptance = np.zeros_like(lookup.neural_acceptance.numpy())
        # By row of the runner's state: whether the last step replaced the neural draft.
        self._is_replaced = torch.zeros(len(self._acceptance), dtype=torch.bool)
        self._neural_drafts = torch.empty(0)
        self._neural_propose, lookup._neural_propose = lookup._neural_propose, self._propose_neural
        self._propose, runner.speculator.propose = runner.speculator.propose, self._record
        self._add_request, self._state.add_request = self._state.add_request, self._reset_row
        if method.is_adaptive:
            estimator = runner.speculator.acceptance_estimator
            self._estimate, estimator.step = estimator.step, self._count_and_estimate

    def _reset_row(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        self._add_request(req_id, *args, **kwargs)
        row = self._state.req_id_to_index[req_id]
        self._acceptance[row], self._is_replaced[row] = 0, False

    def _propose_neural(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._neural_propose(*args, **kwargs)
        self._neural_drafts = drafts.clone()
        return drafts

    def _count_and_estimate(
        self, rows: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor
    ) -> None:
        had_drafts = (sampled - 1).clamp(min=0) + rejected > 0
        num_ngram = int((had_drafts & self._is_replaced[rows]).sum())
        self._result.ngram_results += num_ngram
        self._result.neural_results += int(had_drafts.sum()) - num_ngram
        self._estimate(rows, sampled, rejected)

    def _record(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._propose(batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return drafts
        num_sampled = args[4]
        has_sampled, rows = num_sampled > 0, batch.idx_mapping
        is_replaced = (drafts != self._neural_drafts).any(1)
        self._is_replaced[rows[has_sampled]] = is_replaced[has_sampled]
        self._result.num_replaced += int((has_sampled & is_replaced).sum())
        self._result.num_kept += int((has_sampled & ~is_replaced).sum())
        if self._compares_drafts:
            length = kwargs.get("num_speculative_tokens", K)  # vLLM ignores the tokens after it
            expected = self._choose_drafts(batch, num_sampled.numpy())
            assert drafts[:, :length].tolist() == expected[:, :length].tolist(), batch.req_ids
        return drafts

    def _choose_drafts(self, batch: Any, num_sampled: Any) -> Any:
        rows = batch.idx_mapping.numpy()
        ngram, num_ngram, match_len = ngram_propose(
            self._state.all_token_ids.gpu.numpy(),
            self._state.total_len.gpu.numpy(),
            row_indices=rows,
            num_sampled=num_sampled,
            k=K,
            **AUTO_LOOKUP,
            fill=True,
        )
        drafts, _, _ = merge_drafts_(
            *(self._neural_drafts.numpy(), ngram, num_ngram, match_len),
            draft_costs=DraftCosts(NgramConfig(k=K)).compute_costs(match_len, num_ngram),
            row_indices=rows,
            num_sampled=num_sampled,
            num_scheduled_drafts=(np.diff(batch.cu_num_logits_np) - 1).astype(np.int32),
            neural_acceptance=self._acceptance,
        )
        return drafts


@pytest.mark.parametrize(
    "name", [n if n == "draft model" else pytest.param(n, marks=pytest.mark.prove) for n in METHODS]
)
def test_text_is_equal_and_drafts_are_those_of_the_reference(
    model: Path, runs: Runs, name: str
) -> None:
    """Where the reference has no store or probabilities, only text and counts are compared."""
    method, run = METHODS[name], NeuralRun()
    has_store = name == "store"
    with start_engine(model, method) as engine:
        NeuralRecorder(engine, method, run)
        counter = StoreDraftCounter(engine) if has_store else None
        engine.serve(make_requests(model, salts=not has_store), run)
        if counter is not None:
            assert counter.count >= 10
            assert engine.store.statistics.tokens_held >= sum(map(len, run.get_token_ids())) / 2
    assert run.find_different(runs("none")) == []
    assert run.num_replaced >= 15
    assert run.num_kept >= 40
    assert run.preemptions >= 3
    assert run.num_accepted >= 100
    if method.is_adaptive:
        assert run.neural_results >= 20
        assert run.ngram_results == 0


def test_every_neural_speculator_of_vllm_has_the_expected_methods() -> None:
    """Tests only the signatures of speculators that no toy drafter uses."""
    pending, names = [DraftModelSpeculator], []
    for module in pkgutil.walk_packages(spec_decode.__path__, f"{spec_decode.__name__}."):
        importlib.import_module(module.name)
    while pending:
        speculator = pending.pop()
        pending += speculator.__subclasses__()
        names.append(speculator.__name__)
        methods = "propose", "observe_verification"
        assert class_mismatch(names[-1], speculator, NeuralDrafterWrapper, *methods) == ""
    assert {"EagleSpeculator", "DFlashSpeculator", "MultiModuleMTPSpeculator"} <= {*names}
