"""Compares drafts with results computed by hand, and a store's drafts with lists of texts.

test_parity.py compares kernels with references; these tests detect an error that both share.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import FRONT_ENDS, Backend
from ngram_npu import NgramConfig, NgramProposer
from ops import reference
from ops.reference.ladder import SIZES
from ops.reference.store import mix, promise, updated
from ops.specs.store import FINISH, LIVE, UNLIMITED, new_store, no_drafts


@pytest.fixture(params=FRONT_ENDS, ids=lambda b: b.name)
def front_end(request: pytest.FixtureRequest) -> Backend:
    return request.param


def propose(
    front_end: Backend,
    context: list[int],
    *,
    n: tuple[int, int],
    k: int,
    match_policy: int = 0,
    overlap: bool = False,
    max_len: int = UNLIMITED,
    match_costs: list[int] | None = None,
    fill: bool = False,
) -> list[int]:
    tokens = np.full((1, 32), -7, np.int32)
    tokens[0, : len(context)] = context
    lengths = np.array([len(context)], np.int32)
    table = None if match_costs is None else np.array(match_costs, np.uint8)
    args = (tokens, lengths, None, None, *n, k, match_policy, overlap, max_len, table, 40, fill)
    draft, count, _ = front_end.call("ngram_propose", args)
    if fill:
        return draft[0].tolist()
    assert list(draft[0, count[0] :]) == [-1] * (k - count[0])
    return draft[0, : count[0]].tolist()


LATEST = {"match_policy": 1}
REPEATED = [1, 2, 3, 4, 1, 2]
COSTS = [1, 2, 3, 4, 5, 1, 2]

# The modes are documented by the peers themselves: vLLM's `ngram`, its V1 `ngram_gpu` and its V2
# speculator, and the n-gram kernel of vLLM-Ascend.
PROPOSALS = {
    # vLLM's `ngram`: the longest match of min_n to max_n tokens, the earliest of equal ones.
    "longer-match-wins": ([2, 3, 50, 9, 1, 2, 3, 60, 8, 1, 2, 3], (2, 3), 2, {}, [60, 8]),
    "earliest-of-equals": ([1, 2, 70, 1, 2, 80, 1, 2], (2, 2), 1, {}, [70]),
    "match-too-short": ([5, 2, 3, 9, 7, 2, 3], (3, 4), 3, {}, []),
    "stops-at-end-of-row": ([1, 2, 3, 1, 2], (2, 2), 5, {}, [3, 1, 2]),
    "cut-by-max-model-len": (REPEATED, (2, 2), 4, {"max_len": 8}, [3, 4]),
    "at-max-model-len": (REPEATED, (2, 2), 4, {"max_len": 6}, []),
    "match-overlaps-suffix": ([4, 4, 4], (2, 2), 3, {}, [4]),
    # V1 `ngram_gpu` and vLLM-Ascend: drafts may exceed max_model_len.
    "no-max-model-len": (REPEATED, (2, 2), 4, {}, [3, 4, 1, 2]),
    # V2: the latest match; the last token fills the places after the draft.
    "latest-of-equals": ([1, 2, 70, 1, 2, 80, 1, 2], (2, 2), 3, LATEST, [80, 1, 2]),
    "longer-before-latest": ([1, 2, 3, 60, 9, 2, 3, 50, 1, 2, 3], (2, 3), 2, LATEST, [60, 9]),
    "filled-after-draft": ([9, 8, 9], (1, 1), 3, {**LATEST, "fill": True}, [8, 9, 9]),
    "filled-without-match": ([7, 9, 7, 8], (1, 1), 3, {**LATEST, "fill": True}, [8] * 3),
    # No peer's mode: with overlap, a draft that reaches the row's end continues in itself.
    "overlap-continues-period": (
        [7, 1, 2, 3, 1, 2, 3], (2, 3), 8, {"overlap": True}, [1, 2, 3, 1, 2, 3, 1, 2],
    ),
    "overlap-of-one-token": ([4, 4, 4], (2, 2), 5, {"overlap": True}, [4] * 5),
    # No peer's mode: token j has the cost of a match that is j tokens longer; 40 is the limit.
    "cost-reaches-limit": (COSTS, (2, 2), 4, {"match_costs": [0, 0, 15, 25, *[1] * 12]}, [3, 4]),
    "cost-of-two-tokens": (COSTS, (2, 2), 4, {"match_costs": [20] * 16}, [3, 4]),
    "cost-above-limit": (COSTS, (2, 2), 4, {"match_costs": [41] * 16}, []),
    "last-cost-for-longer-matches": (
        [4] * 30, (14, 14), 9, {"overlap": True, "match_costs": [0] * 15 + [13]}, [4] * 4,
    ),
    "filled-at-max-len": (COSTS, (2, 2), 3, {"max_len": 7, "overlap": True, "fill": True}, [2] * 3),
}  # fmt: skip


@pytest.mark.parametrize("case", PROPOSALS.values(), ids=PROPOSALS.keys())
def test_proposal_equals_hand_computed_draft(front_end: Backend, case: tuple) -> None:
    context, n, k, options, expected = case
    assert propose(front_end, context, n=n, k=k, **options) == expected


@pytest.mark.parametrize("costs", [None, [20] * 16, [41] * 16])
def test_fill_ignores_costs(front_end: Backend, costs: list[int] | None) -> None:
    options = {"n": (2, 2), "k": 7, "match_costs": costs, "fill": True}
    assert propose(front_end, COSTS, **options) == [3, 4, 5, 1, 2, 2, 2]
    overlapping = propose(front_end, COSTS, **options, max_len=8, overlap=True)
    assert overlapping == [3, 4, 5, 1, 2, 3, 4]


STEPS = {
    # sampled, options; next token, number of sampled tokens, draft, row
    "rejected token ends it": ([3, 9, -1, 5], {}, 9, 2, [1, 2], [1, 2, 3, 9, 1, 2, 3, 9]),
    "nothing sampled": ([-1, 3], {}, 2, 0, [], [1, 2, 3, 9, 1, 2]),
    "discarded": ([3], {"discard": np.array([True])}, 2, 0, [], [1, 2, 3, 9, 1, 2]),
    "token outside the vocabulary ends it": ([3, 100, 9], {}, 3, 1, [9, 1], [1, 2, 3, 9, 1, 2, 3]),
    # vLLM-Ascend clamps to the capacity first: a known difference.
    "next token exceeds capacity": ([3, 9, 1, 2], {}, 2, 4, [2, 3], [1, 2, 3, 9, 1, 2, 3, 9, 1]),
}


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_step_equals_hand_computed_step(case: tuple, advance: bool) -> None:
    """A rejection sampler's results in the form that vLLM's runners pass."""
    sampled, options, next_token, num_sampled, draft, row = case
    tokens, lengths = np.array([[1, 2, 3, 9, 1, 2, 0, 0, 0]], np.int32), np.array([6], np.int32)
    proposer = NgramProposer(NgramConfig(min_n=1, max_n=3, k=2, vocab_size=100))
    step = proposer.step(tokens, lengths, np.array([sampled], np.int32), advance=advance, **options)
    assert step.next_token_ids.tolist() == [next_token]
    assert step.num_sampled.tolist() == [num_sampled]
    assert step.num_draft_tokens.tolist() == [len(draft)]
    assert step.draft_token_ids.tolist() == [draft + [-1] * (2 - len(draft))]
    assert tokens[0, : len(row)].tolist() == row
    assert lengths.tolist() == [len(row) if advance else 6]


# The store.

ALPHABET = 5
"""Few tokens, so that requests share short grams but not long ones."""


def store_step(
    store: np.ndarray, rows: list[list[int]], num_sampled: int, scopes: list[int]
) -> list[tuple[list[int], int]]:
    """Returns each request's draft and match length. Request i uses slot i."""
    width = max(map(len, rows))
    tokens = np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)
    lengths = np.array([len(row) for row in rows], np.int32)
    drafts = no_drafts(len(rows), 6)
    reference.ngram_store_step_(
        tokens, lengths, np.full(len(rows), num_sampled, np.int32), store, None, None,
        np.array(scopes), *drafts.values(), UNLIMITED, np.zeros((16, 56), np.uint8), 0,
    )  # fmt: skip
    ids, counts, match_len, _ = drafts.values()
    return [(ids[i, : counts[i]].tolist(), int(match_len[i])) for i in range(len(rows))]


