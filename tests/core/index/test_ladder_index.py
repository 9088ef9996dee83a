"""Tests an index with a ladder: outcomes and candidates equal those of the reference after any
history of the rows, and the integrity check detects wrong outcomes and candidates. Also tests the
reference with examples that were computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from core.index.index_words import (
    HEADER,
    Corruption,
    Int32Array,
    check_corruption_is_detected,
    make_random_tokens,
    make_word_edit,
    page_words,
    slot_words,
)
from ngram_npu import _C, NgramIndex
from ops.reference.ladder import compute_outcome_bytes, find_candidate
from ops.specs.store import text_rows

LENGTH, CANDIDATE, OUTCOME_PAGES, OUTCOME_ROOT = 1, 6, 7, 32  # positions of words in a slot
ROOT_PAGES, PAGE_BYTES = 16, 4096  # a slot lists up to ROOT_PAGES outcome pages itself
LADDER: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "ladder": True}
COSTS = np.full((16, 32), 5, np.uint8)


def make_tokens(rows: int = 3, length: int = 400, vocab_size: int = 5) -> Int32Array:
    return make_random_tokens(rows, length, vocab_size)


def make_ladder_index(num_slots: int, token_capacity: int) -> NgramIndex:
    sizes: Any = {"sizes": "ladder", "outcomes": True, "any_data": True}
    return NgramIndex(num_slots, token_capacity, min_n=1, max_n=16, **sizes)


def index_all_tokens(tokens: Int32Array) -> NgramIndex:
    rows, length = tokens.shape
    index = make_ladder_index(rows, tokens.size)
    index.append(tokens, np.full(rows, length, np.int32))
    return index


def read_outcomes(index: NgramIndex, slot: int) -> list[int]:
    """Returns the slot's outcomes, one byte per indexed token."""
    words = index.tensor
    state = slot_words(words, slot)
    pages = state[OUTCOME_ROOT:][: state[OUTCOME_PAGES]]
    if state[OUTCOME_PAGES] > ROOT_PAGES:
        pages = page_words(words, state[OUTCOME_ROOT])[: state[OUTCOME_PAGES]]
    views = [page_words(words, page).view(np.uint8) for page in pages]
    outcomes: list[int] = np.concatenate([np.empty(0, np.uint8), *views])[: state[LENGTH]].tolist()
    return outcomes


def run_step(
    index: NgramIndex, tokens: Int32Array, lengths: Int32Array, sampled: Int32Array
) -> Any:
    return _C.ngram_index_step_(
        tokens, lengths, sampled, index.tensor, k=4, costs=COSTS, **LADDER,
    )  # fmt: skip


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 60])
def test_outcomes_and_candidates_equal_reference(vocab_size: int) -> None:
    """The rows grow by 1 to 259 tokens at a time, by append and by steps."""
    tokens = make_tokens(2, 400, vocab_size)
    tokens[1, 200:] = tokens[1, :200]
    index = make_ladder_index(2, tokens.size)
    lengths = np.zeros(2, np.int32)
    for length in (1, 2, 5, 14, 15, 16, 17, 40, 41, 300):
        lengths[:] = length
        index.append(tokens, lengths)
        run_step(index, tokens, lengths, tokens[:, length : length + 3].copy())
        index.check_integrity({row: tokens[row, : lengths[row]] for row in (0, 1)})
    assert lengths.tolist() == [303, 303]
    for row in (0, 1):
        row_tokens = tokens[row, :303].tolist()
        position, match_len = find_candidate(row_tokens)
        assert slot_words(index.tensor, row)[CANDIDATE] == position << 5 | match_len
        assert read_outcomes(index, row) == compute_outcome_bytes(row_tokens)
    index.reset(np.array([0, 1], np.int32))
    assert index.statistics.pages_in_use == 0
    index.check_integrity()


def _change_outcome(words: Int32Array) -> None:
    page_words(words, slot_words(words, 0)[OUTCOME_ROOT]).view(np.uint8)[333] ^= 1


def _use_page_of_another_slot(words: Int32Array) -> None:
    slot_words(words, 0)[OUTCOME_ROOT] = slot_words(words, 1)[OUTCOME_ROOT]


def _use_missing_page(words: Int32Array) -> None:
    slot_words(words, 0)[OUTCOME_ROOT] = words[2]


CANDIDATE_ERROR = "slot 0: the slot's candidate is not that of its row"


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_change_outcome, "slot 0: a token's outcome is not that of its row"),
        # The first two functions change the length of the candidate's match and its position.
        (make_word_edit(HEADER + CANDIDATE, lambda word: word ^ 1), CANDIDATE_ERROR),
        (make_word_edit(HEADER + CANDIDATE, lambda word: word - 32), CANDIDATE_ERROR),
        (make_word_edit(HEADER + CANDIDATE, lambda _: 0), CANDIDATE_ERROR),
        (_use_page_of_another_slot, "belongs to another slot"),
        (_use_missing_page, "belongs to another slot"),
        (make_word_edit(HEADER + OUTCOME_PAGES, lambda n: n - 1), "number of pages does not match"),
    ],
)
def test_integrity_check_detects_corruption(corrupt: Corruption, message: str) -> None:
    tokens = make_tokens()
    check_corruption_is_detected(index_all_tokens(tokens), tokens, corrupt, message)


