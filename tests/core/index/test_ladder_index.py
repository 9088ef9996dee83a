"""The index of a ladder: outcomes and candidates equal the reference after any history of the rows,
and the integrity check detects wrong ones. The reference is checked with examples by hand."""

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
    make_word_edit,
    page_words,
    random_tokens,
    slot_words,
)
from ngram_npu import _C, IntegrityError, NgramIndex
from ops.reference.ladder import compute_outcome_bytes, find_candidate, make_ladder_draft
from ops.specs.store import text_rows

LENGTH, CANDIDATE, OUTCOME_PAGES, OUTCOME_ROOT = 1, 6, 7, 32
ROOT_PAGES, PAGE_BYTES = 16, 4096
LADDER: dict[str, Any] = {"min_n": 1, "max_n": 16, "match_policy": 1, "ladder": True}
COSTS = np.full((16, 32), 5, np.uint8)


def new_tokens(rows: int = 3, length: int = 400, alphabet: int = 5) -> Int32Array:
    return random_tokens(rows, length, alphabet)


def new_ladder(num_slots: int, token_capacity: int) -> NgramIndex:
    sizes: Any = {"sizes": "ladder", "outcomes": True, "any_data": True}
    return NgramIndex(num_slots, token_capacity, min_n=1, max_n=16, **sizes)


def index_at_once(tokens: Int32Array) -> NgramIndex:
    rows, length = tokens.shape
    index = new_ladder(rows, tokens.size)
    index.append(tokens, np.full(rows, length, np.int32))
    return index


def slot_outcomes(index: NgramIndex, slot: int) -> list[int]:
    """Returns the slot's outcomes, one byte per indexed token."""
    words = index.tensor
    state = slot_words(words, slot)
    pages = state[OUTCOME_ROOT:][: state[OUTCOME_PAGES]]
    if state[OUTCOME_PAGES] > ROOT_PAGES:
        pages = page_words(words, state[OUTCOME_ROOT])[: state[OUTCOME_PAGES]]
    parts = [page_words(words, page).view(np.uint8) for page in pages]
    outcomes: list[int] = np.concatenate([np.empty(0, np.uint8), *parts])[: state[LENGTH]].tolist()
    return outcomes


def run_step(
    index: NgramIndex, tokens: Int32Array, lengths: Int32Array, sampled: Int32Array
) -> Any:
    return _C.ngram_index_step_(
        tokens, lengths, sampled, index.tensor, k=4, costs=COSTS, **LADDER,
    )  # fmt: skip


@pytest.mark.parametrize("alphabet", [1, 2, 5, 60])
def test_outcomes_and_candidates_equal_reference(alphabet: int) -> None:
    """Rows are appended in parts of all sizes, some of them by steps."""
    tokens = new_tokens(2, 400, alphabet)
    tokens[1, 200:] = tokens[1, :200]
    index = new_ladder(2, tokens.size)
    lengths = np.zeros(2, np.int32)
    for length in (1, 2, 5, 14, 15, 16, 17, 40, 41, 300):
        lengths[:] = length
        index.append(tokens, lengths)
        run_step(index, tokens, lengths, tokens[:, length : length + 3].copy())
        index.check_integrity({row: tokens[row, : lengths[row]] for row in (0, 1)})
    assert lengths.tolist() == [303, 303]
    for row in (0, 1):
        live = tokens[row, :303].tolist()
        q, match = find_candidate(live)
        assert slot_words(index.tensor, row)[CANDIDATE] == q << 5 | match
        assert slot_outcomes(index, row) == compute_outcome_bytes(live)
    index.reset(np.array([0, 1], np.int32))
    assert index.statistics.pages_in_use == 0
    index.check_integrity()


def _change_outcome(words: Int32Array) -> None:
    page_words(words, slot_words(words, 0)[OUTCOME_ROOT]).view(np.uint8)[333] ^= 1


def _use_page_of_another_slot(words: Int32Array) -> None:
    slot_words(words, 0)[OUTCOME_ROOT] = slot_words(words, 1)[OUTCOME_ROOT]


def _use_missing_page(words: Int32Array) -> None:
    slot_words(words, 0)[OUTCOME_ROOT] = words[2]


