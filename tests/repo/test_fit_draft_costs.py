"""Tests the fit of the cost table, on conversations with known probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from ngram_npu.draft_costs import load_table
from ngram_npu_cli.tokenization import TokenRequest

from tools import fit_draft_costs
from tools.bench.recorded import find_data, load_sets
from tools.fit_draft_costs import SHAPE, Counts, count_drafts, fit_costs, fit_table

ONE_BIT = 16  # the cost of a token that is accepted with probability 1/2


def make_request(*turns: tuple[list[int], list[int]]) -> TokenRequest:
    return TokenRequest(tuple((np.array(p, np.int32), np.array(c, np.int32)) for p, c in turns))


def make_counts(num_drafted: dict[tuple[int, int], int], share: float) -> Counts:
    counts = Counts()
    for cell, number in num_drafted.items():
        counts.num_drafted[cell] = number
        counts.num_accepted[cell] = number * share
    return counts


def make_coin_request(num_words: int) -> TokenRequest:
    """The prompt consists of words that occur once. For every third word, the completion has the
    word, every second time also the next word, then an unknown word."""
    completion = [-1]
    for word in range(0, num_words - 2, 3):
        completion += [word, word + 1] if word % 2 else [word]
        completion.append(num_words + word)
    prompt = list(range(num_words))
    return make_request((prompt, [token % (3 * num_words) for token in completion]))


def test_own_drafts_are_counted_up_to_the_first_wrong_token() -> None:
    counts, _ = count_drafts([make_coin_request(302)])
    # After one copied word, the next word is right every second time. After two copied words, the
    # third is never right: it is drafted once as the second token of a draft and once as the first.
    assert counts.num_drafted[:, 0].tolist() == [100, 100, *[0] * 8]
    assert counts.num_accepted[:, 0].tolist() == [50, *[0] * 9]
    assert not counts.num_drafted[:, 1:].any()


def test_store_drafts_are_counted_by_what_the_second_occurrence_says() -> None:
    """Two conversations begin with the same three tokens. The third conversation continues as the
    second for one token more."""
    texts = [10, 11, 12, 13, 14, 15], [10, 11, 12, 23, 24, 25]
    requests = [make_request(([i], text)) for i, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_draft_costs, "BATCH", 1)
        _, single = count_drafts(requests)
        _, both = count_drafts([*requests, make_request(([7], [10, 11, 12, 23, 77, 78, 79]))])
    drafted = both.num_drafted - single.num_drafted
    accepted = both.num_accepted - single.num_accepted
    # The second conversation finds only single occurrences.
    assert (single.num_drafted[:, 1:] == 0).all()
    assert single.num_drafted[0, 0] > 0
    # After 10, two tokens of the draft agree; after 10 11, one. After 10 11 12, none agrees, but
    # the row has no match, so the newest occurrence is drafted.
    assert drafted[:3, 1].tolist() == accepted[:3, 1].tolist() == [1, 2, 0]
    assert drafted[2, 2] == accepted[2, 2] == 3
    assert (drafted[3, 3], accepted[3, 3]) == (3, 0)


def test_sets_have_equal_weight() -> None:
    small, large = make_counts({(5, 1): 100}, 1), make_counts({(5, 1): 1_000_000}, 0)
    assert fit_costs([small, large])[5, 1] == ONE_BIT


def test_shipped_table_has_the_expected_form() -> None:
    row, store = load_table()
    assert row.shape == SHAPE[:1]
    assert store.shape == SHAPE
    assert (np.diff(row.astype(int)) <= 0).all()
    assert (np.diff(store.astype(int), axis=0) <= 0).all()
    none, agrees, disagrees, _ = store.T
    assert (agrees <= none).all()
    assert (none <= disagrees).all()


@pytest.mark.slow
def test_shipped_table_is_reproduced() -> None:
    data = find_data(None)
    if data is None:
        pytest.skip("no recorded data beside the project")
    expected = fit_draft_costs.TABLE.read_text(encoding="utf-8")
    assert fit_table(load_sets(data), "all") == expected