def continuations(texts: list[list[int]], gram: list[int]) -> list[list[int]]:
    """The rest of a text after each occurrence of a gram, unless it is empty."""
    n = len(gram)
    return [
        text[end:] for text in texts for end in range(n, len(text)) if text[end - n : end] == gram
    ]


def check_drafts(visibility: int, scopes: list[int], seed: int) -> int:
    """Compares drafts with lists of the texts of three scopes; returns the number of drafts.

    Request i belongs to scope i % 3; ``scopes`` are the ones passed to the store. Requests grow by
    7 tokens per step and sometimes start again.
    """
    rng = np.random.default_rng(seed)
    true_scopes = [i % 3 for i in range(len(scopes))]
    store = new_store(len(scopes), 64 * len(scopes), 12, visibility)
    visible: list[list[list[int]]] = [[], [], []]
    rows, texts = [[0] for _ in scopes], [[] for _ in scopes]
    num_drafts = 0
    for _ in range(60):
        for i, scope in enumerate(true_scopes):
            if rng.random() < 0.05:
                if visibility == FINISH:
                    visible[scope].append(texts[i])
                    reference.ngram_store_finish_(store, np.array([i]))
                rows[i], texts[i] = rng.integers(0, ALPHABET, 20).tolist(), []
            rows[i] += rng.integers(0, ALPHABET, 7).tolist()
        for i, (draft, match_len) in enumerate(store_step(store, rows, 7, scopes)):
            known = visible[true_scopes[i]]
            sizes = [n for n in SIZES if n <= len(rows[i]) and continuations(known, rows[i][-n:])]
            longest = max(sizes, default=0)
            assert longest <= match_len, "a longer gram is in the scope's texts"
            if not longest:
                assert not draft, "the gram is not in the scope's texts"
                continue
            rests = continuations(known, rows[i][-match_len:])
            assert any(rest[: len(draft)] == draft for rest in rests), "not in the scope's texts"
            assert draft
            num_drafts += 1
        for i, scope in enumerate(true_scopes):
            if visibility == LIVE and not texts[i]:
                visible[scope].append(texts[i])
            texts[i] += rows[i][-7:]
    return num_drafts


