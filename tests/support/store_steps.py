"""Random steps of requests that share a store, for tests that compare stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from ngram_npu import NgramStore
from ops.reference.store import BLOCK
from ops.specs import Array
from ops.specs.store import SCOPES, STORE

K = 6
HOSTILE_TOKENS = -(2**31), -1, 0, 2**31 - 1


def generate_steps(seed: int) -> Iterator[dict[str, Array]]:
    """Yields the rows of random steps: tokens, lengths, and the requests of the step. All scopes
    have the same phrases. Requests move to another slot, and come back, without notice."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, 40, (5, 30))
    phrases[0, 10:14] = HOSTILE_TOKENS
    token_ids, num_tokens = np.zeros((6, 900), np.int32), np.zeros(6, np.int32)
    scopes, slots = np.zeros(6, np.int64), np.arange(6)
    while True:
        rows = rng.permutation(6)[: rng.integers(1, 7)]
        num_sampled = rng.choice([0, 1, 3, 24, 100], len(rows)).astype(np.int32)
        for row, count in zip(rows, num_sampled, strict=True):
            if num_tokens[row] + count > 900 or num_tokens[row] == 0 or rng.random() < 0.01:
                num_tokens[row], scopes[row] = 0, rng.choice(SCOPES)
            end = num_tokens[row] + count
            text = np.concatenate(rng.permutation(phrases)).repeat(1 + (count < 4))
            token_ids[row, num_tokens[row] : end] = text[:count]
            num_tokens[row] = end
        if rng.random() < 0.05:
            slots = rng.permutation(6)
        yield {
            "token_ids": token_ids, "num_tokens": num_tokens, "num_sampled": num_sampled,
            "row_indices": rows, "slot_indices": slots[rows], "scopes": scopes[rows],
        }  # fmt: skip


def new_drafts(batch: int) -> dict[str, Array]:
    """Returns the arrays that ``store_propose_`` updates, without drafts of the rows."""
    names = "num_draft_tokens", "match_len", "agreement"
    counts = {name: np.zeros(batch, np.int32) for name in names}
    return {"draft_token_ids": np.full((batch, K), -1, np.int32), **counts}


def run_step(
    store: NgramStore, rows: dict[str, Array], convert: Callable[[Array], Any] = np.asarray
) -> dict[str, Array]:
    """Appends a step to a store, and returns the drafts. ``convert`` makes the arguments of the
    arrays: tensors on the device of the store, or arrays."""
    arguments = {name: convert(array) for name, array in rows.items()}
    drafts = {name: convert(a) for name, a in new_drafts(len(rows["num_sampled"])).items()}
    slot_indices = arguments.pop("slot_indices")
    store.begin_step(len(rows["num_sampled"]), BLOCK)
    store.append(**arguments, slot_indices=slot_indices, max_new=BLOCK)
    store.propose(**arguments, **drafts)
    return {name: torch.as_tensor(draft).cpu().numpy() for name, draft in drafts.items()}


def assert_equal_stores(store: NgramStore, other: NgramStore) -> None:
    for name in STORE:
        assert np.array_equal(getattr(store, name), getattr(other, name)), name


def assert_equal_drafts(drafts: dict[str, Array], others: dict[str, Array], step: int) -> None:
    for name, array in drafts.items():
        assert np.array_equal(array, others[name]), f"step {step}: {name}"


def check_ranks(
    select_rank: Callable[[int, int], AbstractContextManager[None]], num_steps: int
) -> None:
    """Runs the same steps on two ranks, and checks that their drafts and stores are equal.
    ``select_rank(rank, step)`` selects the rank's machine within a `with` block."""
    stores = [NgramStore(8 * BLOCK, num_slots=6) for _ in range(2)]
    num_drafts = 0
    for step, rows in zip(range(num_steps), generate_steps(11), strict=False):
        drafts = []
        for rank, store in enumerate(stores):
            with select_rank(rank, step):
                drafts.append(run_step(store, rows, torch.from_numpy))
        assert_equal_drafts(*drafts, step)
        num_drafts += int((drafts[0]["agreement"] >= 0).sum())
    assert_equal_stores(*stores)
    assert num_drafts > num_steps / 2
