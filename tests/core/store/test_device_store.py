"""The device store in random steps, compared with the reference and with models of its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ngram_npu.store.device_store as device_store
import numpy as np
import pytest
import torch
from core.store.device_steps import (
    GARBAGE,
    MAX_NEW,
    SCOPES,
    K,
    Requests,
    new_drafts,
    run_step,
)
from ngram_npu import IntegrityError
from ngram_npu.store import Scope
from ngram_npu.store.device_store import SIZES, DeviceStore
from ops import reference

NAMES = ("slots", "text", "blocks", "table", "allocator")
TINY_RINGS = [(2, 1), (3, 2), (5, 64), (16, 4096)]
"""Blocks and columns of the table. With one column, all n-grams of a length collide."""


def new_store(num_blocks: int, num_columns: int, num_slots: int = 6) -> DeviceStore:
    store = DeviceStore(num_slots, num_blocks * 256, max_batch=8)
    store.table = torch.zeros((len(SIZES), num_columns), dtype=torch.int32)
    return store


def arrays_of(store: DeviceStore) -> dict[str, Any]:
    return {name: getattr(store, name).numpy().copy() for name in NAMES}


def clear_model(model: dict[str, Any], scope: int) -> None:
    halves = np.array([scope], np.int64).view(np.int32)
    for text, head in zip(model["text"], model["blocks"], strict=True):
        if head[4] == halves[0] and head[5] == halves[1]:
            text[:] = head[:] = 0
    model["slots"][:] = 0


def renumber_model(model: dict[str, Any]) -> None:
    blocks = len(model["blocks"])
    live = [int(number) for number in model["blocks"][:, 0] if number]
    offset = 0
    next_number = int(model["allocator"][0])
    while next_number - blocks - (offset + blocks) >= 1:
        offset += blocks
    assert all(number > offset for number in live)
    for name, by in (("slots", offset), ("allocator", offset), ("table", offset * 256)):
        part = model[name][:, 0] if name == "slots" else model[name]
        part[...] = np.maximum(part - by, 0)
    model["blocks"][:, :3] = np.maximum(model["blocks"][:, :3] - offset, 0)


class Model:
    """The reference's tensors, to which the same steps and events apply."""

    def __init__(self, store: DeviceStore) -> None:
        self.tensors = arrays_of(store)

    def run_step(self, requests: Requests, step: Any) -> dict[str, Any]:
        arrays = (requests.token_ids, requests.num_tokens, step.num_sampled)
        rows = [tensor.numpy() for tensor in arrays]
        indices = {"row_indices": step.rows.numpy(), "scopes": step.scopes.numpy()}
        reference.device_store_append_(*rows, **indices, **self.tensors, max_new=MAX_NEW)
        contents = {name: self.tensors[name] for name in ("text", "blocks", "table")}
        drafts = {name: tensor.numpy() for name, tensor in new_drafts(len(step.rows)).items()}
        reference.device_store_propose_(*rows, **indices, **contents, **drafts)
        return drafts

    def check(self, store: DeviceStore) -> None:
        for name, array in arrays_of(store).items():
            assert np.array_equal(array, self.tensors[name]), name


def run_random_steps(seed: int, size: tuple[int, int], num_steps: int, first: int = 1) -> int:
    """Compares steps, clears and renumberings with the model. Returns the number of drafts."""
    store, requests = new_store(*size), Requests(seed)
    store.allocator.fill_(first)
    store._max_number = first
    model = Model(store)
    num_drafts = 0
    for _ in range(num_steps):
        if requests.rng.random() < 0.01:
            scope = requests.rng.choice(SCOPES)
            store.clear(Scope(scope))
            clear_model(model.tensors, scope)
        step = requests.next_step()
        bound = store._max_number
        drafts = run_step(store, requests, step)
        if store._max_number < bound:
            renumber_model(model.tensors)
        expected = model.run_step(requests, step)
        for name, tensor in drafts.items():
            assert np.array_equal(tensor.numpy(), expected[name]), name
        model.check(store)
        num_drafts += int((drafts["num_draft_tokens"] > 0).sum())
    store.check_integrity()
    assert not (store.text == GARBAGE).any()
    return num_drafts


@pytest.mark.parametrize("size", TINY_RINGS)
def test_random_steps_match_reference(size: tuple[int, int]) -> None:
    num_drafts = run_random_steps(1, size, 150)
    assert num_drafts > 20 or size[1] < 64


@pytest.mark.parametrize("size", TINY_RINGS)
def test_random_steps_across_the_last_block_number_match_reference(size: tuple[int, int]) -> None:
    run_random_steps(2, size, 60, first=2**23 - 20)


def filled_store() -> DeviceStore:
    store, requests = new_store(16, 4096), Requests(4)
    for _ in range(60):
        run_step(store, requests, requests.next_step())
    return store


