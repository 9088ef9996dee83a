"""The device's part: the forward pass, the rejection sampler and a model-based drafter. The host
launches them and never reads a result. Each checks its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ngram_npu.async_state import NeuralDrafts, PaddedDrafterBatch, StepInputs, StepOutputs
from ops import reference
from ops.reference import ladder
from ops.reference.drafting import draft_for

from async_state.late import value_of
from async_state.model import VOCAB, WRONG, Target
from async_state.scenario import Scenario, as_rows


@dataclass
class Launched:
    """One step as the host launched it, and its results on the device."""

    requests: list[Any]
    residencies: list[int]
    scheduled: list[int]
    drafts: list[int]
    discarded: list[bool]
    blocks: list[list[list[int]]]
    """[group][B], the blocks that the block manager had allocated."""
    previous: Launched | None
    previous_positions: list[int]
    contexts: list[int] = field(default_factory=list)
    """The hash at each token of the step."""
    computed: list[int] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    spoilt: list[bool] = field(default_factory=list)
    """The sampler broke its contract for this request, in this step or before."""
    valid_drafts: dict[int, int] = field(default_factory=dict)
    """Of the requests with drafts: how many are not padding."""
    sources: dict[int, int] = field(default_factory=dict)
    """Of the requests with merged drafts: what these are."""
    merged: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """The drafts that are to come of this step, and their source."""


_BEYOND = 2**31 - 1
"""No token id, whatever the vocabulary."""


def _sound(values: Sequence[Any], step: Launched) -> list[Any]:
    return [value for value, spoilt in zip(values, step.spoilt, strict=True) if not spoilt]


def _padded(values: list[int], k: int, rest: int) -> Any:
    return np.array([(values + [rest] * k)[:k]])


class DeviceSide:
    def __init__(self, scenario: Scenario, state: Any, device: Any) -> None:
        self.scenario = scenario
        self.target: Target = scenario.target
        self.state = state
        self.device = device
        self._static: torch.Tensor | None = None
        self.spoilt: set[tuple[int, int]] = set()
        """Request and residency; until it is admitted anew, only its slots are looked at."""
        self.acceptance: dict[tuple[int, int], Any] = {}
        """[1,2] by request and residency: what merge_drafts_ is to remember of it."""

    def empty_sampled(self, batch: int) -> torch.Tensor:
        """Where the sampler writes: a fresh tensor, or always the same one, as with device
        graphs."""
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
            ids = as_rows(values["input_ids"], tokens)
            positions = as_rows(values["positions"], tokens)
            starts = as_rows(values["query_start_loc"], len(values["query_start_loc"]))
            lengths = as_rows(values["seq_lens"], len(values["seq_lens"]))
            slots = [as_rows(mapping, len(mapping)) for mapping in mappings]
            step.computed = as_rows(computed, batch)
            of_requests = zip(step.requests, step.residencies, strict=True)
            step.spoilt = [(r.uid, residency) in self.spoilt for r, residency in of_requests]
            assert starts[batch:] == [tokens] * (len(starts) - batch)
            assert not any(lengths[batch:])
            assert all(set(mapping[tokens:]) <= {-1} for mapping in slots)
            discard = as_rows(values["discard"], batch)
            assert _sound(discard, step) == _sound(step.discarded, step)
            assert as_rows(scheduled_drafts, batch) == step.drafts
            self._check_accepted(as_rows(accepted, batch), step)
            self._check_slots([mapping[:tokens] for mapping in slots], positions, starts, step)
            rows = as_rows(slot_indices, batch)
            for i in range(batch):
                begin, end = starts[i], starts[i + 1]
                assert end - begin == step.scheduled[i]
                listed = [
                    self._slots_of(g, as_rows(t[rows[i]], t.shape[1])) for g, t in enumerate(tables)
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
        """Greedy rejection sampling, also for discarded requests."""
        first = end - 1 - step.drafts[i]
        count = 0
        for n in range(first, end):
            says = self.target.says(step.contexts[n])
            row[count] = says
            count += 1
            if n + 1 == end or ids[n + 1] != says:
                break
        if not (step.discarded[i] or step.spoilt[i]):
            self._spoil(row, step, i)
        step.num_sampled.append(0 if step.discarded[i] or step.spoilt[i] else count)

    def _spoil(self, row: torch.Tensor, step: Launched, i: int) -> None:
        """Sometimes breaks the sampler's contract."""
        rng = self.scenario.rng
        if rng.random() >= self.scenario.bad_samples:
            return
        too_many = step.drafts[i] + 2
        kinds = ["none", "beyond"] + ["many"] * (too_many <= len(row))
        kind = rng.choice(kinds)
        if kind == "many":
            row[:too_many] = 0
        else:
            row.fill_(-1)
            row[0] = -1 if kind == "none" else _BEYOND
        step.spoilt[i] = True
        self.spoilt.add((step.requests[i].uid, step.residencies[i]))

    def _slots_of(self, group: int, blocks: Sequence[int]) -> list[int]:
        size = self.scenario.block_sizes[group]
        return [block * size + j if block >= 0 else -1 for block in blocks for j in range(size)]

    def _check_accepted(self, accepted: Sequence[int], step: Launched) -> None:
        for i, p in enumerate(step.previous_positions):
            drafted = step.previous is not None and p >= 0 and step.previous.drafts[p] > 0
            assert step.previous is not None or not drafted
            if step.spoilt[i]:
                continue
            assert accepted[i] == (step.previous.num_sampled[p] if drafted else 1)

    def _check_drafts(self, found: Sequence[int], num_tokens: int, step: Launched, i: int) -> None:
        """Wrong drafts would only be rejected. So they are compared with the drafts that the
        definition gives for the correct context."""
        if not found or step.spoilt[i]:
            return
        drafts = self._ngrams(step.requests[i].decoded[:num_tokens])[0]
        if self.scenario.neural:
            assert step.previous is not None
            drafts, step.sources[i] = step.previous.merged[step.previous_positions[i]]
        step.valid_drafts[i] = min(len(drafts), len(found))
        padding = [self.scenario.config.pad_token] * len(found)
        assert list(found) == (drafts + padding)[: len(found)], "drafts of another context"

    def _ngrams(self, row: list[int]) -> tuple[list[int], list[int], int]:
        """What the lookup is to find: tokens, their costs if it has some, and its match."""
        lookup = self.scenario.config.ngram
        rest = lookup.overlap, lookup.max_len_or_unlimited
        if lookup.is_ladder:
            table = () if lookup.cost_table is None else lookup.cost_table.tolist()
            return ladder.draft(row, lookup.k, table, lookup.cost_limit, *rest)
        sizes = lookup.min_n, lookup.max_n, lookup.k, lookup.match_policy_code
        drafts, match_len = draft_for(row, *sizes, *rest)
        return drafts, [], match_len

    def neural_drafts(
        self, inputs: StepInputs, step: Launched, outputs: StepOutputs
    ) -> NeuralDrafts:
        """A drafter that is right as often as the scenario says; notes what should come of it."""
        self.draft_with_model(inputs, outputs, step)
        scenario, batch = self.scenario, len(step.requests)
        shape = (batch, scenario.neural_width)
        drafts = NeuralDrafts(
            self.device.tensor(shape, torch.int32),
            self.device.tensor((batch,), torch.int32) if scenario.neural_ragged else None,
            self.device.tensor(shape, torch.uint8) if scenario.neural_confident else None,
        )
        tokens, counts, costs = (None if t is None else value_of(t) for t in vars(drafts).values())
        lengths = value_of(self.state.num_tokens_on_device)
        slots = value_of(inputs.slot_indices)

        def work() -> None:
            rng = scenario.neural_rng
            for i, request in enumerate(step.requests):
                if step.discarded[i] or step.spoilt[i]:
                    continue
                row = request.decoded[: int(lengths[slots[i]])]
                right = [*request.decoded[len(row) :], *[WRONG] * shape[1]]
                for j in range(shape[1]):
                    hit = rng.random() < scenario.neural_hits
                    tokens[i, j] = right[j] if hit else rng.randrange(VOCAB)
                    if costs is not None:
                        costs[i, j] = rng.randint(0, 40)
                if counts is not None:
                    counts[i] = rng.randint(0, shape[1])
                parts = [t if t is None else t[i : i + 1].numpy() for t in (tokens, counts, costs)]
                step.merged[i] = self._merge(step, i, row, parts)

        self.device.launch(work)
        return drafts

    def _merge(
        self, step: Launched, i: int, row: list[int], neural: list[Any]
    ) -> tuple[list[int], int]:
        """What the definition makes of the drafts of both kinds."""
        config, request = self.scenario.config, step.requests[i]
        merge, k = config.merge, config.ngram.k
        assert merge is not None
        drafts, paid, match_len = self._ngrams(row)
        has_costs = config.ngram.cost_table is not None
        by_match = None if merge.match_costs is None else np.array(merge.match_costs, np.uint8)
        key = request.uid, step.residencies[i]
        merged = reference.merge_drafts_(
            neural[0],
            _padded(drafts, k, -1),
            np.array([len(drafts)]),
            np.array([match_len if drafts else 0]),
            neural[1],
            _padded(paid, k, 255) if has_costs else None,
            neural[2],
            by_match,
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
        """Every token's KV goes to a slot of its own, in a block of its own request."""
        for group, mapping in enumerate(slots):
            size = self.scenario.block_sizes[group]
            assert len(set(mapping)) == len(mapping), "a slot shared by two tokens"
            for i, blocks in enumerate(step.blocks[group]):
                for n in range(starts[i], starts[i + 1]):
                    block, offset = divmod(mapping[n], size)
                    assert block in blocks, "a slot in another request's block"
                    assert blocks.index(block) * size + offset == positions[n]

    def draft_with_model(self, inputs: StepInputs, outputs: StepOutputs, step: Launched) -> None:
        """A drafter that goes on from the hidden state of each request's last accepted token: the
        state that the newest token was sampled from."""
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
                assert _sound(num_rejected, step) == _sound(rejected, step)
            else:
                starts, lengths, kept = listed
                indices = [kept[starts[i + 1] - 1] for i in range(batch)]
                assert set(kept[starts[-1] :]) <= {-1}
                ends = [d - r for d, r in zip(step.scheduled, rejected, strict=True)]
                for i in range(batch):
                    if not step.spoilt[i]:
                        assert starts[i + 1] - starts[i] == ends[i]
                        assert lengths[i] == step.computed[i] + ends[i]
            for i, token in enumerate(next_token_ids.tolist()):
                if not step.discarded[i] and not step.spoilt[i]:
                    assert self.target.says(step.contexts[indices[i]]) == token

        self.device.launch(work)
