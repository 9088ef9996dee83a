"""Tests NgramIndex: its sizes, errors, statistics, and integrity checks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from core.index.index_words import (
    HEADER,
    Corruption,
    Int32Array,
    check_corruption_is_detected,
    make_random_tokens,
    make_word_edit,
    page_owners,
    page_words,
)
from ngram_npu import _C, IntegrityError, NgramIndex
from residence import compute_resident_share

FREE_PAGE, PAGES_IN_USE = 4, 5
LENGTH, DEPTH, PAGES, ROOT = HEADER + 1, HEADER + 2, HEADER + 3, HEADER + 16
"""Positions of words of slot 0 in the tensor."""


def make_tokens(rows: int = 3, length: int = 700, vocab_size: int = 9) -> Int32Array:
    return make_random_tokens(rows, length, vocab_size)


def run_step(
    index: NgramIndex, tokens: Int32Array, lengths: Int32Array, slots: list[int] | None = None,
    max_n: int = 4,
) -> None:  # fmt: skip
    """Runs a step that samples the token 1 for each row."""
    _C.ngram_index_step_(
        tokens, lengths, np.ones((len(tokens), 1), np.int32), index.tensor, min_n=2, max_n=max_n,
        k=4, slot_indices=None if slots is None else np.array(slots, np.int32),
    )  # fmt: skip


def build_index(tokens: Int32Array, **options: int) -> NgramIndex:
    rows, length = tokens.shape
    index = NgramIndex(rows, tokens.size, min_n=2, max_n=4, any_data=True)
    index.append(tokens, np.full(rows, length, np.int32), **options)
    return index


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, r"num_slots: expected 1 to 2\*\*28, got 0"),
        ({"token_capacity": -1}, r"token_capacity: expected >= 0, got -1"),
        ({"min_n": 0}, r"min_n, max_n: expected 1 <= .* got 0, 4"),
        ({"min_n": 5}, r"min_n, max_n: .* got 5, 4"),
        ({"max_n": 10}, r"min_n, max_n: .* got 2, 10"),
        ({"min_n": 60, "max_n": 65}, r"min_n, max_n: .* max_n <= 64, got 60, 65"),
        ({"token_capacity": 2**63}, r"token_capacity: too large, got 9223372036854775808"),
        ({"num_slots": 2**28 + 1}, r"num_slots: expected 1 to 2\*\*28, got 268435457"),
        ({"token_capacity": 10**12}, r"token_capacity: too large, got 1000000000000"),
        ({"sizes": "ladder"}, "min_n, max_n: expected 1, 16 with sizes='ladder', got 2, 4"),
        ({"outcomes": True}, "outcomes: expected False without sizes='ladder'"),
        ({"sizes": "x"}, "sizes: expected 'consecutive' or 'ladder', got 'x'"),
    ],
)
def test_index_with_invalid_size_is_rejected(changes: dict[str, int], message: str) -> None:
    arguments = {"num_slots": 2, "token_capacity": 100, "min_n": 2, "max_n": 4, **changes}
    with pytest.raises(ValueError, match=message):
        NgramIndex(**arguments)  # type: ignore[arg-type]


def test_memory_is_bounded_and_committed_on_demand() -> None:
    smallest_index = NgramIndex(1, 0, min_n=1, max_n=8)
    assert smallest_index.nbytes == smallest_index.tensor.nbytes
    assert smallest_index.statistics.num_pages >= 1
    text_index = NgramIndex(8, 100_000, min_n=2, max_n=4)
    any_data_index = NgramIndex(8, 100_000, min_n=2, max_n=4, any_data=True)
    assert text_index.statistics.num_slots == 8
    assert text_index.nbytes < any_data_index.nbytes
    assert any_data_index.nbytes < 100_000 * 16, "at most 16 bytes per token"
    assert text_index.tensor.ctypes.data % (2 << 20) == 0, "the tensor must start at a huge page"
    for prefault in (False, True):
        index = NgramIndex(8, 1_000_000, min_n=2, max_n=4, prefault=prefault)
        assert (compute_resident_share(index.tensor) == 1) == prefault


@pytest.mark.parametrize("length", [7_500, 16_384, 32_768, 60_000, 131_072])
def test_any_data_allocates_enough_for_unrepetitive_rows(length: int) -> None:
    """The rows need the maximum number of entries per token: 1 with max_n = 1, if
    all tokens differ; 1.5 with max_n = 2, if each token occurs twice."""
    distinct_tokens = np.random.default_rng(length).permutation(length).astype(np.int32)[None]
    repeated_tokens = np.tile(distinct_tokens[:, : length // 2], 2)
    for max_n, tokens in ((1, distinct_tokens), (2, repeated_tokens)):
        index = NgramIndex(1, length, min_n=1, max_n=max_n, any_data=True)
        index.append(tokens, np.array([tokens.size], np.int32))
        assert index.statistics.slots_disabled == 0


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_append_and_reset_accept_arrays_and_tensors(kind: str) -> None:
    index = NgramIndex(3, 3000, min_n=2, max_n=4, kind=kind)  # type: ignore[arg-type]
    assert isinstance(index.tensor, torch.Tensor if kind == "torch" else np.ndarray)
    convert: Callable[[Int32Array], object] = torch.from_numpy if kind == "torch" else np.asarray
    tokens = make_tokens()
    index.append(convert(tokens), convert(np.full(3, 700, np.int32)))
    index.check_integrity(dict(enumerate(tokens)))
    index.reset(convert(np.array([0, 1, 2], np.int32)))
    assert index.statistics.pages_in_use == 0


def test_statistics_count_rows_and_rebuilds() -> None:
    tokens = make_tokens(2, 400)
    lengths = np.full(2, 390, np.int32)
    index = NgramIndex(2, 800, min_n=2, max_n=4)
    run_step(index, tokens, lengths)
    stats = index.statistics
    assert stats.rows_indexed == 2
    assert stats.pages_in_use > 0
    assert stats.pages_peak >= stats.pages_in_use
    run_step(index, tokens, lengths, [0, 7])
    assert index.statistics.rows_scanned_other == 1
    lengths[:] = 300
    run_step(index, tokens, lengths)
    assert index.statistics.rebuilds_shorter == 2
    tokens[0] += 1
    run_step(index, tokens, lengths)
    assert index.statistics.rebuilds_rewritten == 1
    run_step(index, tokens, lengths, max_n=5)
    assert index.statistics.rebuilds_options == 2
    assert index.statistics.rows_scanned_full == 0


@pytest.mark.parametrize("distance", range(1, 9))
def test_change_among_the_last_eight_tokens_rebuilds_the_slot(distance: int) -> None:
    tokens = make_tokens(1, 400)
    index = build_index(tokens)
    tokens[0, -distance] += 1
    index.append(tokens, np.array([400], np.int32))
    assert index.statistics.rebuilds_rewritten == 1
    index.check_integrity({0: tokens[0]})


@pytest.mark.parametrize("limit", [{"k": 0}, {"k": 4, "max_len": 5}], ids=["k-0", "max-len"])
def test_rows_that_cannot_draft_are_indexed(limit: dict[str, int]) -> None:
    tokens = make_tokens(1, 700)
    lengths = np.full(1, 400, np.int32)
    index = NgramIndex(1, 700, min_n=2, max_n=4)
    sampled = np.ones((1, 1), np.int32)
    sizes = {"min_n": 2, "max_n": 4}
    step = _C.ngram_index_step_(tokens, lengths, sampled, index.tensor, **sizes, **limit)
    assert step[2].shape == (1, limit["k"])
    assert step[3].tolist() == [0]
    lengths += 50
    _C.ngram_index_propose_(tokens, lengths, index.tensor, **sizes, **limit)
    assert index.tensor[LENGTH] == 451
    assert index.statistics.rows_indexed == 2
    index.check_integrity({0: tokens[0, :451]})


def test_long_prompt_is_indexed_over_several_steps() -> None:
    tokens = make_tokens(1, 200_010, 50)
    lengths = np.full(1, 200_000, np.int32)
    index = NgramIndex(1, 200_010, min_n=2, max_n=4, any_data=True)
    for _ in range(8):
        run_step(index, tokens, lengths)
    stats = index.statistics
    assert (stats.rows_scanned_catching_up, stats.rows_indexed) == (6, 2)
    assert stats.page_splits > 100


def test_page_splits_only_when_full() -> None:
    """From 32,768 tokens on, a position has 16 bits. An entry in a page of depth 4 has as many."""
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 30_000, (80, 10), np.int32)
    words = np.empty((3200, 11), np.int32)
    words[:, :10] = phrases[rng.integers(0, 80, 3200)]
    words[:, 10] = rng.integers(0, 30_000, 3200)
    tokens = words.reshape(1, -1)
    index = NgramIndex(1, tokens.size, min_n=2, max_n=4)
    splits = []
    for length in (32_700, 33_200):
        index.append(tokens, np.full(1, length, np.int32))
        splits.append(index.statistics.page_splits)
    assert 15 < splits[0] < 31  # with fewer than 2**5 pages, some still have depth 4
    assert splits[1] - splits[0] <= 2


@pytest.mark.parametrize("uses_step", [False, True], ids=["append", "step"])
def test_disabled_slot_indexes_a_shorter_row(uses_step: bool) -> None:
    """A shorter row may fit, so it is indexed without waiting until more pages are free."""
    tokens = make_tokens(1, 20_000, 300)
    lengths = np.full(1, 19_990, np.int32)
    index = NgramIndex(1, 2000, min_n=2, max_n=4)
    if uses_step:
        run_step(index, tokens, lengths)
    else:
        index.append(tokens, lengths)
    assert index.statistics.slots_disabled == 1
    assert index.statistics.pages_in_use == 0
    index.check_integrity({0: tokens[0]})
    lengths[:] = 100
    run_step(index, tokens, lengths)
    assert index.statistics.rebuilds_shorter == 1
    assert index.statistics.rows_indexed == 1


def test_row_that_does_not_fit_in_the_index_uses_the_catch_up_budget() -> None:
    """If it did not, every row of the batch would try to allocate pages in each step."""
    rows, length = 6, 20_000
    tokens = make_tokens(rows, length + 10, 9999)
    lengths = np.full(rows, length, np.int32)
    index = NgramIndex(rows, 6000, min_n=2, max_n=4)
    run_step(index, tokens, lengths)
    statistics = index.statistics
    assert statistics.slots_disabled == 1
    assert statistics.rows_scanned_full == 1
    assert statistics.rows_scanned_catching_up == 5


def _get_first_page(words: Int32Array) -> Int32Array:
    """Returns the first page of slot 0."""
    return page_words(words, int(words[ROOT]) >> 4)


def _count_position_bits(words: Int32Array) -> int:
    return 12 + (int(words[ROOT]) & 15)  # the low bits of a directory entry: the page's depth


def _make_list_of_freed_pages_circular(words: Int32Array) -> None:
    _C.ngram_index_reset_(words, np.array([1], np.int32))
    head = int(words[FREE_PAGE])
    page_owners(words)[head - 1] = np.uint32(0x80000000 | head).view(np.int32)


def _empty_list_of_freed_pages(words: Int32Array) -> None:
    _C.ngram_index_reset_(words, np.array([1], np.int32))
    words[FREE_PAGE] = 0


def _make_gap_in_line(words: Int32Array) -> None:
    page = _get_first_page(words).reshape(-1, 16)
    page[np.flatnonzero(page[:, 1])[0], 0] = 0


def _swap_line_groups(words: Int32Array) -> None:
    """Swaps the first two groups of lines."""
    page = _get_first_page(words).reshape(-1, 64)
    page[[0, 1]] = page[[1, 0]]


def _make_entries_point_outside(words: Int32Array) -> None:
    page = _get_first_page(words)
    page[np.flatnonzero(page)] |= (1 << _count_position_bits(words)) - 1


def _flip_marks_of_repeated_ngrams(words: Int32Array) -> None:
    page = _get_first_page(words)
    page[np.flatnonzero(page)] ^= np.int32(1 << _count_position_bits(words))


def _remove_entry(words: Int32Array) -> None:
    lines = _get_first_page(words).reshape(-1, 16)
    line = next(line for line in lines if np.count_nonzero(line) > 1)
    line[np.count_nonzero(line) - 1] = 0


def _duplicate_entry(words: Int32Array) -> None:
    lines = _get_first_page(words).reshape(-1, 16)
    line = next(line for line in lines if 0 < np.count_nonzero(line) < 16)
    line[np.count_nonzero(line)] = line[0]


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (make_word_edit(0, lambda _: 0), "header does not match the tensor's size"),
        (make_word_edit(DEPTH, lambda _: 15), r"deeper than the layout allows \(slot or page 0\)"),
        (make_word_edit(ROOT, lambda entry: entry | 15), "does not fill its part of the directory"),
        (
            lambda words: page_owners(words).__setitem__(int(words[ROOT]) >> 4, 2),
            "belongs to another slot",
        ),
        (
            lambda words: page_owners(words).__setitem__(-1, 1000),
            r"another slot, or is listed twice \(slot or page \d+\)",
        ),
        (make_word_edit(PAGES, lambda n: n + 1), "number of pages does not match its pages"),
        (make_word_edit(PAGES_IN_USE, lambda n: n + 1), "pages in use does not match the pages"),
        (
            lambda words: words.__setitem__(FREE_PAGE, int(words[2]) + 9),
            "freed pages is broken",
        ),
        (_make_list_of_freed_pages_circular, "freed pages is broken"),
        (_empty_list_of_freed_pages, "freed pages is broken"),
        (_make_gap_in_line, "a line of a page has a gap"),
        (_swap_line_groups, "slot 0: an entry is not in the page and line of its key"),
        (_make_entries_point_outside, "slot 0: an entry points outside the row"),
        (_flip_marks_of_repeated_ngrams, "slot 0: an entry exists, or is marked, although"),
        (_remove_entry, "slot 0: an entry is missing"),
        (_duplicate_entry, "slot 0: an entry exists, or is marked, although"),
        (
            make_word_edit(LENGTH, lambda n: n + 1),
            "slot 0: the slot has indexed more tokens than",
        ),
    ],
)
def test_integrity_check_detects_corruption(corrupt: Corruption, message: str) -> None:
    tokens = make_tokens()
    check_corruption_is_detected(build_index(tokens), tokens, corrupt, message)


@pytest.mark.parametrize("match_policy", [0, 1])
def test_integrity_check_detects_wrong_occurrence(match_policy: int) -> None:
    tokens = np.tile(np.array([1, 2, 3], np.int32), 20)[None]
    index = build_index(tokens, match_policy=match_policy)

    def change_occurrence(words: Int32Array) -> None:
        page = _get_first_page(words)
        page[np.flatnonzero(page)] += -3 if match_policy else 3

    check_corruption_is_detected(index, tokens, change_occurrence, "does not record the earliest")


def test_integrity_check_of_missing_slot_raises_error() -> None:
    with pytest.raises(IntegrityError, match="slot 9: the index has no such slot"):
        build_index(make_tokens()).check_integrity({9: make_tokens()[0]})