def test_outcomes_that_need_a_directory_are_complete_and_freed() -> None:
    """Indexing a row over several steps or at once gives the same outcomes."""
    length = ROOT_PAGES * PAGE_BYTES + 5000
    tokens = make_tokens(1, length + 5, 50)
    expected = index_all_tokens(tokens[:, :length])
    index = make_ladder_index(1, length + 5)
    lengths = np.full(1, length - 3, np.int32)
    # A step without sampled tokens indexes nothing.
    run_step(index, tokens, lengths, np.array([[-1]], np.int32))
    for i in range(3):
        run_step(index, tokens, lengths, tokens[:, length - 3 + i :][:, :1].copy())
    statistics = index.statistics
    assert (statistics.rows_scanned_catching_up, statistics.rows_indexed) == (2, 1)
    assert read_outcomes(index, 0) == read_outcomes(expected, 0)
    assert len(read_outcomes(index, 0)) == length
    assert slot_words(index.tensor, 0)[CANDIDATE] == slot_words(expected.tensor, 0)[CANDIDATE] > 0
    for full_index in (expected, index):
        assert slot_words(full_index.tensor, 0)[OUTCOME_PAGES] == ROOT_PAGES + 2
        full_index.check_integrity()
        full_index.reset(np.zeros(1, np.int32))
        assert full_index.statistics.pages_in_use == 0
        full_index.check_integrity()


def test_outcomes_of_shortened_row_equal_those_of_new_row() -> None:
    tokens = make_tokens(1, 9000, 20)
    index = make_ladder_index(1, 9000)
    lengths = np.full(1, 9000, np.int32)
    index.append(tokens, lengths)
    pages = index.statistics.pages_in_use
    tokens[0, 300:] = tokens[0, :8700].copy()  # the row continues with other tokens
    lengths[:] = 300
    run_step(index, tokens, lengths, tokens[:, 300:303].copy())
    assert index.statistics.rebuilds_shorter == 1
    assert index.statistics.pages_in_use < pages
    new_index = index_all_tokens(tokens[:, :303])
    outcomes = compute_outcome_bytes(tokens[0, :303].tolist())
    assert read_outcomes(index, 0) == read_outcomes(new_index, 0) == outcomes
    index.check_integrity({0: tokens[0, :303]})


def test_costs_rebuild_a_slot_without_outcomes() -> None:
    tokens = make_tokens(1, 300)
    index = make_ladder_index(1, 300)
    lengths = np.full(1, 290, np.int32)
    sampled = np.ones((1, 1), np.int32)
    _C.ngram_index_step_(tokens, lengths, sampled, index.tensor, k=4, **LADDER)
    assert read_outcomes(index, 0) == []
    run_step(index, tokens, lengths, sampled)
    assert index.statistics.rebuilds_options == 1
    assert read_outcomes(index, 0) == compute_outcome_bytes(tokens[0, :292].tolist())


@pytest.mark.parametrize("uses_step", [False, True], ids=["propose", "step"])
@pytest.mark.parametrize("fill", [False, True])
def test_drafts_of_scanned_row_equal_those_of_indexed_row(fill: bool, uses_step: bool) -> None:
    """A row without a slot is scanned, and so is a row of 40,000 tokens in its first call, which
    indexes only 32,768 tokens. The outcomes of all tokens nevertheless determine the drafts."""
    rows, length = 5, 40_000
    tokens = text_rows(np.random.default_rng(8), rows, length + 1, 30)
    table = np.random.default_rng(9).integers(0, 60, (16, 32), np.uint8)
    zero_outcome_table = np.repeat(table[:, :1], 32, axis=1)
    lengths = np.full(rows, length, np.int32)

    def draft_rows(index: NgramIndex, costs: npt.NDArray[np.uint8], slots: list[int]) -> list[Any]:
        draft_costs = np.zeros((rows, 8), np.uint8)
        options = {"k": 8, "costs": costs, "cost_limit": 99, "fill": fill}
        options["draft_costs"] = draft_costs
        options |= {"slot_indices": np.array(slots, np.int32), "overlap": True, **LADDER}
        if uses_step:
            sampled = tokens[:, length:].copy()
            arguments = tokens, lengths.copy(), sampled, index.tensor
            results = _C.ngram_index_step_(*arguments, **options)[2:]
        else:
            results = _C.ngram_index_propose_(tokens, lengths + 1, index.tensor, **options)
        return [*results, draft_costs]

    complete_index, index = (make_ladder_index(rows, tokens.size) for _ in range(2))
    complete_index.append(tokens, lengths)
    expected = draft_rows(complete_index, table, list(range(rows)))
    assert complete_index.statistics.rows_indexed == rows
    assert expected[1].min() < expected[1].max()
    for slots in (list(range(rows)), [-1] * rows):
        assert all(map(np.array_equal, draft_rows(index, table, slots), expected))
        # Without outcomes, the drafts differ.
        assert not np.array_equal(draft_rows(index, zero_outcome_table, slots)[3], expected[3])
    assert index.statistics.rows_scanned_catching_up >= rows
    assert index.statistics.rows_scanned_other == 2 * rows


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], (0, 0)),
        ([7], (0, 0)),
        ([7, 8], (0, 0)),
        ([7, 7], (1, 1)),
        ([7, 7, 7], (2, 2)),  # the occurrence may overlap the row's end
        ([5, 6, 7, 5, 6], (2, 2)),
        ([5, 1, 5, 2, 5], (3, 1)),  # the latest occurrence, not the first
        # A ladder has no size 3, so the candidate follows the latest 2 3, not 1 2 3.
        ([1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3], (7, 2)),
        # The candidate follows 2 3. The match has three tokens, because the 1 is equal, too.
        ([1, 2, 3, 9, 1, 2, 3], (3, 3)),
        ([*range(20), *range(20)], (20, 16)),
    ],
)
def test_reference_candidate_equals_hand_computed_example(
    tokens: list[int], expected: tuple[int, int]
) -> None:
    assert find_candidate(tokens) == expected
