"""The V2 runner with a neural drafter and n-gram drafts beside it: its output, and the source of
each row's draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toy_drafters
import v2_runs
from ngram_npu.config import default_match_costs
from ngram_npu.engines.vllm import plugin
from ops.reference.drafting import LATEST, draft_for
from ops.reference.merging import merge_drafts_
from v2_runs import ENGINE, K, Run
from vllm.v1.worker.gpu import model_runner

INIT_SPECULATOR = model_runner.init_speculator
LOOKUP = (2, 9)  # within an index's limits, too
NGRAM = 2


@dataclass(frozen=True)
class Method:
    """A neural drafter, and the n-gram lookup beside it."""

    kind: str
    asynchronous: bool = True
    ours: dict[str, Any] = field(default_factory=dict)
    adaptive: bool = False
    prepare: Callable[[Any], None] = field(default=lambda beside: None)
    """A change to the n-gram drafts before they are used."""
    sampled: bool = False
    """Whether draft tokens are sampled."""
    first: int = 20
    """The number of requests it gets."""
    by_batch: tuple[tuple[int, int, int], ...] | None = None
    """How many tokens are drafted in batches from one size to another."""

    def arguments(self, model: Path) -> dict[str, Any]:
        speculative: dict[str, Any] = {"method": self.kind, "num_speculative_tokens": K}
        if self.kind != "mtp":
            speculative["model"] = str(toy_drafters.cached(self.kind, model))
        if self.adaptive:
            speculative["enable_adaptive_verification"] = True
        if self.sampled:
            speculative["draft_sample_method"] = "probabilistic"
        if self.by_batch:
            speculative["num_speculative_tokens_per_batch_size"] = list(map(list, self.by_batch))
        return {
            **ENGINE,
            "load_format": "dummy" if self.kind == "mtp" else "auto",
            "speculative_config": speculative,
            "additional_config": {"ngram_npu": {"beside": True, **self.ours}},
            "async_scheduling": self.asynchronous,
        }


def _of_wrong_rows(beside: Any) -> None:
    """Each request gets its neighbour's n-gram draft."""
    look_up = beside._look_up

    def wrong(input_batch: Any, num_sampled: torch.Tensor) -> Any:
        return tuple(found.roll(1, 0) for found in look_up(input_batch, num_sampled))

    beside._look_up = wrong


def _not_isolated(beside: Any) -> None:
    """The estimator counts the verdicts on n-gram drafts as verdicts on neural ones."""
    beside._neural.observe_verification = beside._observe_verification


SIZES = dict(zip(("prompt_lookup_min", "prompt_lookup_max"), LOOKUP, strict=True))
SCAN = {"engine": "scan", **SIZES}
INDEX = {"engine": "index", **SIZES}
LADDER = {"sizes": "ladder", "min_draft_probability": 0.177}

METHODS = {
    "draft-async": Method("draft_model", ours={**SCAN, "metrics": True}),
    "draft-sync": Method("draft_model", asynchronous=False, ours=INDEX),
    "eagle-async": Method("eagle", ours={**SCAN, "metrics": True}),
    "eagle-sync": Method("eagle", asynchronous=False, ours=INDEX),
    "eagle-at-times": Method(
        "eagle", asynchronous=False, ours=SCAN, by_batch=((1, 1, 4), (2, 8, 0)), first=8
    ),
    "mtp": Method("mtp", ours=SCAN, first=8),
    "adaptive": Method("draft_model", ours=LADDER, adaptive=True),
    "draft-store": Method("draft_model", ours={**LADDER, "store": "live"}),
    "eagle-store": Method("eagle", ours={**LADDER, "store": "live"}),
    "wrong-rows": Method("eagle", ours=SCAN, prepare=_of_wrong_rows, first=8),
    "not-isolated": Method("eagle", ours=SCAN, adaptive=True, prepare=_not_isolated, first=8),
}


@dataclass
class BesideRun(Run):
    """As :class:`Run`; ``mismatches`` are rows whose draft differs from the one that both sources
    and the rule give."""

    replaced: int = 0
    """Rows that drafted from n-grams, in steps that sampled a token for them."""
    kept: int = 0
    """Rows that kept their neural draft."""
    without: int = 0
    """Steps in which the runner asked for no draft token."""
    estimated: tuple[int, int] = (0, 0)
    """Verdicts passed to the estimator: on neural drafts, and on n-gram drafts."""


