"""The forward pass, the rejection sampler and the neural drafter on the simulated device.

The host launches this work and never reads a result. The work checks its inputs when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ngram_npu import PRIVATE_SCOPE
from ngram_npu.async_state import NeuralDrafts, PaddedDrafterBatch, StepInputs, StepOutputs
from ngram_npu.draft_costs import DraftCosts
from ops import reference

from async_state.devices import get_value
from async_state.scenario import VOCAB_SIZE, WRONG_TOKEN, Scenario, Target


@dataclass
class LaunchedStep:
    """A step as launched by the host, and its expected results on the device."""

    requests: list[Any]
    admission_numbers: list[int]
    """Each request's number of admissions at this step."""
    num_scheduled: list[int]
    """Number of scheduled tokens, including drafts."""
    num_drafts: list[int]
    is_discarded: list[bool]
    """Whether the sampled token is discarded, because the step ends inside the request's text."""
    blocks: list[list[list[int]]]
    """[group][B], the ids of the allocated KV blocks."""
    previous_step: LaunchedStep | None
    is_previous_reconciled: bool
    """Whether the previous step was reconciled before this step began."""
    previous_positions: list[int]
    """Position in the previous step's batch if the request sampled there, otherwise -1."""
    contexts: list[list[int]] = field(default_factory=list)
    """The hash of the context that ends at each token of the step, by pipeline stage."""
    num_computed: list[int] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    is_invalid: list[bool] = field(default_factory=list)
    """Whether the sampler returned an invalid result for the request, in this step or before."""
    num_valid_drafts: dict[int, int] = field(default_factory=dict)
    """By batch position of requests with drafts: number of drafts without padding."""
    sources: dict[int, int] = field(default_factory=dict)
    """By batch position: source of the merged drafts."""
    merged_drafts: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """By batch position: expected drafts of this step, and their source."""


_INVALID_TOKEN = 2**31 - 1


def _select_valid(values: Sequence[Any], step: LaunchedStep) -> list[Any]:
    return [value for value, bad in zip(values, step.is_invalid, strict=True) if not bad]


def _contains(text: list[int], piece: list[int]) -> bool:
    return any(text[i : i + len(piece)] == piece for i in range(len(text) - len(piece) + 1))


def _pad_to_k(values: list[int], k: int, padding: int) -> Any:
    return np.array([(values + [padding] * k)[:k]])


