"""Events of rows and slots, as rules that hypothesis combines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from index_world import Lookup, World

ROWS, CAPACITY = 4, 60
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=25)
ROW = st.integers(0, ROWS - 1)


class IndexMachine(RuleBasedStateMachine):
    """Requests in a few short rows with few different tokens, so that text repeats."""

    @initialize(
        min_n=st.sampled_from([1, 1, 2, 3]),
        span=st.sampled_from([0, 1, 2, 3, 7]),
        k=st.integers(0, 5),
        match_policy=st.integers(0, 1),
        overlap=st.booleans(),
        pages=st.sampled_from([1, 2, 4, 40]),
        ladder=st.integers(0, 2).map(lambda one_in_three: one_in_three == 2),
        cost_limit=st.none() | st.integers(0, 150),
    )
    def start(
        self,
        min_n: int,
        span: int,
        k: int,
        match_policy: int,
        overlap: bool,
        pages: int,
        ladder: bool,
        cost_limit: int | None,
    ) -> None:
        if ladder:
            lookup = Lookup(1, 16, k, 1, overlap, ladder=True, cost_limit=cost_limit)
        else:
            lookup = Lookup(min_n, min_n + span, k, match_policy, overlap)
        self.world = World(ROWS, CAPACITY, lookup, ROWS + 2, pages)

    @rule(row=ROW, tokens=TOKENS, indexed=st.booleans())
    def prompt_piece(self, row: int, tokens: list[int], indexed: bool) -> None:
        self.world.write(row, tokens)
        if indexed:
            self.world.append([row])

    @rule(rows=st.permutations(range(ROWS)), count=st.integers(1, ROWS))
    def append(self, rows: list[int], count: int) -> None:
        self.world.append(rows[:count])

    @rule(
        rows=st.permutations(range(ROWS)),
        count=st.integers(1, ROWS),
        width=st.integers(1, 4),
        drawn=st.lists(st.integers(-1, 2), min_size=16, max_size=16),
        discard=st.none() | st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
        advance=st.booleans(),
        vocab_size=st.sampled_from([2, 3, 3, 3]),
    )
    def step(
        self,
        rows: list[int],
        count: int,
        width: int,
        drawn: list[int],
        discard: list[bool] | None,
        advance: bool,
        vocab_size: int,
    ) -> None:
        sampled = np.array(drawn[: count * width], np.int32).reshape(count, width)
        mask = None if discard is None else np.array(discard[:count])
        self.world.step(rows[:count], sampled, mask, advance, vocab_size)

    @rule(drawn=st.lists(st.integers(0, 2), min_size=5 * ROWS, max_size=5 * ROWS))
    def several_steps(self, drawn: list[int]) -> None:
        for token in np.array(drawn, np.int32).reshape(5, ROWS, 1):
            self.world.step(range(ROWS), token, by_row=True)

    @rule(row=ROW)
    def finish(self, row: int) -> None:
        self.world.reset([row])
        self.world.lengths[row] = 0

    @rule(row=ROW, tokens=TOKENS)
    def another_request_in_the_slot(self, row: int, tokens: list[int]) -> None:
        self.world.write(row, tokens, at=0)

    @rule(order=st.permutations(range(ROWS)))
    def rows_move_and_slots_follow(self, order: list[int]) -> None:
        world = self.world
        for array in (world.rows, world.lengths, world.slots):
            array[:] = array[order]

    @rule(order=st.permutations(range(ROWS)))
    def rows_move_and_slots_stay(self, order: list[int]) -> None:
        for array in (self.world.rows, self.world.lengths):
            array[:] = array[order]

    @rule(row=ROW, other=ROW, spare=st.integers(ROWS, ROWS + 1))
    def preempted_and_resumed(self, row: int, other: int, spare: int) -> None:
        """The request comes back in another row with its old slot; the request of that row gets a
        slot that has not indexed it."""
        world = self.world
        tokens, slot = world.live(row).copy(), world.slots[row]
        world.write(row, [], at=0)
        if row != other:
            world.slots[row] = spare if spare not in world.slots else world.slots[other]
            world.slots[other] = slot
        world.write(other, tokens.tolist(), at=0)

    @rule(row=ROW, keep=st.integers(0, CAPACITY))
    def cut(self, row: int, keep: int) -> None:
        self.world.lengths[row] = min(self.world.lengths[row], keep)

    @rule(row=ROW, last=st.integers(1, 8), token=st.integers(0, 3))
    def rewritten_at_the_end(self, row: int, last: int, token: int) -> None:
        live = self.world.live(row)
        if len(live) >= last:
            live[-last] = token

    @rule(row=ROW, place=st.integers(0, CAPACITY - 1), by=st.integers(1, 2))
    def rewritten_behind_its_back(self, row: int, place: int, by: int) -> None:
        live = self.world.live(row)
        if len(live):
            live[place % len(live)] += by
            live[place % len(live)] %= 3

    @rule(match_policy=st.integers(0, 1), cost_limit=st.none() | st.integers(0, 150))
    def another_lookup(self, match_policy: int, cost_limit: int | None) -> None:
        look = self.world.lookup
        change = {"cost_limit": cost_limit} if look.ladder else {"match_policy": match_policy}
        self.world.lookup = replace(look, **change)

    @invariant()
    def index_is_sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
