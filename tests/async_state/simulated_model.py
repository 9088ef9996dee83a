"""The model on the simulated device: forward pass, rejection sampler and neural drafter.

The host launches their work and never reads a result. Each of them checks its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ngram_npu.async_state import NeuralDrafts, PaddedDrafterBatch, StepInputs, StepOutputs
from ngram_npu.config import UNLIMITED
from ops import reference
from ops.reference import ladder
from ops.reference.drafting import draft_for

from async_state.devices import value_of
from async_state.scenario import VOCAB, WRONG, Scenario, Target


@dataclass
class Launched:
    """A step as launched by the host, and its expected results on the device."""

    requests: list[Any]
    residencies: list[int]
    scheduled: list[int]
    drafts: list[int]
    discarded: list[bool]
    blocks: list[list[list[int]]]
    """[group][B], the allocated blocks."""
    previous: Launched | None
    previous_positions: list[int]
    contexts: list[int] = field(default_factory=list)
    """The hash at each token of the step."""
    computed: list[int] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    invalid: list[bool] = field(default_factory=list)
    """Whether the sampler has returned an invalid result for the request, now or before."""
    valid_drafts: dict[int, int] = field(default_factory=dict)
    """Number of drafts without padding, by position, for requests with drafts."""
    sources: dict[int, int] = field(default_factory=dict)
    """Source of the merged drafts, by position."""
    merged: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """Drafts expected from this step and their source, by position."""


_INVALID_TOKEN = 2**31 - 1


def _select_valid(values: Sequence[Any], step: Launched) -> list[Any]:
    return [value for value, invalid in zip(values, step.invalid, strict=True) if not invalid]


def _pad(values: list[int], k: int, padding: int) -> Any:
    return np.array([(values + [padding] * k)[:k]])


class SimulatedModel:
    def __init__(self, scenario: Scenario, state: Any, device: Any) -> None:
        self.scenario = scenario
        self.target: Target = scenario.target
        self.state = state
        self.device = device
        self._static: torch.Tensor | None = None
        self.invalid: set[tuple[int, int]] = set()
        """Requests with an invalid result, by id and residency. Until they are admitted again, only
        their slots are checked."""
        self.acceptance: dict[tuple[int, int], Any] = {}
        """[1,2] expected acceptance (merge_drafts_), by request and residency."""

    def empty_sampled(self, batch: int) -> torch.Tensor:
        """Returns the sampler's output: a new tensor, or the same one as with device graphs."""
        shape = (self.scenario.max_rows, self.scenario.k + 1)
        if not self.scenario.static_sampled:
            return self.device.tensor((batch, shape[1]), torch.int32)
        if self._static is None:
            self._static = self.device.tensor(shape, torch.int32)
        return self._static[:batch]

    def forward(self, inputs: StepInputs, sampled: torch.Tensor, step: Launched) -> None:
        batch = len(step.requests)
        if not batch:
            return
        tokens = inputs.num_step_tokens
        tables = [value_of(table) for table in self.state.block_tables]
        names = ("input_ids", "positions", "query_start_loc", "seq_lens", "discard")
        values = {name: value_of(getattr(inputs, name)) for name in names}
        slot_indices = value_of(inputs.slot_indices)
        mappings = [value_of(mapping) for mapping in inputs.slot_mappings]
        computed = value_of(inputs.num_computed_tokens)
        accepted = value_of(inputs.num_accepted_tokens)
        target = value_of(sampled)
        scheduled_drafts = value_of(inputs.num_scheduled_drafts)

        def work() -> None:
            ids = values["input_ids"][:tokens].tolist()
            positions = values["positions"][:tokens].tolist()
            starts = values["query_start_loc"].tolist()
            lengths = values["seq_lens"].tolist()
            slots = [mapping.tolist() for mapping in mappings]
            step.computed = computed[:batch].tolist()
            residencies = zip(step.requests, step.residencies, strict=True)
            step.invalid = [(r.uid, residency) in self.invalid for r, residency in residencies]
            assert starts[batch:] == [tokens] * (len(starts) - batch)
            assert not any(lengths[batch:])
            assert all(set(mapping[tokens:]) <= {-1} for mapping in slots)
            discard = values["discard"][:batch].tolist()
            assert _select_valid(discard, step) == _select_valid(step.discarded, step)
            assert scheduled_drafts[:batch].tolist() == step.drafts
            self._check_accepted(accepted[:batch].tolist(), step)
            self._check_slots([mapping[:tokens] for mapping in slots], positions, starts, step)
            rows = slot_indices[:batch].tolist()
            for i in range(batch):
                begin, end = starts[i], starts[i + 1]
                assert end - begin == step.scheduled[i]
                listed = [
                    self._slots_of(g, table[rows[i]].tolist()) for g, table in enumerate(tables)
                ]
                first = lengths[i] - (end - begin)
                self._check_drafts(ids[end - step.drafts[i] : end], first + 1, step, i)
                context = self.target.attend([s[:first] for s in listed], 0, 0)
                for n in range(begin, end):
                    before, place = context, first + n - begin
                    for g, mapping in enumerate(slots):
                        if 0 <= mapping[n] < self.target.slots[g]:
                            self.target.store(g, mapping[n], ids[n], positions[n], before)
                    here = [s[place : place + 1] for s in listed]
                    context = self.target.attend(here, before, place)
                    step.contexts.append(context)
            target.fill_(-1)
            for i in range(batch):
                self._sample(target[i], ids, starts[i + 1], step, i)

        self.device.launch(work)

    def _sample(
        self, row: torch.Tensor, ids: Sequence[int], end: int, step: Launched, i: int
    ) -> None:
        """Samples greedily with rejection, also for discarded requests."""
        first = end - 1 - step.drafts[i]
        count = 0
        for n in range(first, end):
            predicted = self.target.predict(step.contexts[n])
            row[count] = predicted
            count += 1
            if n + 1 == end or ids[n + 1] != predicted:
                break
        if not (step.discarded[i] or step.invalid[i]):
            self._sample_invalid(row, step, i)
        step.num_sampled.append(0 if step.discarded[i] or step.invalid[i] else count)

    def _sample_invalid(self, row: torch.Tensor, step: Launched, i: int) -> None:
        """Sometimes replaces the result by an invalid one."""
        rng = self.scenario.rng
        if rng.random() >= self.scenario.bad_samples:
            return
        too_many = step.drafts[i] + 2
        kinds = ["none", "invalid"] + ["many"] * (too_many <= len(row))
        kind = rng.choice(kinds)
        if kind == "many":
            row[:too_many] = 0
        else:
            row.fill_(-1)
            row[0] = -1 if kind == "none" else _INVALID_TOKEN
        step.invalid[i] = True
        self.invalid.add((step.requests[i].uid, step.residencies[i]))

    def _slots_of(self, group: int, blocks: Sequence[int]) -> list[int]:
        size = self.scenario.block_sizes[group]
        return [block * size + j if block >= 0 else -1 for block in blocks for j in range(size)]

    def _check_accepted(self, accepted: Sequence[int], step: Launched) -> None:
        for i, p in enumerate(step.previous_positions):
            drafted = step.previous is not None and p >= 0 and step.previous.drafts[p] > 0
            assert step.previous is not None or not drafted
            if step.invalid[i]:
                continue
            assert accepted[i] == (step.previous.num_sampled[p] if drafted else 1)

    def _check_drafts(self, drafts: Sequence[int], num_tokens: int, step: Launched, i: int) -> None:
        """Compares the drafts with those of the reference, because wrong drafts would only be
        rejected."""
        if not drafts or step.invalid[i]:
            return
        expected = self._reference_drafts(step.requests[i].decoded[:num_tokens])[0]
        if self.scenario.neural:
            assert step.previous is not None
            expected, step.sources[i] = step.previous.merged[step.previous_positions[i]]
        step.valid_drafts[i] = min(len(expected), len(drafts))
        padding = [self.scenario.config.pad_token] * len(drafts)
        assert list(drafts) == (expected + padding)[: len(drafts)], "drafts of another context"

    def _reference_drafts(self, row: list[int]) -> tuple[list[int], list[int], int]:
        """Returns the expected tokens, their costs if there are any, and the match length."""
        lookup = self.scenario.config.ngram
        rest = lookup.overlap, UNLIMITED if lookup.max_len is None else lookup.max_len
        if lookup.is_ladder:
            table = () if lookup.cost_table is None else lookup.cost_table.tolist()
            return ladder.draft(row, lookup.k, table, lookup.cost_limit, *rest)
        sizes = lookup.min_n, lookup.max_n, lookup.k, lookup.match_policy_code
        drafts, match_len = draft_for(row, *sizes, *rest)
        return drafts, [], match_len

    def neural_drafts(
        self, inputs: StepInputs, step: Launched, outputs: StepOutputs
    ) -> NeuralDrafts:
        """Drafts with the scenario's accuracy, and computes the expected merged drafts."""
        self.check_drafter_batch(inputs, outputs, step)
        scenario, batch = self.scenario, len(step.requests)
        shape = (batch, scenario.neural_width)
        drafts = NeuralDrafts(
            self.device.tensor(shape, torch.int32),
            self.device.tensor((batch,), torch.int32) if scenario.neural_ragged else None,
            self.device.tensor(shape, torch.uint8) if scenario.neural_has_costs else None,
        )
        tokens, counts, costs = (None if t is None else value_of(t) for t in vars(drafts).values())
        lengths = value_of(self.state.num_tokens_on_device)
        slots = value_of(inputs.slot_indices)

        def work() -> None:
            rng = scenario.neural_rng
            for i, request in enumerate(step.requests):
                if step.discarded[i] or step.invalid[i]:
                    continue
                row = request.decoded[: int(lengths[slots[i]])]
                correct = [*request.decoded[len(row) :], *[WRONG] * shape[1]]
                for j in range(shape[1]):
                    hit = rng.random() < scenario.neural_hits
                    tokens[i, j] = correct[j] if hit else rng.randrange(VOCAB)
                    if costs is not None:
                        costs[i, j] = rng.randint(0, 40)
                if counts is not None:
                    counts[i] = rng.randint(0, shape[1])
                values = (tokens, counts, costs)
                parts = [t if t is None else t[i : i + 1].numpy() for t in values]
                step.merged[i] = self._merge(step, i, row, parts)

        self.device.launch(work)
        return drafts

    def _merge(
        self, step: Launched, i: int, row: list[int], neural: list[Any]
    ) -> tuple[list[int], int]:
        """Returns the drafts and their source as merged by the reference."""
        config, request = self.scenario.config, step.requests[i]
        merge, k = config.merge, config.ngram.k
        assert merge is not None
        drafts, costs, match_len = self._reference_drafts(row)
        has_costs = config.ngram.cost_table is not None
        match_costs = None if merge.match_costs is None else np.array(merge.match_costs, np.uint8)
        key = request.uid, step.residencies[i]
        merged = reference.merge_drafts_(
            neural[0],
            _pad(drafts, k, -1),
            np.array([len(drafts)]),
            np.array([match_len if drafts else 0]),
            neural[1],
            _pad(costs, k, 255) if has_costs else None,
            neural[2],
            match_costs,
            None,
            np.array([step.num_sampled[i]]),
            np.array([step.drafts[i]]),
            self.acceptance.setdefault(key, np.zeros((1, 2), np.int32)),
            merge.min_match_len,
            int(merge.min_accepted * 65536),
            merge.extend,
        )
        tokens, count, source = (part[0] for part in merged)
        return tokens[:count].tolist(), int(source)

    def _check_slots(
        self,
        slots: list[Sequence[int]],
        positions: Sequence[int],
        starts: Sequence[int],
        step: Launched,
    ) -> None:
        """Checks that each token has its own KV slot, in a block of its request."""
        for group, mapping in enumerate(slots):
            size = self.scenario.block_sizes[group]
            assert len(set(mapping)) == len(mapping), "two tokens share a slot"
            for i, blocks in enumerate(step.blocks[group]):
                for n in range(starts[i], starts[i + 1]):
                    block, offset = divmod(mapping[n], size)
                    assert block in blocks, "the slot is in another request's block"
                    assert blocks.index(block) * size + offset == positions[n]

    def check_drafter_batch(self, inputs: StepInputs, outputs: StepOutputs, step: Launched) -> None:
        """Checks that the drafter batch contains the position from which each newest token was
        sampled."""
        batch = len(step.requests)
        next_token_ids = value_of(outputs.next_token_ids)
        parts = outputs.drafter_batch
        padded = isinstance(parts, PaddedDrafterBatch)
        values = [value_of(t) for t in vars(parts).values()]

        def work() -> None:
            listed = [value.tolist() for value in values]
            rejected = [
                drafts + 1 - sampled if drafts else 0
                for drafts, sampled in zip(step.drafts, step.num_sampled, strict=True)
            ]
            if padded:
                indices, num_rejected = listed
                assert _select_valid(num_rejected, step) == _select_valid(rejected, step)
            else:
                starts, lengths, indices_of_tokens = listed
                indices = [indices_of_tokens[starts[i + 1] - 1] for i in range(batch)]
                assert set(indices_of_tokens[starts[-1] :]) <= {-1}
                ends = [d - r for d, r in zip(step.scheduled, rejected, strict=True)]
                for i in range(batch):
                    if not step.invalid[i]:
                        assert starts[i + 1] - starts[i] == ends[i]
                        assert lengths[i] == step.computed[i] + ends[i]
            for i, token in enumerate(next_token_ids.tolist()):
                if not step.discarded[i] and not step.invalid[i]:
                    assert self.target.predict(step.contexts[indices[i]]) == token

        self.device.launch(work)