OTHER_CANDIDATE = "slot 0: the slot's candidate is not that of its row"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change_outcome, "slot 0: a token's outcome is not that of its row"),
        # The length of the candidate's match, then its position.
        (make_word_edit(HEADER + CANDIDATE, lambda word: word ^ 1), OTHER_CANDIDATE),
        (make_word_edit(HEADER + CANDIDATE, lambda word: word - 32), OTHER_CANDIDATE),
        (make_word_edit(HEADER + CANDIDATE, lambda _: 0), OTHER_CANDIDATE),
        (_use_page_of_another_slot, "belongs to another slot"),
        (_use_missing_page, "belongs to another slot"),
        (make_word_edit(HEADER + OUTCOME_PAGES, lambda n: n - 1), "number of pages does not match"),
    ],
)
def test_integrity_check_detects_damage(change: Corruption, message: str) -> None:
    tokens = new_tokens()
    check_corruption_is_detected(index_at_once(tokens), tokens, change, message)


def test_outcomes_that_need_a_directory_are_complete_and_freed() -> None:
    """Indexed over several steps or appended at once: the bytes are equal, and all pages are
    freed."""
    length = ROOT_PAGES * PAGE_BYTES + 5000
    tokens = new_tokens(1, length + 5, 50)
    once, grown = index_at_once(tokens[:, :length]), new_ladder(1, length + 5)
    lengths = np.full(1, length - 3, np.int32)
    # Without sampled tokens, nothing is indexed.
    run_step(grown, tokens, lengths, np.array([[-1]], np.int32))
    for i in range(3):
        run_step(grown, tokens, lengths, tokens[:, length - 3 + i :][:, :1].copy())
    statistics = grown.statistics
    assert (statistics.rows_scanned_catching_up, statistics.rows_indexed) == (2, 1)
    assert slot_outcomes(grown, 0) == slot_outcomes(once, 0)
    assert len(slot_outcomes(grown, 0)) == length
    assert slot_words(grown.tensor, 0)[CANDIDATE] == slot_words(once.tensor, 0)[CANDIDATE] > 0
    for index in (once, grown):
        assert slot_words(index.tensor, 0)[OUTCOME_PAGES] == ROOT_PAGES + 2
        index.check_integrity()
        index.reset(np.zeros(1, np.int32))
        assert index.statistics.pages_in_use == 0
        index.check_integrity()


def test_integrity_check_detects_missing_page_of_a_directory() -> None:
    tokens = new_tokens(1, ROOT_PAGES * PAGE_BYTES + 1, 50)
    index = index_at_once(tokens)
    ids = page_words(index.tensor, slot_words(index.tensor, 0)[OUTCOME_ROOT])
    ids[ROOT_PAGES] = index.tensor[2]
    with pytest.raises(IntegrityError, match="belongs to another slot"):
        index.check_integrity()


def test_shortened_row_equals_a_new_row() -> None:
    tokens = new_tokens(1, 9000, 20)
    index = new_ladder(1, 9000)
    lengths = np.full(1, 9000, np.int32)
    index.append(tokens, lengths)
    pages = index.statistics.pages_in_use
    tokens[0, 300:] = tokens[0, :8700].copy()  # and continues differently
    lengths[:] = 300
    run_step(index, tokens, lengths, tokens[:, 300:303].copy())
    assert index.statistics.rebuilds_shorter == 1
    assert index.statistics.pages_in_use < pages
    once = index_at_once(tokens[:, :303])
    assert (
        slot_outcomes(index, 0)
        == slot_outcomes(once, 0)
        == compute_outcome_bytes(tokens[0, :303].tolist())
    )
    index.check_integrity({0: tokens[0, :303]})


def test_costs_rebuild_a_slot_without_outcomes() -> None:
    tokens = new_tokens(1, 300)
    index = new_ladder(1, 300)
    lengths = np.full(1, 290, np.int32)
    one = np.ones((1, 1), np.int32)
    _C.ngram_index_step_(tokens, lengths, one, index.tensor, k=4, **LADDER)
    assert slot_outcomes(index, 0) == []
    run_step(index, tokens, lengths, one)
    assert index.statistics.rebuilds_options == 1
    assert slot_outcomes(index, 0) == compute_outcome_bytes(tokens[0, :292].tolist())