def test_text_in_slices_is_one_chain_and_too_large_a_slice_is_not_stored() -> None:
    text = torch.arange(4000, dtype=torch.int32)[None]
    for slice_tokens, is_stored in ((2048, True), (2049, False)):
        store = new_store(16, 1 << 14, num_slots=1)
        for end in range(slice_tokens, 4001, slice_tokens):
            store.begin_step(1, slice_tokens)
            row = text, torch.tensor([end], dtype=torch.int32)
            count = torch.tensor([slice_tokens], dtype=torch.int32)
            store.append(*row, count, max_new=slice_tokens, hold_back=False)
        store.check_integrity()
        for end in (100, 250, 256, 1791):
            drafts = new_drafts(1)
            one = torch.ones(1, dtype=torch.int32)
            store.propose(text, torch.full((1,), end, dtype=torch.int32), one, **drafts)
            expected = list(range(end, end + K)) if is_stored else [-1] * K
            assert drafts["draft_token_ids"].tolist() == [expected]


def test_clear_leaves_no_token_of_the_scope() -> None:
    store, requests = new_store(64, 4096), Requests(5)
    for _ in range(40):
        run_step(store, requests, requests.next_step())
    for scope in SCOPES[:3]:
        store.clear(Scope(scope))
    cleared = {request.mark for request in requests.texts if request.scope in SCOPES[:3]}
    kept = {request.mark for request in requests.texts if request.scope in SCOPES[3:]}
    tokens = set(store.text.flatten().tolist())
    assert not tokens & cleared
    assert tokens & kept
    store.check_integrity()
    store.clear()
    assert not any(array.any() for array in arrays_of(store).values())


def test_renumbering_happens_before_the_numbers_are_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stores with different requests renumber in the same step."""
    monkeypatch.setattr(device_store, "END_OF_BLOCK_NUMBERS", 200)
    stores, workloads = (new_store(8, 64), new_store(8, 64)), (Requests(1), Requests(2))
    num_renumberings = 0
    for _ in range(300):
        bound = stores[0]._max_number
        for store, requests in zip(stores, workloads, strict=True):
            step = requests.next_step()
            rows = requests.token_ids, requests.num_tokens, step.num_sampled
            store.begin_step(len(requests.rows), MAX_NEW)
            store.append(*rows, row_indices=step.rows, slot_indices=step.rows, max_new=MAX_NEW)
            assert store.allocator[0] <= store._max_number <= 200
        assert stores[0]._max_number == stores[1]._max_number
        num_renumberings += stores[0]._max_number < bound
    assert num_renumberings > 2


def test_memory_of_a_million_tokens_is_known() -> None:
    store = DeviceStore(4, 2**20, max_batch=4)
    assert store.nbytes == 2**20 * (2 * 4 + 48) + 2 * 4096 * 32 + 5 * 12 + 8 + 4 * 32


DAMAGE: dict[str, tuple[Callable[[DeviceStore], Any], str]] = {
    "allocator": (lambda s: s.allocator[1].add_(1), "allocator"),
    "number": (lambda s: s.blocks[3, 0].add_(16), "number is not one of the newest"),
    "fill": (lambda s: s.blocks[3, 3].fill_(257), "wrong fill"),
    "successor": (lambda s: s.blocks[:, 2].masked_fill_(s.blocks[:, 0] > 0, 1), "wrong successor"),
    "free block": (lambda s: s.blocks[3, 0].zero_(), "the head of a free block is not 0"),
    "slot's block": (lambda s: s.slots[0, 0].fill_(2**20), "not assigned"),
    "slot's length": (lambda s: s.slots[0, 1].fill_(-1), "negative length"),
    "two slots": (lambda s: s.slots[:, 0].fill_(int(s.slots[:, 0].max())), "the same block"),
    "text": (lambda s: s.text.add_(1), "belong to another column"),
    "entry": (lambda s: s.table[0].fill_(int(s.table.max()) + 1), "refers to no token"),
}


@pytest.mark.parametrize("part", DAMAGE)
def test_check_integrity_detects_damage(part: str) -> None:
    store = filled_store()
    store.check_integrity()
    damage, message = DAMAGE[part]
    damage(store)
    with pytest.raises(IntegrityError, match=message):
        store.check_integrity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 0}, "num_slots: expected 1 to"),
        ({"token_capacity": 256}, "token_capacity: expected 257 to 268435456, got 256"),
        ({"max_batch": 0}, "max_batch: expected 1 to"),
    ],
)
def test_size_out_of_bounds_is_rejected(change: dict[str, int], message: str) -> None:
    sizes = {"num_slots": 1, "token_capacity": 512, "max_batch": 1, **change}
    with pytest.raises(ValueError, match=f"DeviceStore: {message}"):
        DeviceStore(**sizes)