class SimulatedModel:
    """Launches the work of the model's part in a pipeline stage. Batch positions are named i."""

    def __init__(
        self,
        scenario: Scenario,
        state: Any,
        device: Any,
        stage: int,
        invalid_requests: set[tuple[int, int]],
    ) -> None:
        """
        Args:
            stage: the number of the pipeline stage.
            invalid_requests: requests with an invalid sampler result, in all stages: id and number
                of admissions. Until the next admission of such a request, only its slots are
                checked.
        """
        self.scenario = scenario
        self.target: Target = scenario.target
        self.state = state
        self.device = device
        self.stage = stage
        self._sampled_tensor: torch.Tensor | None = None
        self.invalid_requests = invalid_requests
        self.acceptance: dict[tuple[int, int], Any] = {}
        """By id and number of admissions: the [1,2] acceptance of merge_drafts_."""

    def make_sampled_tensor(self, batch: int) -> torch.Tensor:
        """Returns a tensor for sampled tokens: a new one, or the same one as with device graphs."""
        shape = (self.scenario.max_rows, self.scenario.k + 1)
        if not self.scenario.reuses_sampled_tensor:
            return self.device.tensor((batch, shape[1]), torch.int32)
        if self._sampled_tensor is None:
            self._sampled_tensor = self.device.tensor(shape, torch.int32)
        return self._sampled_tensor[:batch]

    def launch_forward(
        self, inputs: StepInputs, output: torch.Tensor | None, step: LaunchedStep
    ) -> None:
        """Launches the forward pass. In the last stage, also launches the sampler, which writes to
        `output`."""
        batch = len(step.requests)
        if not batch:
            return
        num_tokens = inputs.num_step_tokens
        tables = [get_value(table) for table in self.state.block_tables]
        names = ("input_ids", "positions", "query_start_loc", "seq_lens", "discard")
        values = {name: get_value(getattr(inputs, name)) for name in names}
        rope_positions = inputs.rope_positions
        if rope_positions is None:
            rope = get_value(inputs.positions)[None]
        else:
            rope = get_value(rope_positions)
        slot_indices = get_value(inputs.slot_indices)
        mappings = [get_value(mapping) for mapping in inputs.slot_mappings]
        computed = get_value(inputs.num_computed_tokens)
        accepted = get_value(inputs.num_accepted_tokens)
        sampled_value, stage = get_value(output), self.stage
        scheduled_drafts = get_value(inputs.num_scheduled_drafts)

        def run_forward() -> None:
            ids = values["input_ids"][:num_tokens].tolist()
            positions = values["positions"][:num_tokens].tolist()
            rotary = rope[:, :num_tokens].T.tolist()
            starts = values["query_start_loc"].tolist()
            lengths = values["seq_lens"].tolist()
            slots = [mapping.tolist() for mapping in mappings]
            step.num_computed = computed[:batch].tolist()
            keys = [self._make_key(step, i) for i in range(batch)]
            step.contexts.append([])
            assert len(step.contexts) == 1 + stage, "expected the results of the stage before"
            step.is_invalid = [key in self.invalid_requests for key in keys]
            assert starts[batch:] == [num_tokens] * (len(starts) - batch)
            assert not any(lengths[batch:])
            self._check_upper_lengths(lengths[:batch], inputs, step)
            assert all(set(mapping[num_tokens:]) <= {-1} for mapping in slots)
            discard = values["discard"][:batch].tolist()
            assert _select_valid(discard, step) == _select_valid(step.is_discarded, step)
            assert scheduled_drafts[:batch].tolist() == step.num_drafts
            self._check_accepted(accepted[:batch].tolist(), step)
            self._check_slots([mapping[:num_tokens] for mapping in slots], positions, starts, step)
            state_slots = slot_indices[:batch].tolist()
            for i in range(batch):
                begin, end = starts[i], starts[i + 1]
                assert end - begin == step.num_scheduled[i]
                kv_slots = [
                    self._list_slots(g, table[state_slots[i]].tolist())
                    for g, table in enumerate(tables)
                ]
                first = lengths[i] - (end - begin)
                self._check_drafts(ids[end - step.num_drafts[i] : end], first + 1, step, i)
                context = self.target.attend(stage, [s[:first] for s in kv_slots], 0, 0)
                for n in range(begin, end):
                    position = first + n - begin
                    token = step.contexts[stage - 1][n] if stage else ids[n]
                    for g, mapping in enumerate(slots):
                        if 0 <= mapping[n] < self.target.num_slots[g]:
                            self.target.store(stage, g, mapping[n], token, rotary[n], context)
                    slots_of_token = [s[position : position + 1] for s in kv_slots]
                    context = self.target.attend(stage, slots_of_token, context, position)
                    step.contexts[stage].append(context)
            if sampled_value is None:
                return
            sampled_value.fill_(-1)
            for i in range(batch):
                self._sample(sampled_value[i], ids, starts[i + 1], step, i)

        self.device.launch(run_forward)

    def _make_key(self, step: LaunchedStep, i: int) -> tuple[int, int]:
        return step.requests[i].uid, step.admission_numbers[i]

    def _sample(
        self, row: torch.Tensor, ids: Sequence[int], end: int, step: LaunchedStep, i: int
    ) -> None:
        """Samples greedily with rejection, also for discarded requests."""
        first = end - 1 - step.num_drafts[i]
        count = 0
        for n in range(first, end):
            predicted = self.target.predict(step.contexts[-1][n])
            row[count] = predicted
            count += 1
            if n + 1 == end or ids[n + 1] != predicted:
                break
        if not (step.is_discarded[i] or step.is_invalid[i]):
            self._sample_invalid(row, step, i)
        step.num_sampled.append(0 if step.is_discarded[i] or step.is_invalid[i] else count)

    def _sample_invalid(self, row: torch.Tensor, step: LaunchedStep, i: int) -> None:
        """Replaces the result by an invalid one with the scenario's probability."""
        rng = self.scenario.rng
        if rng.random() >= self.scenario.invalid_probability:
            return
        too_many = step.num_drafts[i] + 2
        faults = ["no token", "invalid token"] + ["too many tokens"] * (too_many <= len(row))
        fault = rng.choice(faults)
        if fault == "too many tokens":
            row[:too_many] = 0
        else:
            row.fill_(-1)
            row[0] = -1 if fault == "no token" else _INVALID_TOKEN
        step.is_invalid[i] = True
        self.invalid_requests.add(self._make_key(step, i))

    def _list_slots(self, group: int, blocks: Sequence[int]) -> list[int]:
        size = self.scenario.block_sizes[group]
        return [block * size + j if block >= 0 else -1 for block in blocks for j in range(size)]

    def _check_upper_lengths(
        self, lengths: Sequence[int], inputs: StepInputs, step: LaunchedStep
    ) -> None:
        """Checks the lengths on the host: upper bounds, exact for requests without drafts in the
        last step, and for all requests if the last step was reconciled."""
        upper = inputs.upper_seq_lens.tolist()
        assert inputs.max_seq_len == max(upper)
        for i, (length, bound) in enumerate(zip(lengths, upper, strict=True)):
            if step.is_invalid[i]:
                continue
            assert length <= bound <= self.scenario.capacity
            previous, position = step.previous_step, step.previous_positions[i]
            had_drafts = previous and position >= 0 and previous.num_drafts[position] > 0
            if step.is_previous_reconciled or not had_drafts:
                assert length == bound

    def _check_accepted(self, accepted: Sequence[int], step: LaunchedStep) -> None:
        previous = step.previous_step
        for i, position in enumerate(step.previous_positions):
            expected = 1
            if previous is not None and position >= 0 and previous.num_drafts[position] > 0:
                expected = previous.num_sampled[position]
            assert step.is_invalid[i] or accepted[i] == expected

    def _check_drafts(
        self, drafts: Sequence[int], num_tokens: int, step: LaunchedStep, i: int
    ) -> None:
        """Compares the drafts with the reference's, because wrong drafts would only be rejected."""
        if not drafts or step.is_invalid[i]:
            return
        if self.scenario.has_store:  # the reference does not know the store's text
            return
        expected = self._draft_with_reference(step.requests[i].decoded_tokens[:num_tokens])[0]
        if self.scenario.neural:
            assert step.previous_step is not None
            expected, step.sources[i] = step.previous_step.merged_drafts[step.previous_positions[i]]
        step.num_valid_drafts[i] = min(len(expected), len(drafts))
        padding = [self.scenario.config.pad_token] * len(drafts)
        assert list(drafts) == (expected + padding)[: len(drafts)], "expected other drafts"

    def _draft_with_reference(self, row: list[int]) -> tuple[list[int], list[int], int]:
        """Returns the expected tokens, their costs, and the match length."""
        lookup = self.scenario.config.ngram
        rows = np.array([row], np.int32), np.array([len(row)], np.int32)
        drafts = reference.ngram_propose(*rows, **lookup.lookup_arguments)
        costs = DraftCosts(lookup)
        costs.end_drafts(*drafts)
        tokens, count, match_len = drafts
        draft_costs = costs.compute_costs(match_len, count)
        valid = slice(count[0])
        return tokens[0, valid].tolist(), draft_costs[0, valid].tolist(), int(match_len[0])

    def launch_neural_drafts(
        self, inputs: StepInputs, step: LaunchedStep, outputs: StepOutputs
    ) -> NeuralDrafts:
        """Launches drafting with the scenario's accuracy. Also computes expected merged drafts."""
        self.launch_drafter_batch_check(outputs, step)
        scenario, batch = self.scenario, len(step.requests)
        shape = (batch, scenario.neural_width)
        drafts = NeuralDrafts(
            self.device.tensor(shape, torch.int32),
            self.device.tensor((batch,), torch.int32) if scenario.neural_has_counts else None,
            self.device.tensor(shape, torch.uint8) if scenario.neural_has_costs else None,
        )
        tokens, counts, costs = (None if t is None else get_value(t) for t in vars(drafts).values())
        lengths = get_value(self.state.num_tokens_on_device)
        slots = get_value(inputs.slot_indices)

        def draft() -> None:
            rng = scenario.neural_rng
            for i, request in enumerate(step.requests):
                if step.is_discarded[i] or step.is_invalid[i]:
                    continue
                row = request.decoded_tokens[: int(lengths[slots[i]])]
                correct = [*request.decoded_tokens[len(row) :], *[WRONG_TOKEN] * shape[1]]
                for j in range(shape[1]):
                    is_correct = rng.random() < scenario.neural_accuracy
                    tokens[i, j] = correct[j] if is_correct else rng.randrange(VOCAB_SIZE)
                    if costs is not None:
                        costs[i, j] = rng.randint(0, 40)
                if counts is not None:
                    counts[i] = rng.randint(0, shape[1])
                fields = (tokens, counts, costs)
                neural = [t if t is None else t[i : i + 1].numpy() for t in fields]
                step.merged_drafts[i] = self._merge_with_reference(step, i, row, neural)

        self.device.launch(draft)
        return drafts

    def _merge_with_reference(
        self, step: LaunchedStep, i: int, row: list[int], neural: list[Any]
    ) -> tuple[list[int], int]:
        """Returns the drafts and their source as merged by the reference."""
        config = self.scenario.config
        merge, k = config.merge, config.ngram.k
        assert merge is not None
        drafts, costs, match_len = self._draft_with_reference(row)
        merged = reference.merge_drafts_(
            neural[0],
            _pad_to_k(drafts, k, -1),
            np.array([len(drafts)]),
            np.array([match_len]),
            neural[1],
            _pad_to_k(costs, k, 255),
            neural[2],
            None,
            np.array([step.num_sampled[i]]),
            np.array([step.num_drafts[i]]),
            self.acceptance.setdefault(self._make_key(step, i), np.zeros((1, 2), np.int32)),
            merge.min_match_len,
            int(merge.min_accepted * 65536),
            merge.extend,
        )
        tokens, count, source = (result[0] for result in merged)
        return tokens[:count].tolist(), int(source)

    def _check_slots(
        self,
        slots: list[Sequence[int]],
        positions: Sequence[int],
        starts: Sequence[int],
        step: LaunchedStep,
    ) -> None:
        """Checks that each token has its own KV slot, in a block of its request."""
        for group, mapping in enumerate(slots):
            size = self.scenario.block_sizes[group]
            assert len(set(mapping)) == len(mapping), "expected different slots"
            for i, blocks in enumerate(step.blocks[group]):
                for n in range(starts[i], starts[i + 1]):
                    block, offset = divmod(mapping[n], size)
                    assert block in blocks, "expected a slot in a block of the request"
                    assert blocks.index(block) * size + offset == positions[n]

    def launch_store_check(
        self, inputs: StepInputs, outputs: StepOutputs, step: LaunchedStep
    ) -> None:
        """Launches a check that a draft continues the row, or is text that a request of the scope
        generated. Also records what the store may contain of each request."""
        slots, lengths = get_value(inputs.slot_indices), get_value(self.state.num_tokens_on_device)
        drafts, counts = get_value(outputs.draft_token_ids), get_value(outputs.num_draft_tokens)

        def check() -> None:
            for i, request in enumerate(step.requests):
                if step.is_discarded[i] or step.is_invalid[i]:
                    continue
                length = int(lengths[slots[i]])
                if length >= len(request.expected_tokens):
                    request.store_ends.setdefault(step.admission_numbers[i], length)
                draft = drafts[i, : counts[i]].tolist()
                row = request.decoded_tokens[:length]
                assert _contains([*row, *draft][:-1], draft) or any(
                    _contains(other.decoded_tokens[len(other.prompt) :], draft)
                    for other in self.scenario.requests
                    if other.scope == request.scope != PRIVATE_SCOPE
                ), "expected a draft of the row or of the scope"

        if self.scenario.invalid_probability == 0:
            self.device.launch(check)

    def launch_drafter_batch_check(self, outputs: StepOutputs, step: LaunchedStep) -> None:
        """Launches a check that the newest tokens were sampled at the drafter batch's positions."""
        batch = len(step.requests)
        next_token_ids = get_value(outputs.next_token_ids)
        drafter_batch = outputs.drafter_batch
        is_padded = isinstance(drafter_batch, PaddedDrafterBatch)
        tensors = [get_value(t) for t in vars(drafter_batch).values()]

        def check() -> None:
            fields = [tensor.tolist() for tensor in tensors]
            expected_rejected = [
                drafts + 1 - sampled if drafts else 0
                for drafts, sampled in zip(step.num_drafts, step.num_sampled, strict=True)
            ]
            if is_padded:
                indices, num_rejected = fields
                assert _select_valid(num_rejected, step) == _select_valid(expected_rejected, step)
            else:
                starts, lengths, indices_of_tokens = fields
                indices = [indices_of_tokens[starts[i + 1] - 1] for i in range(batch)]
                assert set(indices_of_tokens[starts[-1] :]) <= {-1}
                pairs = zip(step.num_scheduled, expected_rejected, strict=True)
                counts = [scheduled - rejected for scheduled, rejected in pairs]
                for i in range(batch):
                    if not step.is_invalid[i]:
                        assert starts[i + 1] - starts[i] == counts[i]
                        assert lengths[i] == step.num_computed[i] + counts[i]
            for i, token in enumerate(next_token_ids.tolist()):
                if not step.is_discarded[i] and not step.is_invalid[i]:
                    assert self.target.predict(step.contexts[-1][indices[i]]) == token

        self.device.launch(check)
