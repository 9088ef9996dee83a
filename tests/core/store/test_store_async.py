"""AsyncSpecState with a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from async_state.late import LateDevice
from async_state.small import ints, sampled_of
from ngram_npu import NgramConfig, NgramProposer, NgramStore, scope_of
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup

LADDER: dict[str, Any] = {"sizes": "ladder", "min_draft_probability": 0.177, "k": 4}
LIVE = NgramConfig(
    **LADDER, store="live", store_tokens=16384, store_costs=np.ones((16, 56), np.uint8)
)
ROWS, CAPACITY = 3, 200


def made(ngram: NgramConfig = LIVE, draft_on: Any = "auto", **options: Any) -> AsyncSpecState:
    sizes: dict[str, Any] = {
        "max_rows": ROWS,
        "row_capacity": CAPACITY,
        "max_step_tokens": 256,
        "kv_groups": (KVGroup(CAPACITY, 1),),
    }
    return AsyncSpecState(AsyncConfig(ngram, draft_on=draft_on, **sizes), **options)


def step(state: AsyncSpecState, rows: list[int], said: list[list[int]], **changes: Any) -> Any:
    """Runs a step that samples ``said`` and verifies no drafts; returns its outputs."""
    scheduled = [1] * len(rows)
    for admission in changes.get("new", ()):
        scheduled[rows.index(admission.row)] = len(admission.token_ids)
    state.begin_step(Batch(ints(*rows), ints(*scheduled), ints(*[0] * len(rows)), **changes))
    found = state.end_step(sampled_of(*said))
    state.reconcile()
    return found


def joins(row: int, *prompt: int, scope: int = 0) -> Admission:
    return Admission(row, ints(*prompt), (ints(row),), scope=scope)


def test_scopes_follow_requests_through_rows() -> None:
    state = made()
    a, b = scope_of("a"), scope_of("b")
    new = [joins(0, 9, scope=a), joins(1, 8, scope=b), joins(2, 7, scope=a)]
    step(state, [0, 1, 2], [[1], [1], [1]], new=new)
    for word in range(51, 60):
        step(state, [0], [[word]])
    moves = np.array([[0, 1], [1, 2], [2, 0]])
    step(state, [0, 2], [[51], [51]], moves=moves)
    found = step(state, [2, 0], [[52], [52]])
    assert found.num_draft_tokens.tolist() == [0, 4], "b has heard nothing, a has"


def test_it_is_the_proposer_s_step() -> None:
    """Requests come, go and change rows; a proposer fed the same tokens has an equal store."""
    state, proposer = made(), NgramProposer(LIVE, num_slots=ROWS)
    tokens, lengths = torch.zeros((ROWS, CAPACITY), dtype=torch.int32), torch.zeros(3).int()
    rng = np.random.default_rng(5)
    left: list[int] = []
    for at in range(300):
        new, row = [], at % ROWS
        if at < ROWS or at % 20 == 19:
            left = [] if at < ROWS else [row]
            prompt = rng.integers(0, 9, 3).tolist()
            new = [joins(row, *prompt, scope=row % 2)]
            if left:
                proposer.reset(torch.tensor(left))
            # With one row freed at a time, a request's slot is its row's from the start.
            tokens[row, :3], lengths[row] = torch.tensor(prompt).int(), 3
        words = rng.integers(0, 9, 1).tolist()
        found = step(state, [row], [words], new=new, removed=ints(*left))
        left = []
        rows = torch.tensor([row])
        expected: Any = proposer.step(
            tokens, lengths, sampled_of(words), row_indices=rows, scopes=torch.tensor([row % 2])
        )
        assert torch.equal(found.draft_token_ids, expected.draft_token_ids)
        assert torch.equal(found.match_len, expected.match_len)
        assert torch.equal(found.num_draft_tokens, expected.num_draft_tokens)
        known = state.wait_drafts().draft_token_ids
        assert known.tolist() == found.draft_token_ids.tolist()
    assert torch.equal(state.store.tensor, proposer.store.tensor)  # type: ignore[union-attr]
    state.store.check_integrity()  # type: ignore[union-attr]
    assert proposer.store.statistics.drafts > 20  # type: ignore[union-attr]


@pytest.mark.parametrize("draft_on", ["device", "host"])
@pytest.mark.parametrize("bad", [[0, -1], [0, ROWS], [1, 1], [0, 2]])
def test_async_state_step_with_bad_rows_stores_nothing(draft_on: str, bad: list[int]) -> None:
    """Row 2 is free: its slot may still hold the text of the request that has left."""
    state = made(draft_on=draft_on)
    new = [joins(0, 9, scope=1), joins(1, 8, scope=2), joins(2, 7, scope=3)]
    step(state, [0, 1, 2], [[50], [60], [70]], new=new)
    step(state, [0, 1], [[51], [61]], removed=ints(2))
    before = state.store.tensor.clone(), state.token_ids.clone()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="begin_step: rows: expected"):
        step(state, bad, [[52], [62]])
    assert torch.equal(state.store.tensor, before[0])  # type: ignore[union-attr]
    assert torch.equal(state.token_ids, before[1])
    for word in (62, 63, 64):
        step(state, [1], [[word]])
    stored = {s: t.tolist() for s, t in state.store._texts()}  # type: ignore[union-attr]
    kept = slice(-1) if draft_on == "host" else slice(None)  # the host's store lags one step
    assert stored[2] == [60, 61, 62, 63, 64][kept]
    assert all(token // 10 == scope + 4 for scope, text in stored.items() for token in text)


def test_who_leaves_has_finished() -> None:
    config = NgramConfig(**LADDER, store="finish", store_tokens=16384)
    state = made(config)
    step(state, [0, 1], [[50], [1]], new=[joins(0, 9, 9), joins(1, 8)])
    for word in range(51, 60):
        step(state, [0], [[word]])
    assert state.store.statistics.tokens_entered == 0  # type: ignore[union-attr]
    step(state, [1], [[50]], removed=ints(0))
    assert state.store.statistics.tokens_entered == 10  # type: ignore[union-attr]
    assert step(state, [1], [[51]]).num_draft_tokens.tolist() > [0]
    state.rebuild([])
    assert state.store.statistics.open_slots == 0  # type: ignore[union-attr]


def test_a_given_store() -> None:
    store = NgramStore(8, 16384, kind="torch")
    store.warm([range(50, 60)], scope=3)
    state = made(NgramConfig(**LADDER), store=store)
    assert state.store is store
    found = step(state, [0], [[50]], new=[joins(0, 9, scope=3)])
    assert found.num_draft_tokens[0] > 0


def test_errors() -> None:
    store = NgramStore(3, 16384, kind="torch")
    for arguments, message in (
        ({"ngram": NgramConfig(), "store": store}, "store: expected None without min_draft"),
        ({"store": NgramStore(3, 16384)}, "store: expected one of kind='torch'"),
        (
            {"store": store, "runtime": LateDevice("eager", None), "draft_on": "device"},  # type: ignore[arg-type]
            "store: expected None with draft_on='device' on a device other than the CPU",
        ),
    ):
        with pytest.raises(ValueError, match=f"AsyncSpecState: {message}"):
            made(**arguments)  # type: ignore[arg-type]
    few = NgramConfig(**LADDER, store="live", store_tokens=3071)
    with pytest.raises(ValueError, match="store_tokens: expected at least 3072"):
        made(few)
    assert made(NgramConfig(**LADDER)).store is None
    for scope in (-1, 2**63, True, "a"):
        state = made()
        with pytest.raises(ValueError, match=r"begin_step: new/resumed: scope: expected 0 to"):
            step(state, [0], [[1]], new=[joins(0, 9, scope=scope)])  # type: ignore[arg-type]
