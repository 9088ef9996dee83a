"""An asynchronous scheduler with random events. Its output is compared with plain decoding, and its
host state with the device."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import numpy as np
from ngram_npu.async_state import Admission, Batch, NewBlocks, Reconciled

from async_state.devices import DeviceError, value_of
from async_state.scenario import Request, Scenario
from async_state.simulated_model import Launched, SimulatedModel

Scheduled = tuple[Request, int, int]
"""A request, its tokens and how many of them are drafts."""

_MAX_STEPS = 600


class Engine:
    """Schedules and runs the requests of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = scenario.rng
        self.state, self.device, self.countdown = scenario.make_state()
        self.model = SimulatedModel(scenario, self.state, self.device)
        self.waiting = list(scenario.requests)
        self.running: list[Request] = []
        self.removed: list[int] = []
        self.free_blocks = [list(range(count)) for count in scenario.num_blocks]
        self.launched: list[Launched] = []
        self.last: Launched | None = None
        self.steps = 0
        self.counts: Counter[str] = Counter()
        """Numbers of events."""

    def run(self) -> None:
        while self.waiting or self.running:
            self.steps += 1
            assert self.steps < _MAX_STEPS, "no progress"
            self._step()
        while self.launched:
            self._reconcile()
        for request in self.scenario.requests:
            assert request.tokens == request.expected_tokens
        assert not self.state._host_state._faults, "a fault of a request that has left"
        if self.state.index is not None:
            indexed = self.state.index.statistics
            # A slot that still had another request's tokens would have been rebuilt.
            rebuilds = indexed.rebuilds_shorter + indexed.rebuilds_rewritten
            assert not rebuilds + indexed.rebuilds_options
            self.counts += Counter(indexed=indexed.rows_indexed)

    # One step.

    def _step(self) -> None:
        rng, mode = self.rng, self.scenario.reconciling
        if len(self.launched) > 1 or (
            self.launched and (mode == "at once" or (mode == "any" and rng.random() < 0.4))
        ):
            while self.launched:
                self._reconcile()
                if mode != "at once" and rng.random() < 0.8:
                    break
        num_drafts = None
        if self.scenario.drafting == "trimmed" and self.last is not None:
            num_drafts = self.state.wait_drafts().num_draft_tokens
        for request in [r for r in self.running if r.finished]:
            self._remove(request)
        for request in [r for r in self.running if r.faulty]:
            self._preempt(request)
        for request in list(self.running):
            # At most three preemptions per request, so that all requests finish.
            if request.residency < 4 and rng.random() < self.scenario.preemption:
                self._preempt(request)
        scheduled, grown = self._schedule_running(num_drafts)
        admitted = self._admit(scheduled)
        moves = self._assign_rows(admitted)
        rng.shuffle(scheduled)
        if self.scenario.dense_rows:
            scheduled.sort(key=lambda entry: entry[0].row)
        if rng.random() < self.scenario.failing:
            self.countdown.left = rng.randint(1, 20)
        try:
            self._launch(scheduled, admitted, moves, grown)
        except DeviceError:
            self._rebuild()
        self.countdown.left = 0

    def _rebuild(self) -> None:
        for request in [r for r in self.running if r.finished]:
            self._remove(request)
        self.launched, self.last, self.removed = [], None, []
        for request in self.running:
            request.computed, request.upper = request.exact_computed, len(request.tokens)
            request.position, request.faulty = -1, False
        self.state.rebuild([_make_admission(request) for request in self.running])
        self.model.invalid.clear()
        self.model.acceptance.clear()
        self.counts["rebuilt"] += 1
        self._check_upper()
        if self.rng.random() < 0.3:
            self._check_device()

    def _budget(self, scheduled: list[Scheduled]) -> int:
        return self.scenario.step_tokens - sum(tokens for _, tokens, _ in scheduled)

    def _schedule_running(
        self, num_drafts: Any
    ) -> tuple[list[Scheduled], list[list[tuple[Request, int]]]]:
        """Schedules running requests, and preempts others to free blocks for them.

        Returns:
            The scheduled requests, and the requests with new blocks for each KV group.
        """
        scheduled: list[Scheduled] = []
        grown: list[list[tuple[Request, int]]] = [[] for _ in self.free_blocks]
        for request in list(self.running):
            if not request.is_running or self.rng.random() < self.scenario.skipping:
                continue
            tokens, drafts = self._choose_tokens(request, self._budget(scheduled), num_drafts)
            if tokens <= 0:
                continue
            while not self._has_blocks(request, request.computed + tokens):
                keep = [request, *(entry[0] for entry in scheduled)]
                others = [r for r in self.running if all(r is not one for one in keep)]
                if not others:
                    self._free_kept_blocks()
                    break
                self._preempt(others[-1], keep=False)
            if self._has_blocks(request, request.computed + tokens):
                self._grow(request, request.computed + tokens, grown)
                scheduled.append((request, tokens, drafts))
        return scheduled, grown

    def _choose_tokens(self, request: Request, budget: int, num_drafts: Any) -> tuple[int, int]:
        known = request.upper - request.computed
        if known > 1 or request.position < 0:
            if known == 1 and request.upper >= self.scenario.capacity:
                return 0, 0  # the row may be full
            return min(known, budget, self.rng.randint(1, self.scenario.chunk)), 0
        free = self.scenario.capacity - 1 - request.upper
        if free < 0:
            return 0, 0
        drafts = self.scenario.k
        if self.scenario.drafting == "any":
            drafts = self.rng.randint(0, drafts)
        elif num_drafts is not None:
            drafts = int(num_drafts[request.position])
        drafts = min(drafts, free, budget - 1)
        return 1 + drafts, drafts

    def _admit(self, scheduled: list[Scheduled]) -> list[Request]:
        admitted = []
        for request in [r for r in self.waiting if r.arrival <= self.steps]:
            budget = self._budget(scheduled)
            if budget <= 0 or len(self.running) >= self.scenario.max_rows:
                break
            if not request.kept_blocks:
                request.blocks = [[] for _ in self.free_blocks]
                request.exact_computed = 0
            tokens = min(
                len(request.tokens or request.prompt) - request.exact_computed,
                budget,
                self.rng.randint(1, self.scenario.chunk),
            )
            if not self._has_blocks(request, request.exact_computed + tokens):
                self._free_kept_blocks()
                break
            request.tokens = request.tokens or list(request.prompt)
            request.computed = request.exact_computed
            request.upper = len(request.tokens)
            request.residency += 1
            request.position, request.faulty = -1, False
            request.kept_blocks = False
            self._grow(request, request.computed + tokens, None)
            self.waiting.remove(request)
            self.running.append(request)
            admitted.append(request)
            if self.rng.random() >= self.scenario.skipping:
                scheduled.append((request, tokens, 0))
        return admitted

    def _assign_rows(self, admitted: list[Request]) -> list[tuple[int, int]]:
        """Assigns rows to all running requests: dense as in vLLM's V1 runner, or any free rows.

        Returns:
            The moves of requests that were running before.
        """
        staying = [r for r in self.running if r.row >= 0 and r not in admitted]
        rows = list(range(self.scenario.max_rows))
        if self.scenario.dense_rows:
            keeps_order = self.rng.random() >= self.scenario.shuffling
            order = staying if keeps_order else _shuffled(self.rng, staying)
            places = {id(r): row for row, r in enumerate(order)}
        elif self.rng.random() < self.scenario.shuffling:
            places = dict(zip(map(id, staying), _shuffled(self.rng, rows), strict=False))
        else:
            places = {id(r): r.row for r in staying}
        moves = [(r.row, places[id(r)]) for r in staying if r.row != places[id(r)]]
        for request in staying:
            request.row = places[id(request)]
        free = [row for row in rows if row not in set(places.values())]
        if not self.scenario.dense_rows:
            free = _shuffled(self.rng, free)
        for request, row in zip(admitted, free, strict=False):
            request.row = row
        return moves

    def _launch(
        self,
        scheduled: list[Scheduled],
        admitted: list[Request],
        moves: list[tuple[int, int]],
        grown: list[list[tuple[Request, int]]],
    ) -> None:
        requests = [entry[0] for entry in scheduled]
        previous_positions = [r.position for r in requests]
        entries = [_make_admission(request) for request in admitted]
        cut = self.rng.randint(0, len(entries))
        batch = Batch(
            rows=_array([r.row for r in requests]),
            num_scheduled_tokens=_array([entry[1] for entry in scheduled]),
            num_scheduled_drafts=_array([entry[2] for entry in scheduled]),
            removed=_array(self.removed),
            moves=_array(moves).reshape(-1, 2),
            new=entries[:cut],
            resumed=entries[cut:],
            new_blocks=tuple(
                NewBlocks(_array([r.row for r, _ in g]), _array([b for _, b in g])) for g in grown
            ),
        )
        self.removed = []
        self.counts += Counter(moves=len(moves), empty=not requests)
        step = Launched(
            requests,
            [r.residency for r in requests],
            [entry[1] for entry in scheduled],
            [entry[2] for entry in scheduled],
            [r.computed + tokens < r.upper for r, tokens, _ in scheduled],
            [[list(r.blocks[g]) for r in requests] for g in range(len(self.free_blocks))],
            self.last,
            previous_positions,
        )
        before = copy.deepcopy(batch)
        with self.device.must_not_wait():
            inputs = self.state.begin_step(batch)
        _assert_equal(batch, before)
        _overwrite(batch)
        ends = np.cumsum(step.scheduled)
        assert inputs.draft_spans[:, 1].tolist() == ends.tolist()
        assert inputs.draft_spans[:, 0].tolist() == (ends - step.drafts).tolist()
        spans = list(zip((ends - step.drafts).tolist(), ends.tolist(), strict=True))
        assert inputs.sample_indices.tolist() == [i for a, b in spans for i in range(a - 1, b)]
        assert inputs.draft_indices.tolist() == [i for a, b in spans for i in range(a, b)]
        owners = [i for i, n in enumerate(step.scheduled) for _ in range(n)]
        assert inputs.request_indices.tolist() == owners
        sampled = self.model.empty_sampled(len(requests))
        self.model.forward(inputs, sampled, step)
        with self.device.must_not_wait():
            if self.scenario.neural:
                drafter = functools.partial(self.model.neural_drafts, inputs, step)
                self.state.end_step(sampled, drafter)
            else:
                outputs = self.state.end_step(sampled)
                self.model.check_drafter_batch(inputs, outputs, step)
        assert self.state.num_computed_tokens is None
        for request in self.running:
            request.position = -1
        for i, (request, tokens, drafts) in enumerate(scheduled):
            request.computed += tokens
            if not step.discarded[i]:
                request.upper += 1 + drafts
                request.position = i
        self._check_upper()
        self.launched.append(step)
        self.last = step
        if self.scenario.reconciling == "at once":
            self._reconcile()

    # Requests that leave, and their blocks.

    def _leave(self, request: Request) -> None:
        assert request.row >= 0
        self.removed.append(request.row)
        self.running.remove(request)
        request.row = request.position = -1

    def _remove(self, request: Request) -> None:
        self._leave(request)
        self._free(request)

    def _preempt(self, request: Request, keep: bool | None = None) -> None:
        self._leave(request)
        request.drops_in_flight = self.rng.random() < 0.5
        request.kept_blocks = self.rng.random() < 0.3 if keep is None else keep
        if not request.kept_blocks:
            self._free(request)
        request.arrival = self.steps + self.rng.randint(0, 3)
        self.waiting.append(request)
        self.rng.shuffle(self.waiting)

    def _free(self, request: Request) -> None:
        for free, blocks in zip(self.free_blocks, request.blocks, strict=True):
            free += blocks
        request.blocks = [[] for _ in self.free_blocks]

    def _free_kept_blocks(self) -> None:
        """Frees the blocks of waiting requests, which might otherwise wait forever."""
        for request in self.waiting:
            if request.kept_blocks:
                request.kept_blocks = False
                self._free(request)

    def _missing(self, request: Request, group: int, tokens: int) -> int:
        return -(-tokens // self.scenario.block_sizes[group]) - len(request.blocks[group])

    def _has_blocks(self, request: Request, tokens: int) -> bool:
        return all(
            self._missing(request, g, tokens) <= len(free)
            for g, free in enumerate(self.free_blocks)
        )

    def _grow(
        self, request: Request, tokens: int, grown: list[list[tuple[Request, int]]] | None
    ) -> None:
        for group, free in enumerate(self.free_blocks):
            for _ in range(self._missing(request, group, tokens)):
                block = free.pop()
                request.blocks[group].append(block)
                if grown is not None:
                    grown[group].append((request, block))

    # Results.

    def _reconcile(self) -> None:
        step = self.launched.pop(0)
        result = self.state.reconcile()
        for i, request in enumerate(step.requests):
            self._apply(result, i, request, step)
        if self.state.is_exact or self.rng.random() < 0.1:
            self._check_device()

    def _apply(self, result: Reconciled, i: int, request: Request, step: Launched) -> None:
        count = int(result.num_sampled[i])
        is_live = request.is_running and request.residency == step.residencies[i]
        assert bool(result.alive[i]) == is_live
        assert (i in result.faults) == (is_live and step.invalid[i])
        assert count == step.num_sampled[i]
        assert result.num_scheduled_drafts[i] == step.drafts[i]
        gained = count if step.drafts[i] or i in result.faults else step.scheduled[i]
        if is_live:
            request.computed -= step.scheduled[i] - gained
            request.upper -= 0 if step.discarded[i] else 1 + step.drafts[i] - count
        if step.invalid[i]:
            self.counts["bad samples"] += is_live and not request.faulty
            request.faulty |= is_live
            assert not is_live or request.finished or result.num_tokens[i] == len(request.tokens)
            return
        assert result.num_valid_drafts[i] == step.valid_drafts.get(i, 0)
        assert result.num_accepted_drafts[i] <= result.num_valid_drafts[i] <= step.drafts[i]
        valid, accepted = int(result.num_valid_drafts[i]), int(result.num_accepted_drafts[i])
        source = step.sources.get(i, 0)
        assert result.draft_source is None or result.draft_source[i] == source
        kind = ("", "neural drafts", "n-grams instead", "n-grams after neural")[source]
        self.counts += Counter({kind: accepted} if kind else {})
        self.counts += Counter(
            discarded=step.discarded[i],
            padded=step.drafts[i] - valid,
            accepted=accepted,
            rejected=valid - accepted,
        )
        if is_live:
            assert result.num_computed_tokens[i] == step.computed[i] + gained
        if request.residency != step.residencies[i] or request.finished:
            return
        if not request.is_running and request.drops_in_flight:
            return
        request.exact_computed = step.computed[i] + gained
        request.tokens += result.sampled_token_ids[i, :count].tolist()
        assert not is_live or result.num_tokens[i] == len(request.tokens)
        expected = request.expected_tokens
        if len(request.tokens) >= len(expected):
            request.tokens = request.tokens[: len(expected)]
            request.finished = True
            if not request.is_running:
                self._free(request)
                self.waiting.remove(request)
        assert request.tokens == expected[: len(request.tokens)], "a wrong token"

    def _check_upper(self) -> None:
        computed = self.state.upper_num_computed_tokens
        tokens = self.state.upper_num_tokens
        assert computed is not None
        assert tokens is not None
        for request in self.running:
            assert computed[request.row] == request.computed
            assert tokens[request.row] == request.upper

    def _check_device(self) -> None:
        """Checks that the host state agrees with the device."""
        computed, tokens = self.state.num_computed_tokens, self.state.num_tokens
        if computed is None or tokens is None:
            return
        self.device.drain()
        indexed: dict[int, Any] = {}
        for request in self.running:
            if request.residency == 0 or request.row in self.removed or request.faulty:
                continue
            assert computed[request.row] == request.computed
            known = self.state.known_token_ids(request.row)
            assert known is not None
            assert len(known) == tokens[request.row] == request.upper
            slot = self.state._host_state.slot_of[request.row]
            assert value_of(self.state.num_tokens_on_device)[slot] == request.upper
            row = value_of(self.state.token_ids)[slot, : request.upper]
            assert row.tolist() == known.tolist()
            if not request.finished:
                assert known.tolist() == request.tokens
            indexed[int(slot)] = known
        if self.state.index is not None and self.rng.random() < 0.1:
            self.state.index.check_integrity(indexed)


def _shuffled(rng: Any, values: list[Any]) -> list[Any]:
    values = list(values)
    rng.shuffle(values)
    return values


def _make_admission(request: Request) -> Admission:
    blocks = tuple(np.array(b, np.int32) for b in request.blocks)
    tokens = np.array(request.tokens, np.int32)
    return Admission(request.row, tokens, blocks, request.computed)


def _array(values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def _arrays(batch: Batch) -> list[Any]:
    admissions = (*batch.new, *batch.resumed)
    return [
        batch.rows,
        batch.num_scheduled_tokens,
        batch.num_scheduled_drafts,
        batch.removed,
        batch.moves,
        *(a.token_ids for a in admissions),
        *(blocks for a in admissions for blocks in a.block_ids),
        *(part for g in batch.new_blocks for part in (g.rows, g.block_ids)),
    ]


def _assert_equal(batch: Batch, before: Batch) -> None:
    for array, expected in zip(_arrays(batch), _arrays(before), strict=True):
        assert array.tolist() == expected.tolist(), "begin_step wrote to its argument"


def _overwrite(batch: Batch) -> None:
    """Overwrites the arrays, as a runner that reuses them does."""
    for array in _arrays(batch):
        array[...] = -77


def run(scenario: Scenario) -> Engine:
    engine = Engine(scenario)
    engine.run()
    return engine