def run(model: Path, method: Method) -> BesideRun:
    """Runs the first of the requests at once, with a fresh engine."""
    result = BesideRun()
    plugin.install_beside()
    try:
        with v2_runs.engine(model, method.arguments(model), result, method.adaptive) as (
            llm,
            runner,
        ):
            beside = runner.speculator.ngram_npu
            assert type(runner.speculator).__module__.startswith("vllm.")
            watched = _Watched(runner, method, result)
            method.prepare(beside)
            v2_runs.serve(llm, v2_runs.requests(llm.get_tokenizer())[: method.first], result)
            if beside._stats is not None:
                result.counted = v2_runs.counted(beside)
            if beside.shared_store is not None:
                result.store = beside.shared_store.contents.statistics
            del llm, runner, beside, watched
    finally:
        model_runner.init_speculator = INIT_SPECULATOR
    return result


class _Watched:
    """Compares every call of ``propose`` with the references of the lookup and of the choice. Keeps
    a second copy of their state per request, from the runner's notices of new requests."""

    def __init__(self, runner: Any, method: Method, result: BesideRun) -> None:
        self._state, self._result = runner.req_states, result
        self._beside = runner.speculator.ngram_npu
        self._compares = "sizes" not in method.ours and not method.adaptive
        self._acceptance = np.zeros_like(self._beside.neural_acceptance.numpy())
        self._replaced = torch.zeros(len(self._acceptance), dtype=torch.bool)  # by row, last step
        self._neural = torch.empty(0)
        self._neural_propose = self._beside._neural_propose
        self._propose = runner.speculator.propose
        self._add_request = self._state.add_request
        self._beside._neural_propose = self._remembered
        runner.speculator.propose = self._checked
        self._state.add_request = self._added
        if method.adaptive:
            self._estimate = runner.speculator.acceptance_estimator.step
            runner.speculator.acceptance_estimator.step = self._estimated

    def _added(self, req_id: str, *args: Any, **kwargs: Any) -> None:
        self._add_request(req_id, *args, **kwargs)
        row = self._state.req_id_to_index[req_id]
        self._acceptance[row], self._replaced[row] = 0, False

    def _remembered(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._neural_propose(*args, **kwargs)
        self._neural = drafts.clone()
        return drafts

    def _estimated(self, rows: torch.Tensor, sampled: torch.Tensor, rejected: torch.Tensor) -> None:
        given = (sampled - 1).clamp(min=0) + rejected > 0
        ngram = int((given & self._replaced[rows]).sum())
        seen = self._result.estimated
        self._result.estimated = seen[0] + int(given.sum()) - ngram, seen[1] + ngram
        self._estimate(rows, sampled, rejected)

    def _checked(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = self._propose(batch, *args, **kwargs)
            return drafts
        state, result = self._state, self._result
        before = state.all_token_ids.gpu.clone(), state.total_len.gpu.clone()
        waits = result.waits
        drafts = self._propose(batch, *args, **kwargs)
        result.waits_in_propose += result.waits - waits
        after = state.all_token_ids.gpu, state.total_len.gpu
        result.state_changes += not all(map(torch.equal, before, after))
        result.steps += 1
        asked = kwargs["num_speculative_tokens"]
        result.without += asked == 0
        num_sampled = args[4]
        sampled, rows = num_sampled > 0, batch.idx_mapping
        replaced = (drafts != self._neural).any(1)
        self._replaced[rows[sampled]] = replaced[sampled]
        result.rows += int(sampled.sum())
        result.prefilling += int((~sampled).sum())
        result.partly_accepted += int(((num_sampled > 1) & (num_sampled <= K)).sum())
        result.replaced += int((sampled & replaced).sum())
        result.kept += int((sampled & ~replaced).sum())
        if self._compares and asked == K:
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
        found, match = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
        for i, row in enumerate(rows):
            length = int(self._state.total_len.gpu[row])
            tokens = self._state.all_token_ids.gpu[row, :length].tolist()
            if num_sampled[i] > 0:
                draft, match[i] = draft_for(tokens, *LOOKUP, K, LATEST, True, 10**9)
                found[i] = len(draft)
                ngram[i] = (draft + [tokens[-1]] * K)[:K]
        expected, _, source = merge_drafts_(
            self._neural.numpy(),
            ngram,
            found,
            match,
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
        for i, (got, right) in enumerate(zip(drafts.tolist(), expected.tolist(), strict=True)):
            if got != right:
                where = "n-grams" if source[i] == NGRAM else "the drafter"
                line = f"{req_ids[i]}: {got} instead of {right} from {where}"
                self._result.mismatches.append(line)
