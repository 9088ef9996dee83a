"""Runs the V2 runner with a neural drafter and n-gram drafts, and records each row's draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engines
import numpy as np
import torch
import toy_drafters
import v2_runs
from engines import Engine, K
from ngram_npu.config import default_match_costs
from ngram_npu.engines.vllm import plugin
from ops.reference.drafting import LATEST, draft_for
from ops.reference.merging import merge_drafts_
from v2_runs import Run
from vllm.v1.worker.gpu import model_runner

INIT_SPECULATOR = model_runner.init_speculator
LOOKUP = (2, 9)  # supported by the index, too
SIZES = {"prompt_lookup_min": LOOKUP[0], "prompt_lookup_max": LOOKUP[1]}
NGRAM = 2
"""Source of a draft in the reference of the merge operator."""


@dataclass(frozen=True)
class Method:
    """A neural drafter, with options of the n-gram lookup."""

    kind: str
    asynchronous: bool = True
    ours: dict[str, Any] = field(default_factory=dict)
    adaptive: bool = False
    sampled: bool = False
    """Whether draft tokens are sampled."""
    count: int = 20
    """Number of requests."""
    drafts_by_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """First and last batch size, and the number of draft tokens."""

    def make_arguments(self, model: Path) -> dict[str, Any]:
        speculative: dict[str, Any] = {"method": self.kind, "num_speculative_tokens": K}
        if self.kind != "mtp":
            speculative["model"] = str(toy_drafters.cached(self.kind, model))
        if self.adaptive:
            speculative["enable_adaptive_verification"] = True
        if self.sampled:
            speculative["draft_sample_method"] = "probabilistic"
        if self.drafts_by_batch_size:
            speculative["num_speculative_tokens_per_batch_size"] = [
                list(entry) for entry in self.drafts_by_batch_size
            ]
        return {
            **v2_runs.OPTIONS,
            "load_format": "dummy" if self.kind == "mtp" else "auto",
            "speculative_config": speculative,
            "additional_config": {"ngram_npu": {"beside": True, **self.ours}},
            "async_scheduling": self.asynchronous,
        }


SCAN = {"engine": "scan", **SIZES}
INDEX = {"engine": "index", **SIZES}
STORE = {**engines.LADDER, "store": "live"}

METHODS = {
    "draft-async": Method("draft_model", ours={**SCAN, "metrics": True}),
    "draft-sync": Method("draft_model", asynchronous=False, ours=INDEX),
    "eagle-async": Method("eagle", ours={**SCAN, "metrics": True}),
    "eagle-sync": Method("eagle", asynchronous=False, ours=INDEX),
    "eagle-small-batches": Method(
        "eagle",
        asynchronous=False,
        ours=SCAN,
        drafts_by_batch_size=((1, 1, 4), (2, 8, 0)),
        count=8,
    ),
    "mtp": Method("mtp", ours=SCAN, count=8),
    "adaptive": Method("draft_model", ours=engines.LADDER, adaptive=True),
    "draft-store": Method("draft_model", ours=STORE),
    "eagle-store": Method("eagle", ours=STORE),
}


@dataclass
class BesideRun(Run):
    """Results of a run. `mismatches` are rows whose draft differs from the reference's choice."""

    replaced: int = 0
    """Rows that sampled a token and got an n-gram draft."""
    kept: int = 0
    """Rows that sampled a token and kept their neural draft."""
    steps_without_drafts: int = 0
    """Steps in which the runner requested no draft tokens."""
    neural_results: int = 0
    """Verification results of neural drafts that the acceptance estimator received."""
    ngram_results: int = 0
    """Verification results of n-gram drafts that the acceptance estimator received."""


def run(model: Path, method: Method) -> BesideRun:
    """Runs the method's requests at once, with a new engine."""
    result = BesideRun()
    plugin.install_beside()
    try:
        arguments = method.make_arguments(model)
        with v2_runs.start_engine(model, arguments, result, method.adaptive) as engine:
            lookup = engine.drafter.ngram_npu
            assert type(engine.drafter).__module__.startswith("vllm.")
            _Recorder(engine, method, result)
            v2_runs.serve(engine, v2_runs.make_requests(model)[: method.count], result)
            if lookup._stats is not None:
                result.draft_counts = v2_runs.take_draft_counts(lookup)
            if lookup.shared_store is not None:
                result.store = lookup.shared_store.contents.statistics
            del lookup
    finally:
        model_runner.init_speculator = INIT_SPECULATOR
    return result


