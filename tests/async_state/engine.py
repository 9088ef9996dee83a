"""An asynchronous scheduler with random events. It compares its output with plain decoding, and its
host state with the device."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
from ngram_npu.async_state import Admission, Batch, NewBlocks, Reconciled

from async_state.devices import DeviceError, check_store, get_value
from async_state.scenario import Request, Scenario
from async_state.simulated_model import LaunchedStep
from async_state.stages import Stage

Scheduled = tuple[Request, int, int]
"""A request, its number of tokens in the step, and how many of these are drafts."""

_MAX_STEPS = 600


class Engine:
    """Schedules and runs the requests of a scenario. Counts named `upper_` are optimistic: all
    drafts in flight count as accepted. Requests with invalid samples are `faults` of the state."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = scenario.rng
        self._invalid_requests: set[tuple[int, int]] = set()
        self.stages = [
            Stage(scenario, number, self._invalid_requests) for number in range(scenario.num_stages)
        ]
        # The scheduler uses the state of the last stage, which samples.
        self.state, self.device = self.stages[-1].state, self.stages[-1].device
        self.waiting = list(scenario.requests)
        self.running: list[Request] = []
        self.removed_rows: list[int] = []
        self.free_blocks = [list(range(count)) for count in scenario.num_blocks]
        self.steps_in_flight: list[LaunchedStep] = []
        self.last_step: LaunchedStep | None = None
        self.steps = 0
        self.event_counts: Counter[str] = Counter()
        """Number of occurrences of each event."""

    def run(self) -> None:
        while self.waiting or self.running:
            self.steps += 1
            assert self.steps < _MAX_STEPS, "expected all requests to end earlier"
            self._run_step()
        while self.steps_in_flight:
            self._reconcile_step()
        for request in self.scenario.requests:
            assert request.tokens == request.expected_tokens
        assert not self.state._host_state._faults, "expected no requests that have left"
        if self.state.store is not None:
            self._check_store(self.state.store)

    def _check_store(self, store: Any) -> None:
        """Checks that the store contains texts of its scopes: generated tokens of plain decoding,
        without those that a request sampled after its end."""
        self.device.drain()
        for scope, text in check_store(store):
            self.event_counts["stored tokens"] += len(text)
            if self.scenario.invalid_probability == 0:
                assert any(
                    text == request.decoded_tokens[begin : begin + len(text)]
                    for request in self.scenario.requests
                    for begin in range(len(request.prompt), len(request.decoded_tokens))
                    if request.scope == scope
                    and begin + len(text) <= max(request.store_ends.values(), default=math.inf)
                ), "expected a text of the scope"

    # One step.

    def _run_step(self) -> None:
        rng, mode = self.rng, self.scenario.reconciling_mode
        if len(self.steps_in_flight) > 1 or (
            self.steps_in_flight and (mode == "at once" or (mode == "any" and rng.random() < 0.4))
        ):
            while self.steps_in_flight:
                self._reconcile_step()
                if mode != "at once" and rng.random() < 0.8:
                    break
        num_drafts = None
        if self.scenario.drafting_mode == "trimmed" and self.last_step is not None:
            num_drafts = self.state.wait_drafts().num_draft_tokens
        for request in [r for r in self.running if r.is_finished]:
            self._remove_request(request)
        for request in [r for r in self.running if r.is_invalid]:
            self._preempt_request(request)
        for request in list(self.running):
            # At most three preemptions per request, so that all requests finish.
            if request.num_admissions < 4 and rng.random() < self.scenario.preempt_probability:
                self._preempt_request(request)
        scheduled, new_blocks = self._schedule_running(num_drafts)
        admitted = self._admit_waiting(scheduled)
        moves = self._assign_rows(admitted)
        rng.shuffle(scheduled)
        if self.scenario.dense_rows:
            scheduled.sort(key=lambda entry: entry[0].row)
        if rng.random() < self.scenario.failure_probability:
            countdown = self.stages[self.steps % len(self.stages)].failure_countdown
            countdown.calls_left = rng.randint(1, 20)  # this call of the device fails
        try:
            self._launch_step(scheduled, admitted, moves, new_blocks)
        except DeviceError:
            self._rebuild_states()
        for stage in self.stages:
            stage.failure_countdown.calls_left = 0

    def _rebuild_states(self) -> None:
        for request in [r for r in self.running if r.is_finished]:
            self._remove_request(request)
        self.steps_in_flight, self.last_step, self.removed_rows = [], None, []
        for request in self.running:
            request.upper_computed = request.exact_computed
            request.upper_length = len(request.tokens)
            request.position, request.is_invalid = -1, False
        for stage in self.stages:
            stage.state.rebuild([_make_admission(request) for request in self.running])
            stage.model.acceptance.clear()
        self._invalid_requests.clear()
        self.event_counts["rebuilt"] += 1
        self._check_upper_bounds()
        if self.rng.random() < 0.3:
            self._check_device_state()

    def _get_budget(self, scheduled: list[Scheduled]) -> int:
        return self.scenario.step_tokens - sum(tokens for _, tokens, _ in scheduled)

    def _schedule_running(
        self, num_drafts: Any
    ) -> tuple[list[Scheduled], list[list[tuple[Request, int]]]]:
        """Schedules running requests, and preempts others to free blocks for them.

        Returns:
            The scheduled requests, and for each KV group the requests with their new blocks.
        """
        scheduled: list[Scheduled] = []
        new_blocks: list[list[tuple[Request, int]]] = [[] for _ in self.free_blocks]
        for request in list(self.running):
            if not request.is_running or self.rng.random() < self.scenario.skip_probability:
                continue
            budget = self._get_budget(scheduled)
            tokens, drafts = self._choose_tokens(request, budget, num_drafts)
            if tokens <= 0:
                continue
            while not self._has_blocks(request, request.upper_computed + tokens):
                kept_uids = [request.uid, *(entry[0].uid for entry in scheduled)]
                candidates = [r for r in self.running if r.uid not in kept_uids]
                if not candidates:
                    self._free_kept_blocks()
                    break
                self._preempt_request(candidates[-1], keeps_blocks=False)
            if self._has_blocks(request, request.upper_computed + tokens):
                self._allocate_blocks(request, request.upper_computed + tokens, new_blocks)
                scheduled.append((request, tokens, drafts))
        return scheduled, new_blocks

    def _choose_tokens(self, request: Request, budget: int, num_drafts: Any) -> tuple[int, int]:
        """Returns the numbers of tokens and of drafts; 0 if the request must wait."""
        num_uncomputed = request.upper_length - request.upper_computed
        # A request in prefill, or that was not in the previous step, gets no drafts.
        if num_uncomputed > 1 or request.position < 0:
            if num_uncomputed == 1 and request.upper_length >= self.scenario.capacity:
                return 0, 0  # the token might not fit; waits until the exact length is known
            return min(num_uncomputed, budget, self.rng.randint(1, self.scenario.max_chunk)), 0
        max_drafts = self.scenario.capacity - 1 - request.upper_length
        if max_drafts < 0:
            return 0, 0
        drafts = self.scenario.k
        if self.scenario.drafting_mode == "any":
            drafts = self.rng.randint(0, drafts)
        elif num_drafts is not None:
            drafts = int(num_drafts[request.position])
        drafts = min(drafts, max_drafts, budget - 1)
        return 1 + drafts, drafts

    def _admit_waiting(self, scheduled: list[Scheduled]) -> list[Request]:
        admitted = []
        for request in [r for r in self.waiting if r.arrival_step <= self.steps]:
            budget = self._get_budget(scheduled)
            if budget <= 0 or len(self.running) >= self.scenario.max_rows:
                break
            if not request.keeps_blocks:
                request.blocks = [[] for _ in self.free_blocks]
                request.exact_computed = 0
            tokens = min(
                len(request.tokens or request.prompt) - request.exact_computed,
                budget,
                self.rng.randint(1, self.scenario.max_chunk),
            )
            if not self._has_blocks(request, request.exact_computed + tokens):
                self._free_kept_blocks()
                break
            request.tokens = request.tokens or list(request.prompt)
            request.upper_computed = request.exact_computed
            request.upper_length = len(request.tokens)
            request.num_admissions += 1
            request.position, request.is_invalid = -1, False
            request.keeps_blocks = False
            self._allocate_blocks(request, request.upper_computed + tokens, None)
            self.waiting.remove(request)
            self.running.append(request)
            admitted.append(request)
            if self.rng.random() >= self.scenario.skip_probability:
                scheduled.append((request, tokens, 0))
        return admitted

    def _assign_rows(self, admitted: list[Request]) -> list[tuple[int, int]]:
        """Assigns rows to all running requests: dense as in vLLM's V1 runner, or any free rows.

        Returns:
            The old and new rows of requests that were already running.
        """
        old_requests = [r for r in self.running if r.row >= 0 and r not in admitted]
        rows = list(range(self.scenario.max_rows))
        if self.scenario.dense_rows:
            keeps_order = self.rng.random() >= self.scenario.shuffle_probability
            order = old_requests if keeps_order else _shuffle_copy(self.rng, old_requests)
            new_rows = {r.uid: row for row, r in enumerate(order)}
        elif self.rng.random() < self.scenario.shuffle_probability:
            shuffled_rows = _shuffle_copy(self.rng, rows)
            new_rows = {r.uid: row for r, row in zip(old_requests, shuffled_rows, strict=False)}
        else:
            new_rows = {r.uid: r.row for r in old_requests}
        moves = [(r.row, new_rows[r.uid]) for r in old_requests if r.row != new_rows[r.uid]]
        for request in old_requests:
            request.row = new_rows[request.uid]
        free_rows = [row for row in rows if row not in new_rows.values()]
        if not self.scenario.dense_rows:
            free_rows = _shuffle_copy(self.rng, free_rows)
        for request, row in zip(admitted, free_rows, strict=False):
            request.row = row
        return moves

    def _launch_step(
        self,
        scheduled: list[Scheduled],
        admitted: list[Request],
        moves: list[tuple[int, int]],
        new_blocks: list[list[tuple[Request, int]]],
    ) -> None:
        requests = [entry[0] for entry in scheduled]
        previous_positions = [r.position for r in requests]
        admissions = [_make_admission(request) for request in admitted]
        num_new = self.rng.randint(0, len(admissions))  # begin_step treats both lists alike
        batch = Batch(
            rows=_to_int32([r.row for r in requests]),
            num_scheduled_tokens=_to_int32([entry[1] for entry in scheduled]),
            num_scheduled_drafts=_to_int32([entry[2] for entry in scheduled]),
            removed=_to_int32(self.removed_rows),
            moves=_to_int32(moves).reshape(-1, 2),
            new=admissions[:num_new],
            resumed=admissions[num_new:],
            new_blocks=tuple(
                NewBlocks(_to_int32([r.row for r, _ in g]), _to_int32([b for _, b in g]))
                for g in new_blocks
            ),
        )
        self.removed_rows = []
        self.event_counts += Counter(moves=len(moves), empty=not requests)
        step = LaunchedStep(
            requests=requests,
            admission_numbers=[r.num_admissions for r in requests],
            num_scheduled=[entry[1] for entry in scheduled],
            num_drafts=[entry[2] for entry in scheduled],
            is_discarded=[r.upper_computed + n < r.upper_length for r, n, _ in scheduled],
            blocks=[[list(r.blocks[g]) for r in requests] for g in range(len(self.free_blocks))],
            previous_step=self.last_step,
            is_previous_reconciled=not self.steps_in_flight,
            previous_positions=previous_positions,
        )
        batch_copy = copy.deepcopy(batch)
        all_inputs = [stage.begin_step(batch) for stage in self.stages]
        _assert_unchanged(batch, batch_copy)
        _overwrite_arrays(batch)
        inputs = all_inputs[-1]
        ends = np.cumsum(step.num_scheduled)
        assert inputs.draft_spans[:, 1].tolist() == ends.tolist()
        assert inputs.draft_spans[:, 0].tolist() == (ends - step.num_drafts).tolist()
        spans = list(zip((ends - step.num_drafts).tolist(), ends.tolist(), strict=True))
        assert inputs.sample_indices.tolist() == [i for a, b in spans for i in range(a - 1, b)]
        assert inputs.draft_indices.tolist() == [i for a, b in spans for i in range(a, b)]
        positions = [i for i, n in enumerate(step.num_scheduled) for _ in range(n)]
        assert inputs.request_indices.tolist() == positions
        *other_stages, last_stage = zip(self.stages, all_inputs, strict=True)
        for stage, stage_inputs in other_stages:
            stage.model.launch_forward(stage_inputs, None, step)
            last_stage[0].device.wait("main", stage.device.record("main"))
        messages = last_stage[0].sample(inputs, step)
        for stage, stage_inputs in other_stages:
            stage.receive(stage_inputs, messages, step)
        # The host does not know the exact counts until the step is reconciled.
        assert self.state.num_computed_tokens is None
        for request in self.running:
            request.position = -1
        for i, (request, tokens, drafts) in enumerate(scheduled):
            request.upper_computed += tokens
            if not step.is_discarded[i]:
                request.upper_length += 1 + drafts
                request.position = i
        self._check_upper_bounds()
        self.steps_in_flight.append(step)
        self.last_step = step
        if self.scenario.reconciling_mode == "at once":
            self._reconcile_step()

    # Removal of requests from the batch, and their KV blocks.

    def _remove_from_batch(self, request: Request) -> None:
        assert request.row >= 0
        self.removed_rows.append(request.row)
        self.running.remove(request)
        request.row = request.position = -1

    def _remove_request(self, request: Request) -> None:
        self._remove_from_batch(request)
        self._free_blocks(request)

    def _preempt_request(self, request: Request, keeps_blocks: bool | None = None) -> None:
        self._remove_from_batch(request)
        request.ignores_results_in_flight = self.rng.random() < 0.5
        request.keeps_blocks = self.rng.random() < 0.3 if keeps_blocks is None else keeps_blocks
        if not request.keeps_blocks:
            self._free_blocks(request)
        request.arrival_step = self.steps + self.rng.randint(0, 3)
        self.waiting.append(request)
        self.rng.shuffle(self.waiting)

    def _free_blocks(self, request: Request) -> None:
        for group_blocks, blocks in zip(self.free_blocks, request.blocks, strict=True):
            group_blocks += blocks
        request.blocks = [[] for _ in self.free_blocks]

    def _free_kept_blocks(self) -> None:
        """Frees the blocks of waiting requests, which might otherwise wait forever."""
        for request in self.waiting:
            if request.keeps_blocks:
                request.keeps_blocks = False
                self._free_blocks(request)

    def _count_missing_blocks(self, request: Request, group: int, tokens: int) -> int:
        return -(-tokens // self.scenario.block_sizes[group]) - len(request.blocks[group])

    def _has_blocks(self, request: Request, tokens: int) -> bool:
        return all(
            self._count_missing_blocks(request, g, tokens) <= len(group_blocks)
            for g, group_blocks in enumerate(self.free_blocks)
        )

    def _allocate_blocks(
        self, request: Request, tokens: int, new_blocks: list[list[tuple[Request, int]]] | None
    ) -> None:
        """Gives a request blocks for its first `tokens` tokens, and lists these in `new_blocks`."""
        for group, group_blocks in enumerate(self.free_blocks):
            for _ in range(self._count_missing_blocks(request, group, tokens)):
                block = group_blocks.pop()
                request.blocks[group].append(block)
                if new_blocks is not None:
                    new_blocks[group].append((request, block))

    # Results of steps.

    def _reconcile_step(self) -> None:
        step = self.steps_in_flight.pop(0)
        *other_results, result = [stage.state.reconcile() for stage in self.stages]
        for other in other_results:
            _assert_equal_results(other, result)
        for i, request in enumerate(step.requests):
            self._apply(result, i, request, step)
        if self.state.is_exact or self.rng.random() < 0.1:
            self._check_device_state()

    def _apply(self, result: Reconciled, i: int, request: Request, step: LaunchedStep) -> None:
        """Applies the result at batch position `i` to its request."""
        count = int(result.num_sampled[i])
        is_alive = request.is_running and request.num_admissions == step.admission_numbers[i]
        assert bool(result.alive[i]) == is_alive
        assert (i in result.faults) == (is_alive and step.is_invalid[i])
        assert count == step.num_sampled[i]
        assert result.num_scheduled_drafts[i] == step.num_drafts[i]
        # With drafts, only the tokens that are kept are computed; with an invalid sample, none.
        num_computed = count if step.num_drafts[i] or i in result.faults else step.num_scheduled[i]
        if is_alive:
            request.upper_computed -= step.num_scheduled[i] - num_computed
            request.upper_length -= 0 if step.is_discarded[i] else 1 + step.num_drafts[i] - count
        if step.is_invalid[i]:
            self.event_counts["bad samples"] += is_alive and not request.is_invalid
            request.is_invalid |= is_alive
            if is_alive and not request.is_finished:
                assert result.num_tokens[i] == len(request.tokens)
            return
        if self.state.store is None:
            assert result.num_valid_drafts[i] == step.num_valid_drafts.get(i, 0)
        assert result.num_accepted_drafts[i] <= result.num_valid_drafts[i] <= step.num_drafts[i]
        num_valid = int(result.num_valid_drafts[i])
        num_accepted = int(result.num_accepted_drafts[i])
        source = step.sources.get(i, 0)
        assert result.draft_source is None or result.draft_source[i] == source
        # By draft_source: no draft, a neural draft, one replaced or one continued by n-grams.
        event = ("", "neural drafts", "n-grams instead", "n-grams after neural")[source]
        self.event_counts += Counter({event: num_accepted} if event else {})
        self.event_counts += Counter(
            discarded=step.is_discarded[i],
            padded=step.num_drafts[i] - num_valid,
            accepted=num_accepted,
            rejected=num_valid - num_accepted,
        )
        if is_alive:
            assert result.num_computed_tokens[i] == step.num_computed[i] + num_computed
        if request.num_admissions != step.admission_numbers[i] or request.is_finished:
            return
        if not request.is_running and request.ignores_results_in_flight:
            return
        request.exact_computed = step.num_computed[i] + num_computed
        request.tokens += result.sampled_token_ids[i, :count].tolist()
        assert not is_alive or result.num_tokens[i] == len(request.tokens)
        expected = request.expected_tokens
        if len(request.tokens) >= len(expected):
            request.tokens = request.tokens[: len(expected)]
            request.is_finished = True
            if not request.is_running:
                self._free_blocks(request)
                self.waiting.remove(request)
        assert request.tokens == expected[: len(request.tokens)], "expected plain decoding's tokens"

    def _check_upper_bounds(self) -> None:
        computed = self.state.upper_num_computed_tokens
        tokens = self.state.upper_num_tokens
        assert computed is not None
        assert tokens is not None
        for request in self.running:
            assert computed[request.row] == request.upper_computed
            assert tokens[request.row] == request.upper_length

    def _check_device_state(self) -> None:
        """Checks that the host's counts and tokens equal those on the device."""
        computed, tokens = self.state.num_computed_tokens, self.state.num_tokens
        if computed is None or tokens is None:
            return
        for stage in self.stages:
            stage.device.drain()
            self._check_stage(stage, computed, tokens)

    def _check_stage(self, stage: Stage, computed: Any, tokens: Any) -> None:
        state = stage.state
        for request in self.running:
            is_removed = request.row in self.removed_rows
            if request.num_admissions == 0 or is_removed or request.is_invalid:
                continue
            assert computed[request.row] == request.upper_computed
            known_tokens = state.known_token_ids(request.row)
            assert known_tokens is not None
            assert len(known_tokens) == tokens[request.row] == request.upper_length
            slot = state._host_state.slot_of[request.row]
            assert get_value(state.num_tokens_on_device)[slot] == request.upper_length
            row = get_value(state.token_ids)[slot, : request.upper_length]
            assert row.tolist() == known_tokens.tolist()
            if not request.is_finished:
                assert known_tokens.tolist() == request.tokens


def _assert_equal_results(result: Reconciled, expected: Reconciled) -> None:
    """Stages that receive their drafts do not know the drafts' source. After a failure in one
    stage, the numbers of steps may differ, also in the reasons of faults."""
    assert result.faults.keys() == expected.faults.keys()
    for field in dataclasses.fields(Reconciled):
        if field.name not in ("draft_source", "step", "faults"):
            value, expected_value = (getattr(r, field.name) for r in (result, expected))
            assert np.array_equal(value, expected_value), field.name


def _shuffle_copy(rng: Any, values: list[Any]) -> list[Any]:
    values = list(values)
    rng.shuffle(values)
    return values


def _make_admission(request: Request) -> Admission:
    blocks = tuple(np.array(b, np.int32) for b in request.blocks)
    tokens = np.array(request.tokens, np.int32)
    return Admission(
        request.row,
        tokens,
        blocks,
        request.upper_computed,
        request.scope,
        rope_positions=None if request.rope.prompt is None else np.array(request.rope.prompt),
        rope_delta=request.rope.delta,
    )


def _to_int32(values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def _collect_arrays(batch: Batch) -> list[Any]:
    admissions = (*batch.new, *batch.resumed)
    return [
        batch.rows,
        batch.num_scheduled_tokens,
        batch.num_scheduled_drafts,
        batch.removed,
        batch.moves,
        *(a.token_ids for a in admissions),
        *(a.rope_positions for a in admissions if a.rope_positions is not None),
        *(blocks for a in admissions for blocks in a.block_ids),
        *(array for g in batch.new_blocks for array in (g.rows, g.block_ids)),
    ]


def _assert_unchanged(batch: Batch, batch_copy: Batch) -> None:
    for array, expected in zip(_collect_arrays(batch), _collect_arrays(batch_copy), strict=True):
        assert array.tolist() == expected.tolist(), "expected begin_step not to change it"


def _overwrite_arrays(batch: Batch) -> None:
    """Overwrites the batch's arrays, as a runner that reuses arrays does."""
    for array in _collect_arrays(batch):
        array[...] = -77


def run_scenario(scenario: Scenario) -> Engine:
    engine = Engine(scenario)
    engine.run()
    return engine
