"""Deliberate faults in how a runner uses the state. Each has to change the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from async_state.faults import Fault, patch_call
from ngram_npu.async_state import AsyncSpecState

from examples.runner import Runner, Scheduler, paged_model, runner

MUTANTS: dict[str, Fault] = {}


def _planned(change: Callable[[dict[str, Any]], None]) -> Fault:
    """Changes the arguments of `plan_step`, by name."""
    names = ("cache", "inputs", "block_table", "block_size", "num_tokens", "upper_seq_lens")

    def plan(original: Any, *arguments: Any) -> Any:
        given = dict(zip(names, arguments, strict=True))
        change(given)
        return original(**given)

    return patch_call(paged_model, "plan_step", plan)


def _inputs(**changes: Callable[[Any], Any]) -> Fault:
    """Changes fields of the step's inputs, for the whole runner."""

    def change(given: dict[str, Any]) -> None:
        inputs = given["inputs"]
        given["inputs"] = replace(inputs, **{n: f(inputs) for n, f in changes.items()})

    return _planned(change)


def _forward(change: Callable[[Any], Any]) -> Fault:
    """Changes the step's inputs before the model sees them."""

    def forward(original: Any, self: Any, inputs: Any, *arguments: Any) -> Any:
        return original(self, change(inputs), *arguments)

    return patch_call(paged_model.PagedModel, "forward", forward)


def _turned_slots(inputs: Any) -> Any:
    used = inputs.num_step_tokens
    return (inputs.slot_mappings[0][:used].roll(1), *inputs.slot_mappings[1:])


def _batch_positions(inputs: Any) -> torch.Tensor:
    return torch.arange(len(inputs.slot_indices), dtype=torch.int32)


def _upper_positions(given: dict[str, Any]) -> None:
    """The host's upper bounds, instead of the device's lengths."""
    inputs, counts = given["inputs"], given["num_tokens"]
    positions = inputs.positions.clone()
    starts = given["upper_seq_lens"] - counts
    flat = np.concatenate([s + np.arange(n) for s, n in zip(starts, counts, strict=True)])
    positions[: len(flat)] = torch.from_numpy(flat)
    given["inputs"] = replace(inputs, positions=positions)


def _too_short(given: dict[str, Any]) -> None:
    given["upper_seq_lens"] = given["upper_seq_lens"] - given["block_size"]


def _stale_drafts() -> Any:
    last: list[torch.Tensor] = []

    def verify(original: Any, logits: Any, drafts: Any, cumulative: Any, k: int) -> Any:
        stale = last.pop() if last and len(last[0]) == len(drafts) else drafts
        last[:] = [drafts.clone()]
        return original(logits, stale, cumulative, k)

    return patch_call(runner, "verify_greedy", verify)()


def _unverified(original: Any, logits: Any, drafts: Any, cumulative: Any, k: int) -> Any:
    counts = cumulative.diff(prepend=cumulative.new_zeros(1)).long()
    rows = torch.arange(len(logits))
    says = logits.clone()
    ends = counts.add(1).cumsum(0) - 1
    drafted = ~torch.isin(rows, ends)
    says[rows[drafted], drafts.long()] = torch.inf
    return original(says, drafts, cumulative, k)


def _one_too_many(original: Any, logits: Any, drafts: Any, cumulative: Any, k: int) -> Any:
    """Accepts the token after a rejection too."""
    sampled = original(logits, drafts, cumulative, k)
    counts = (sampled >= 0).sum(1)
    drafted = cumulative.diff(prepend=cumulative.new_zeros(1))
    for row in torch.nonzero(counts <= drafted).flatten().tolist():
        sampled[row, counts[row]] = sampled[row, counts[row] - 1]
    return sampled


def _rows_one_off(original: Any, self: Runner, step: Any, inputs: Any) -> Any:
    spans = np.maximum(inputs.draft_spans - 1, 1)
    spans[:, 1] = spans[:, 0] + np.diff(inputs.draft_spans)[:, 0]
    return original(self, step, replace(inputs, draft_spans=spans))


def _neighbours_tokens(original: Any, self: AsyncSpecState) -> Any:
    """Only where all rows gained equally many tokens, so that the state's lengths still hold."""
    truth = original(self)
    if np.ptp(truth.num_sampled):
        return truth
    return replace(truth, sampled_token_ids=np.roll(truth.sampled_token_ids, 1, 0))


def _kept_blocks(original: Any, self: Scheduler, request: Any) -> None:
    """A preempted request goes on with blocks that are no longer its own."""
    blocks = list(request.blocks)
    original(self, request)
    request.blocks = blocks


MUTANTS |= {
    "KV at the slot of the token before": _inputs(slot_mappings=_turned_slots),
    "block tables by batch position, not by slot": _inputs(slot_indices=_batch_positions),
    "one block too few is read": _planned(_too_short),
    "attention sees what the host assumes": _planned(_upper_positions),
    "positions one too high": _forward(lambda i: replace(i, positions=i.positions + 1)),
    "input ids of the token before": _forward(
        lambda i: replace(i, input_ids=i.input_ids[: i.num_step_tokens].roll(1))
    ),
    "drafts of the step before": _stale_drafts,
    "drafts that nobody verifies": patch_call(runner, "verify_greedy", _unverified),
    "a token too many after a rejection": patch_call(runner, "verify_greedy", _one_too_many),
    "logits of the token before": patch_call(Runner, "_forward", _rows_one_off),
    "tokens of the neighbour": patch_call(AsyncSpecState, "reconcile", _neighbours_tokens),
    "blocks of two owners": patch_call(Scheduler, "_leave", _kept_blocks),
}