@pytest.mark.parametrize("by_step", [False, True], ids=["propose", "step"])
@pytest.mark.parametrize("fill", [False, True])
def test_scanned_row_drafts_as_an_indexed_row(fill: bool, by_step: bool) -> None:
    """A call indexes 32,768 of 40,000 tokens. Such a row is scanned, as is a row without a slot.
    Its drafts nevertheless end by the outcomes of the complete row."""
    rows, length = 5, 40_000
    tokens = text_rows(np.random.default_rng(8), rows, length + 1, 30)
    table = np.random.default_rng(9).integers(0, 60, (16, 32), np.uint8)
    no_outcomes = np.repeat(table[:, :1], 32, axis=1)
    lengths = np.full(rows, length, np.int32)

    def drafts(index: NgramIndex, costs: npt.NDArray[np.uint8], slots: list[int]) -> list[Any]:
        draft_costs = np.zeros((rows, 8), np.uint8)
        options = {"k": 8, "costs": costs, "cost_limit": 99, "fill": fill}
        options["draft_costs"] = draft_costs
        options |= {"slot_indices": np.array(slots, np.int32), "overlap": True, **LADDER}
        if by_step:
            new = tokens[:, length:].copy()
            results = _C.ngram_index_step_(tokens, lengths.copy(), new, index.tensor, **options)[2:]
        else:
            results = _C.ngram_index_propose_(tokens, lengths + 1, index.tensor, **options)
        return [*results, draft_costs]

    indexed, incomplete = new_ladder(rows, tokens.size), new_ladder(rows, tokens.size)
    indexed.append(tokens, lengths)
    expected = drafts(indexed, table, list(range(rows)))
    assert indexed.statistics.rows_indexed == rows
    assert expected[1].min() < expected[1].max()
    for slots in (list(range(rows)), [-1] * rows):
        assert all(map(np.array_equal, drafts(incomplete, table, slots), expected))
        # Without outcomes, the drafts differ.
        assert not np.array_equal(drafts(incomplete, no_outcomes, slots)[3], expected[3])
    assert incomplete.statistics.rows_scanned_catching_up >= rows
    assert incomplete.statistics.rows_scanned_other == 2 * rows


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], (0, 0)),
        ([7], (0, 0)),
        ([7, 8], (0, 0)),
        ([7, 7], (1, 1)),
        ([7, 7, 7], (2, 2)),  # the occurrence may overlap the row's end
        ([5, 6, 7, 5, 6], (2, 2)),
        ([5, 1, 5, 2, 5], (3, 1)),  # the latest, not the first
        # 1 2 3 occurred, but 3 is not a size of the ladder: the latest 2 3 is used.
        ([1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3], (7, 2)),
        # Found by two tokens; the token before them is equal, too.
        ([1, 2, 3, 9, 1, 2, 3], (3, 3)),
        ([*range(20), *range(20)], (20, 16)),
    ],
)
def test_reference_candidate(tokens: list[int], expected: tuple[int, int]) -> None:
    assert find_candidate(tokens) == expected


def test_reference_outcome_bytes() -> None:
    # 5 6 7 5 6 7: at the second 6, the candidate follows a 5 and is right; at the second 7, it
    # follows 5 6 and is right. After 5 6 7 the candidate is 5, but 9 follows.
    assert compute_outcome_bytes([5, 6, 7, 5, 6, 7, 9]) == [0, 0, 0, 0, 3, 5, 6]
    cycle = list(range(20))
    assert compute_outcome_bytes(cycle * 2)[-2:] == [31, 31]


def test_reference_draft_reads_the_table_by_match_and_outcomes() -> None:
    # The outcome bytes of 5 6 7 5 6 are 0 0 0 0 3, the candidate is (2, 2).
    tokens = [5, 6, 7, 5, 6]
    table = [[100 * match + outcomes for outcomes in range(32)] for match in range(16)]
    assert make_ladder_draft(tokens, 4, table, 10_000, True, 99) == (
        [7, 5, 6, 7],
        [200, 300, 403, 500],
        2,
    )
    assert make_ladder_draft(tokens, 4, table, 499, False, 99) == ([7], [200], 2)
    assert make_ladder_draft(tokens, 4, table, 10_000, True, 6) == ([7], [200], 2)
    assert make_ladder_draft(tokens, 2, table, None, True, 99) == ([7, 5], [0, 0], 2)
    assert make_ladder_draft([1, 2, 3], 4, table, 10_000, True, 99) == ([], [], 0)