class _Recorder:
    """Compares every call of `propose` with the references of the lookup and of the choice. Keeps
    a second copy of their state per request, reset when the runner adds a request."""

    def __init__(self, engine: Engine, method: Method, result: BesideRun) -> None:
        runner = engine.runner
        self._state, self._result = runner.req_states, result
        lookup = runner.speculator.ngram_npu
        self._compares = "sizes" not in method.ours and not method.adaptive
        self._acceptance = np.zeros_like(lookup.neural_acceptance.numpy())
        # By row of the runner's state: whether the last step replaced the neural draft.
        self._replaced = torch.zeros(len(self._acceptance), dtype=torch.bool)
        self._neural = torch.empty(0)
        self._neural_propose, lookup._neural_propose = lookup._neural_propose, self._keep_neural
        self._propose, runner.speculator.propose = runner.speculator.propose, self._record
        self._add_request, self._state.add_request = self._state.add_request, self._reset_row
        if method.adaptive:
            estimator = runner.speculator.acceptance_estimator
            self._estimate, estimator.step = estimator.step, self._count_estimated

    def _reset_row(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        self._add_request(req_id, *args, **kwargs)
        row = self._state.req_id_to_index[req_id]
        self._acceptance[row], self._replaced[row] = 0, False

    def _keep_neural(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._neural_propose(*args, **kwargs)
        self._neural = drafts.clone()
        return drafts

    def _count_estimated(
        self, rows: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor
    ) -> None:
        verified = (sampled - 1).clamp(min=0) + rejected > 0
        ngram = int((verified & self._replaced[rows]).sum())
        self._result.ngram_results += ngram
        self._result.neural_results += int(verified.sum()) - ngram
        self._estimate(rows, sampled, rejected)

    def _record(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = self._propose(batch, *args, **kwargs)
            return drafts
        result = self._result
        with v2_runs.observe_propose(self._state, result):
            drafts = self._propose(batch, *args, **kwargs)
        requested = kwargs["num_speculative_tokens"]
        result.steps_without_drafts += requested == 0
        num_sampled = args[4]
        result.count_rows(num_sampled)
        sampled, rows = num_sampled > 0, batch.idx_mapping
        replaced = (drafts != self._neural).any(1)
        self._replaced[rows[sampled]] = replaced[sampled]
        result.replaced += int((sampled & replaced).sum())
        result.kept += int((sampled & ~replaced).sum())
        if self._compares and requested == K:
            verified = np.diff(batch.cu_num_logits_np) - 1
            self._compare(batch.req_ids, rows.numpy(), num_sampled.numpy(), verified, drafts)
        return drafts

    def _compare(
        self,
        req_ids: Sequence[str],
        rows: Any,
        num_sampled: Any,
        verified: Any,
        drafts: torch.Tensor,
    ) -> None:
        ngram = np.zeros((len(rows), K), np.int32)
        num_ngram, match_len = np.zeros((2, len(rows)), np.int32)
        for i, row in enumerate(rows):
            length = int(self._state.total_len.gpu[row])
            tokens = self._state.all_token_ids.gpu[row, :length].tolist()
            if num_sampled[i] > 0:
                draft, match_len[i] = draft_for(tokens, *LOOKUP, K, LATEST, True, 10**9)
                num_ngram[i] = len(draft)
                ngram[i] = (draft + [tokens[-1]] * K)[:K]
        expected, _, source = merge_drafts_(
            self._neural.numpy(),
            ngram,
            num_ngram,
            match_len,
            None,
            None,
            None,
            default_match_costs(),
            rows,
            num_sampled,
            verified.astype(np.int32),
            self._acceptance,
            1,
            0,
            False,
        )
        for i, (draft, right) in enumerate(zip(drafts.tolist(), expected.tolist(), strict=True)):
            if draft != right:
                name = "n-grams" if source[i] == NGRAM else "the neural drafter"
                line = f"{req_ids[i]}: {draft} instead of {right} from {name}"
                self._result.mismatches.append(line)
