"""Drafts of a store, compared with plain lists of texts, and its rules by hand. Tests the
reference, which the parity suite compares with the kernel."""

from __future__ import annotations

import numpy as np
import pytest
from ops import reference
from ops.reference.ladder import SIZES
from ops.reference.store import mix, promise, updated
from ops.specs.store import FINISH, LIVE, UNLIMITED, fresh, no_drafts

FREE = np.zeros((16, 56), np.uint8)
KINDS = 5
"""Few tokens, so that requests share short grams but not long ones."""


def step(
    store: np.ndarray, rows: list[list[int]], sampled: int, scopes: list[int]
) -> list[tuple[list[int], int]]:
    """Each request's draft and its match; request i uses slot i."""
    width = max(map(len, rows))
    tokens = np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)
    drafts = no_drafts(len(rows), 6)
    reference.ngram_store_step_(
        tokens, np.array([len(row) for row in rows], np.int32),
        np.full(len(rows), sampled, np.int32), store, None, None, np.array(scopes),
        *drafts.values(), UNLIMITED, FREE, 0,
    )  # fmt: skip
    ids, counts, match_len, _ = drafts.values()
    return [(ids[i, : counts[i]].tolist(), int(match_len[i])) for i in range(len(rows))]


def continuations(texts: list[list[int]], gram: list[int]) -> list[list[int]]:
    """The texts after each occurrence of a gram, except at a text's end."""
    n = len(gram)
    found = [
        text[i + n :] for text in texts for i in range(len(text) - n) if text[i : i + n] == gram
    ]
    return [rest for rest in found if rest]


def check_drafts(visibility: int, scope_of: list[int], seed: int) -> int:
    """Requests generate some tokens per step and start again. The test knows their real scopes;
    `scope_of` are the scopes passed to the store. Returns the number of drafts."""
    rng = np.random.default_rng(seed)
    count = len(scope_of)
    known = [i % 3 for i in range(count)]
    store = fresh(count, 64 * count, 12, visibility)
    said: list[list[list[int]]] = [[], [], []]
    rows, texts = [[0] for _ in known], [[] for _ in known]
    drafts = 0
    for _ in range(60):
        for i, scope in enumerate(known):
            if rng.random() < 0.05:
                if visibility == FINISH:
                    said[scope].append(texts[i])
                    reference.ngram_store_finish_(store, np.array([i]))
                rows[i], texts[i] = rng.integers(0, KINDS, 20).tolist(), []
            rows[i] += rng.integers(0, KINDS, 7).tolist()
        for i, (draft, m) in enumerate(step(store, rows, 7, scope_of)):
            before = said[known[i]]
            sizes = (n for n in SIZES if n <= len(rows[i]) and continuations(before, rows[i][-n:]))
            longest = next(sizes, 0)
            assert longest <= m, "a longer gram had been said"
            if not longest:
                assert not draft, "nothing of it had been said"
                continue
            rests = continuations(before, rows[i][-m:])
            assert any(rest[: len(draft)] == draft for rest in rests), "this was not said so"
            assert draft
            drafts += 1
        for i, scope in enumerate(known):
            if visibility == LIVE and not texts[i]:
                said[scope].append(texts[i])
            texts[i] += rows[i][-7:]
    return drafts


@pytest.mark.parametrize("visibility", [LIVE, FINISH])
def test_drafts_are_what_the_scope_said_after_the_longest_gram(visibility: int) -> None:
    assert check_drafts(visibility, [0, -1, 2**63 - 1, 0, -1, 2**63 - 1], 1) > 100


@pytest.mark.parametrize("visibility", [LIVE, FINISH])
def test_a_store_that_is_told_wrong_scopes_is_found(visibility: int) -> None:
    with pytest.raises(AssertionError, match="said"):
        check_drafts(visibility, [0] * 6, 1)


def expected_after(outcomes: str) -> str:
    """The token drafted after a gram that was followed by these tokens in turn."""
    store = fresh(1, 64, 8)
    for outcome in outcomes:
        step(store, [[1, 7, ord(outcome)]], 2, [0])
        reference.ngram_store_finish_(store, np.array([0]))
    [(draft, _)] = step(store, [[2, 7]], 1, [0])
    return chr(draft[0])


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ("a", "a"),
        ("ab", "a"),  # wrong 1 is not above right + 1
        ("abb", "b"),
        ("aab", "a"),
        ("aabb", "a"),
        ("aabbb", "b"),
        ("aabbbaa", "a"),  # what took over begins with one time wrong
        ("aaaaabbcab", "a"),
        ("abcabc", "c"),
    ],
)
def test_an_entry_follows_the_majority(outcomes: str, expected: str) -> None:
    assert expected_after(outcomes) == expected


def test_an_entry_gives_in_after_seventeen() -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        before = "".join(rng.choice(list("ab"), int(rng.integers(1, 60)), p=[0.9, 0.1]))
        assert expected_after(before + "c" * 17) == "c"
    assert expected_after("a" * 16 + "c" * 16) == "a"


def test_counts_at_their_ends() -> None:
    assert updated(15, 9, True) == (8, 4, True)
    assert updated(15, 15, False) == (7, 8, False)
    assert updated(14, 15, False) == (0, 1, True)


def test_the_integers_of_the_contract() -> None:
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first, of seed 0
    assert promise([]) == 0
    assert promise([0] * 9) == 9 * 65536
    assert promise([16]) == 32759  # a bit: a half, but for sixteen roundings
    assert promise([128, 0, 128]) == 2 * promise([128]) > 0  # the last sum is above 255