@pytest.mark.parametrize("visibility", [LIVE, FINISH])
def test_store_drafts_continue_longest_gram_of_scope(visibility: int) -> None:
    assert check_drafts(visibility, [0, -1, 2**63 - 1, 0, -1, 2**63 - 1], 1) > 100


@pytest.mark.parametrize("visibility", [LIVE, FINISH])
def test_check_detects_drafts_of_other_scopes(visibility: int) -> None:
    with pytest.raises(AssertionError, match="in the scope's texts"):
        check_drafts(visibility, [0] * 6, 1)


def draft_after(outcomes: str) -> str:
    """The token drafted after a gram that these tokens followed, one after the other."""
    store = new_store(1, 64, 8)
    for outcome in outcomes:
        store_step(store, [[1, 7, ord(outcome)]], 2, [0])
        reference.ngram_store_finish_(store, np.array([0]))
    [(draft, _)] = store_step(store, [[2, 7]], 1, [0])
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
        ("aabbbaa", "a"),  # after the change, `wrong` begins at 1
        ("aaaaabbcab", "a"),
        ("abcabc", "c"),
    ],
)
def test_entry_follows_majority(outcomes: str, expected: str) -> None:
    assert draft_after(outcomes) == expected


def test_entry_changes_after_seventeen_other_outcomes() -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        before = "".join(rng.choice(list("ab"), int(rng.integers(1, 60)), p=[0.9, 0.1]))
        assert draft_after(before + "c" * 17) == "c"
    assert draft_after("a" * 16 + "c" * 16) == "a"


def test_counts_saturate() -> None:
    assert updated(15, 9, True) == (8, 4, True)
    assert updated(15, 15, False) == (7, 8, False)
    assert updated(14, 15, False) == (0, 1, True)


def test_integers_equal_those_of_contract() -> None:
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first number for seed 0
    assert promise([]) == 0
    assert promise([0] * 9) == 9 * 65536
    assert promise([16]) == 32759  # one bit: half of 65536, less sixteen roundings
    assert promise([128, 0, 128]) == 2 * promise([128]) > 0  # the last sum is above 255
