"""The CUDA kernels of the index on their host twin, and DeviceNgramIndex."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_world import (
    GIVEN_UP,
    HEADER,
    HELD,
    INDEXED,
    SLOT,
    SLOTS,
    TENANT,
    DeviceWorld,
    Rows,
    entries_of,
    index_of_buckets,
    indexed,
    some_tokens,
)
from hypothesis import settings
from index_machine import IndexMachine
from index_world import Lookup
from ngram_npu import _C, DeviceNgramIndex, NgramConfig, NgramProposer

pytestmark = pytest.mark.usefixtures("on_the_cuda_twin")


class DeviceIndexMachine(IndexMachine):
    WORLD = DeviceWorld


TestDeviceIndexMachine = DeviceIndexMachine.TestCase
TestDeviceIndexMachine.settings = settings(
    settings.default, max_examples=60, stateful_step_count=30, deadline=None
)


def _few_bits(world: DeviceWorld, fingerprint_bits: int, generation_bits: int) -> None:
    header = world.words[: _C.DEVICE_INDEX_HEADER_WORDS]
    _C.device_index_init(header, header[SLOTS], header[2], fingerprint_bits, generation_bits)


def test_what_goes_unnoticed_stays_within_the_row() -> None:
    rng = np.random.default_rng(0)
    blind = 0
    for turn in range(6):
        world = DeviceWorld(4, 200, Lookup(1 + turn % 3, 4, 4, turn % 2), 4, 40)
        for row in range(4):
            world.write(row, rng.integers(0, 3, 150).tolist())
        world.append(range(4))
        for _ in range(12):
            world.rows[rng.integers(0, 4, 30), rng.integers(0, 140, 30)] = rng.integers(0, 4, 30)
            world.step(range(4), rng.integers(0, 3, (4, 2), dtype=np.int32))
        world.index.check_integrity()
        blind += world.blind
    assert blind > 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, r"num_slots: expected at least 1, got 0"),
        ({"token_capacity": -1}, r"token_capacity: expected >= 0, got -1"),
        ({"min_n": 5}, r"min_n, max_n: .* got 5, 4"),
        ({"max_n": 10}, r"min_n, max_n: .* got 2, 10"),
        ({"num_slots": 2**20 + 1}, r"num_slots: expected at most 2\*\*20, got 1048577"),
    ],
)
def test_errors(changes: dict[str, int], message: str) -> None:
    arguments: dict[str, Any] = {"num_slots": 2, "token_capacity": 100, "min_n": 2, "max_n": 4}
    with pytest.raises(ValueError, match="DeviceNgramIndex: " + message):
        DeviceNgramIndex(**{**arguments, **changes}, device="cpu")


def test_sizes() -> None:
    index = DeviceNgramIndex(8, 100_000, min_n=2, max_n=4, device="cpu")
    assert index.statistics.num_slots == 8
    assert 100_000 * 30 < index.nbytes < 100_000 * 30.1
    assert 16 * 8 * index.statistics.num_buckets < index.nbytes
    # Tokens that never repeat, to the last one that was asked for.
    rows = np.random.default_rng(1).permutation(3000).astype(np.int32).reshape(3, 1000)
    full = indexed(rows)
    assert full.statistics.slots_given_up == 0
    assert full.statistics.entries_in_use >= 3 * (999 + 998 + 997) - 9
    full.check_integrity(dict(enumerate(rows)))


def test_statistics() -> None:
    rows = Rows(some_tokens(2), 240, DeviceNgramIndex(2, 600, min_n=2, max_n=4, device="cpu"))
    rows.step(slots=[0, 1])
    stats = rows.index.statistics
    assert (stats.rows_indexed, stats.num_slots) == (2, 2)
    assert stats.entries_in_use == sum(rows.index.tensor[HEADER + HELD + s * SLOT] for s in (0, 1))
    rows.step(slots=[0, 7])
    assert rows.index.statistics.rows_scanned_other == 1
    rows.lengths[:] = 200
    rows.step(slots=[0, 1])
    stats = rows.index.statistics
    assert (stats.rebuilds_shorter, stats.entries_in_use) == (2, 0)
    rows.step(slots=[0, 1])
    rows.tokens[0] += 1
    rows.step(slots=[0, 1])
    assert rows.index.statistics.rebuilds_rewritten == 1
    rows.step(slots=[0, 1], span=3)
    rows.step(slots=[0, 1], span=3, match_policy=1)
    assert rows.index.statistics.rebuilds_options >= 3
    assert rows.index.statistics.rows_scanned_full == 0
    rows.index.check_integrity()


def test_a_long_prompt_is_caught_up_over_several_steps() -> None:
    tokens = some_tokens(1, 3000, 50)
    rows = Rows(tokens, 2600, DeviceNgramIndex(1, 3000, min_n=2, max_n=4, device="cpu"))
    for _ in range(13):
        rows.step()
    stats = rows.index.statistics
    assert (stats.rows_scanned_catching_up, stats.rows_indexed) == (10, 3)
    rows.index.check_integrity({0: tokens[0, :2613]})


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("long", [[0], [2], [0, 1]])
def test_rows_that_are_scanned_stand_anywhere_in_the_batch(long: list[int], advance: bool) -> None:
    rows = Rows(
        some_tokens(3, 3000, 50), 200, DeviceNgramIndex(3, 9000, min_n=2, max_n=4, device="cpu")
    )
    rows.lengths[long] = 2600
    for _ in range(2):
        rows.step(advance=advance)
    assert rows.index.statistics.rows_scanned_catching_up == 2 * len(long)
    assert rows.index.statistics.rows_indexed == 2 * (3 - len(long))


def test_a_prompt_of_more_chunks_than_its_row_has_blocks() -> None:
    tokens = np.zeros((128, 9000), np.int32)
    tokens[5] = np.random.default_rng(3).integers(0, 20000, 9000)
    lengths = np.zeros(128, np.int32)
    lengths[5] = 9000
    index = DeviceNgramIndex(128, 9000, min_n=2, max_n=4, device="cpu")
    index.append(torch.from_numpy(tokens), torch.from_numpy(lengths))
    index.check_integrity({5: tokens[5]})
    assert index.tensor[HEADER + 5 * SLOT + INDEXED] == 8999


def test_a_slot_with_another_rows_tokens_is_built_anew() -> None:
    tokens = some_tokens()
    index = indexed(tokens)
    other = some_tokens() + 9
    index.append(torch.from_numpy(other), torch.full((3,), 300, dtype=torch.int32))
    index.check_integrity(dict(enumerate(other)))
    assert index.statistics.rebuilds_rewritten == 3


@pytest.mark.parametrize("slots", [300, 384])  # the latter fills blocks of threads to the last
def test_many_slots_are_emptied_at_once(slots: int) -> None:
    index = indexed(some_tokens(slots, 20))
    index.reset(torch.arange(slots, dtype=torch.int32))
    assert index.statistics.entries_in_use == 0
    index.check_integrity()


def test_a_full_row_asks_the_same_question_again() -> None:
    tokens = some_tokens(1, 100)
    rows = Rows(tokens, 99, DeviceNgramIndex(1, 100, min_n=2, max_n=4, device="cpu"))
    for _ in range(3):
        rows.step()
    assert rows.index.statistics.rows_indexed == 3


@pytest.mark.parametrize("match_policy", [0, 1])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_row_that_lost_its_last_tokens(cut: int, match_policy: int) -> None:
    """The row gets the same tokens again, so that only its length shows the change."""
    tokens = np.tile(np.array([1], np.int32), (1, 100))
    index = DeviceNgramIndex(1, 100, min_n=2, max_n=4, device="cpu")
    rows = Rows(tokens, 50, index)
    for _ in range(4):
        rows.step(match_policy=match_policy)
        rows.lengths -= cut


@pytest.mark.parametrize("by_step", [False, True], ids=["append", "step"])
def test_what_a_request_long_gone_left_behind(by_step: bool) -> None:
    """An old entry of a gram records the end that is looked up: a true occurrence, no answer. The
    earlier occurrence must still be entered."""
    index = index_of_buckets(1, 100, Lookup())
    _C.device_index_init(index.tensor.numpy()[: _C.DEVICE_INDEX_HEADER_WORDS], 1, 100, 0, 0)
    tokens = np.array([[8, 7, 1, 2, 3, 4, 9, 6, 1, 2, 3, 5, 0, 0, 0]], np.int32)
    index.append(torch.from_numpy(tokens), torch.tensor([12], dtype=torch.int32), match_policy=1)
    index.reset(torch.tensor([0], dtype=torch.int32))
    rows = Rows(tokens, 10, index)
    if not by_step:
        eleven = torch.tensor([11], dtype=torch.int32)
        index.append(torch.from_numpy(tokens), eleven, match_policy=1)
    for _ in range(2):
        rows.lengths[:] = 10
        rows.step(sampled=3, match_policy=1)
        assert rows.index.statistics.rows_indexed > 0


@pytest.mark.parametrize("match_policy", [0, 1])
def test_of_several_entries_of_one_gram_the_best_counts(match_policy: int) -> None:
    """Two warps may have entered the gram at the same time."""
    tokens = np.tile(np.array([1, 2, 3], np.int32), 20)[None]
    rows = Rows(tokens, 50, indexed(tokens[:, :50], match_policy))
    used, entries = entries_of(rows.index.tensor.numpy())
    worse = 3 if match_policy == 0 else -3
    for place in used.tolist():
        bucket = place - place % 16
        free = bucket + np.flatnonzero(entries[bucket : bucket + 16] == 0)
        entries[free[0]] = entries[place]
        entries[[place, free[1]]] = int(entries[place]) + worse
    rows.step(sampled=3, match_policy=match_policy)
    assert rows.index.statistics.rows_indexed == 1


def test_an_entry_that_would_begin_before_the_row_is_no_hit() -> None:
    tokens = some_tokens(1)
    index = indexed(tokens[:, :200])
    used, entries = entries_of(index.tensor.numpy())
    end = np.uint64((1 << TENANT) - 1)
    entries[used] = entries[used] & ~end | np.uint64(1)
    new = np.array([[tokens[0, 7]]], np.int32)
    rows = [torch.from_numpy(array) for array in (tokens, np.full(1, 200, np.int32), new)]
    torch.ops.ngram_npu.ngram_index_step_(*rows, index.tensor, min_n=2, max_n=4, k=4)
    assert index.statistics.rows_indexed == 1


def test_a_slot_that_finds_no_room_for_its_first_entry() -> None:
    """Short rows have no gram to enter, but count as indexed."""
    tokens = np.arange(80, dtype=np.int32).reshape(2, 40)
    index = index_of_buckets(2, 2, Lookup(5, 5))
    for length, slot in ((4, 0), (40, 1), (20, 0), (20, 0)):
        lengths = torch.full((2,), length, dtype=torch.int32)
        slots = torch.tensor([slot if row == slot else 7 for row in (0, 1)], dtype=torch.int32)
        index.append(torch.from_numpy(tokens), lengths, slot_indices=slots)
    assert index.statistics.slots_given_up == 1
    index.check_integrity({1: tokens[1]})


@pytest.mark.parametrize("by_step", [False, True], ids=["append", "step"])
def test_a_slot_given_up_starts_again_when_there_is_room(by_step: bool) -> None:
    lookup = Lookup()
    tokens = np.random.default_rng(2).integers(0, 5000, (2, 400), dtype=np.int32)
    index = index_of_buckets(2, 100, lookup)  # 1600 entries, where two rows need 2100
    rows = Rows(tokens, 350, index)
    # One slot after the other: at once, in some orders neither would have room.
    for slots in ([0, 7], [0, 7], [7, 1]):
        if by_step:
            rows.step(slots=slots)
        else:
            slot_indices = torch.tensor(slots, dtype=torch.int32)
            lengths = torch.from_numpy(rows.lengths)
            index.append(torch.from_numpy(tokens), lengths, slot_indices=slot_indices)
    assert index.statistics.slots_given_up == 1
    rows.step(slots=[0, 1])
    assert index.statistics.slots_given_up == 1
    assert index.statistics.rows_scanned_full == (2 if by_step else 1)
    index.check_integrity({0: tokens[0], 1: tokens[1]})
    assert [int(index.tensor[HEADER + s * SLOT + GIVEN_UP] != 0) for s in (0, 1)] == [0, 1]
    index.reset(torch.tensor([0], dtype=torch.int32))
    for _ in range(2):
        rows.step(slots=[7, 1])
    assert index.tensor[HEADER + SLOT + GIVEN_UP] == 0
    assert index.statistics.rows_indexed >= 1
    index.check_integrity({1: tokens[1, : rows.lengths[1]]})


def test_the_proposer_takes_it_on_a_device() -> None:
    """As on a GPU: here the twin replaces the CPU kernels and their index."""
    config = NgramConfig(min_n=2, max_n=4, k=3)
    proposer = NgramProposer(config, "index")
    tokens = some_tokens()
    proposer.index = DeviceNgramIndex(3, tokens.size, min_n=2, max_n=4, device="cpu")
    lengths = np.full(3, 240, np.int32)
    expected = tokens.copy()
    truth = NgramProposer(config, "scan").step(expected, lengths.copy(), np.ones((3, 2), np.int32))
    drafts = proposer.step(
        torch.from_numpy(tokens), torch.from_numpy(lengths), torch.ones((3, 2), dtype=torch.int32)
    )
    assert np.array_equal(drafts.draft_token_ids, truth.draft_token_ids)
    assert proposer.index.statistics.rows_indexed == 3
    proposer.reset(torch.arange(3, dtype=torch.int32))
    assert proposer.index.statistics.entries_in_use == 0


@pytest.mark.parametrize("bits", [(9, 24), (1, 1), (0, 0)], ids=["all-bits", "one-bit", "no-bits"])
@pytest.mark.parametrize("pages", [200, 8], ids=["room", "too-full"])
@pytest.mark.parametrize("match_policy", [0, 1], ids=["earliest", "latest"])
def test_long_run(match_policy: int, pages: int, bits: tuple[int, int]) -> None:
    """Requests come, grow, are cut and finish. With few bits, entries of other grams and of old
    requests look like a request's own, and only a comparison with the row finds out."""
    rng = np.random.default_rng([match_policy, pages, *bits])
    steps = drafts = scanned = 0
    while steps < 700:
        low = int(rng.integers(1, 4))
        lookup = Lookup(
            low, low + int(rng.choice([0, 2, 7])), 4, match_policy, bool(rng.integers(2)), 240
        )
        world = DeviceWorld(8, 250, lookup, 8, pages)
        _few_bits(world, *bits)
        alphabet = int(rng.integers(2, 12))

        def admit(row: int, world: DeviceWorld = world, alphabet: int = alphabet) -> None:
            world.write(row, rng.integers(0, alphabet, rng.integers(0, 200)).tolist(), at=0)
            if rng.random() < 0.5:
                world.append([row])

        for row in range(8):
            admit(row)
        for turn in range(40):
            chosen = rng.permutation(8)[: rng.integers(1, 9)]
            sampled = rng.integers(0, alphabet, (len(chosen), 3), dtype=np.int32)
            sampled[rng.random(sampled.shape) < 0.2] = -1
            discard = rng.random(len(chosen)) < 0.1
            world.step(chosen.tolist(), sampled, discard, advance=bool(rng.integers(2)))
            for row in np.flatnonzero(rng.random(8) < 0.05).tolist():
                world.reset([row])
                admit(row)
            if rng.random() < 0.1:
                order = rng.permutation(8)
                for array in (world.rows, world.lengths, world.slots):
                    array[:] = array[order]
            if rng.random() < 0.05:
                world.lengths[rng.integers(8)] //= 2
            if turn % 20 == 10:
                world.check()
        steps += world.steps
        drafts += world.drafts
        scanned += world.index.statistics.rows_scanned_full
        assert world.blind <= world.steps // 100
    if pages == 8:
        assert scanned > 0
    elif bits[1] == 24:  # with few bits, entries of requests long gone keep their places
        assert scanned == 0
    assert drafts > steps // 4
