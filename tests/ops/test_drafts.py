"""Compares drafts with results computed by hand.

test_parity.py compares kernels with references. The tests here detect errors that a kernel and its
reference have in common.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import FRONT_ENDS, Backend
from ngram_npu import NgramConfig, NgramProposer
from ops import reference
from ops.reference.merging import compute_expected_tokens
from ops.reference.store import mix
from ops.specs.inputs import ANY_TOKEN, UNLIMITED
from ops.specs.store import add_text, new_store


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
    vocab_size: int = ANY_TOKEN,
    fill: bool = False,
) -> list[int]:
    """Returns the draft for a row with this context; with ``fill`` all k tokens."""
    tokens = np.full((1, 32), -7, np.int32)
    tokens[0, : len(context)] = context
    lengths = np.array([len(context)], np.int32)
    lookup = *n, k, match_policy, overlap, max_len, vocab_size, fill
    args = (tokens, lengths, None, None, *lookup)
    draft, count, _ = front_end.call("ngram_propose", args)
    if fill:
        return draft[0].tolist()
    assert list(draft[0, count[0] :]) == [-1] * (k - count[0])
    return draft[0, : count[0]].tolist()


LATEST = {"match_policy": 1}
REPEATED = [1, 2, 3, 4, 1, 2]
PERIOD = [1, 2, 3, 4, 5, 1, 2]

# The modes of vLLM's `ngram`, its V1 `ngram_gpu` and its V2 speculator, and of the n-gram kernel of
# vLLM-Ascend, as their projects document these modes. Values: context, (min_n, max_n), k, options,
# draft.
PROPOSALS = {
    # vLLM's `ngram`: the longest match of min_n to max_n tokens, the earliest if several.
    "longer-match-is-used": ([2, 3, 50, 9, 1, 2, 3, 60, 8, 1, 2, 3], (2, 3), 2, {}, [60, 8]),
    "earliest-of-equal-matches": ([1, 2, 70, 1, 2, 80, 1, 2], (2, 2), 1, {}, [70]),
    "match-too-short": ([5, 2, 3, 9, 7, 2, 3], (3, 4), 3, {}, []),
    "stops-at-end-of-row": ([1, 2, 3, 1, 2], (2, 2), 5, {}, [3, 1, 2]),
    "draft-ends-at-max-model-len": (REPEATED, (2, 2), 4, {"max_len": 8}, [3, 4]),
    "no-draft-at-max-model-len": (REPEATED, (2, 2), 4, {"max_len": 6}, []),
    "match-overlaps-suffix": ([4, 4, 4], (2, 2), 3, {}, [4]),
    # V1 `ngram_gpu` and vLLM-Ascend: drafts may exceed max_model_len.
    "no-max-model-len": (REPEATED, (2, 2), 4, {}, [3, 4, 1, 2]),
    # V2: the latest match; the row's last token fills the positions after the draft.
    "latest-of-equal-matches": ([1, 2, 70, 1, 2, 80, 1, 2], (2, 2), 3, LATEST, [80, 1, 2]),
    "longer-before-latest": ([1, 2, 3, 60, 9, 2, 3, 50, 1, 2, 3], (2, 3), 2, LATEST, [60, 9]),
    "filled-after-draft": ([9, 8, 9], (1, 1), 3, {**LATEST, "fill": True}, [8, 9, 9]),
    "filled-without-match": ([7, 9, 7, 8], (1, 1), 3, {**LATEST, "fill": True}, [8] * 3),
    # Only here: with overlap, a draft that reaches the row's end repeats its own tokens.
    "overlap-continues-period": (
        [7, 1, 2, 3, 1, 2, 3], (2, 3), 8, {"overlap": True}, [1, 2, 3, 1, 2, 3, 1, 2],
    ),
    "overlap-of-one-token": ([4, 4, 4], (2, 2), 5, {"overlap": True}, [4] * 5),
    "filled-at-max-len": (PERIOD, (2, 2), 3, {"max_len": 7, "fill": True}, [2] * 3),
    "fill-after-row": (PERIOD, (2, 2), 7, {"fill": True}, [3, 4, 5, 1, 2, 2, 2]),
    "fill-beyond-max-len": (
        PERIOD, (2, 2), 7, {"max_len": 8, "overlap": True, "fill": True}, [3, 4, 5, 1, 2, 3, 4],
    ),
    # Only this project: no token outside the vocabulary is drafted, or fills a position.
    "ends-before-invalid-id": (PERIOD, (2, 2), 4, {"vocab_size": 5}, [3, 4]),
    "first-id-is-invalid": (PERIOD, (2, 2), 4, {"vocab_size": 3}, []),
    "first-id-is-negative": ([1, 2, -1, 4, 1, 2], (2, 2), 4, {}, []),
    "fill-ends-before-invalid-id": (
        PERIOD, (2, 2), 5, {"vocab_size": 5, "max_len": 8, "fill": True}, [3, 4, 2, 2, 2],
    ),
    "newest-token-is-invalid": (
        [1, 9, 3, 1, 9], (2, 2), 3, {"vocab_size": 9, "fill": True}, [3, 1, 0],
    ),
    "empty-vocabulary": (PERIOD, (2, 2), 2, {"vocab_size": 0, "fill": True}, [-1, -1]),
}  # fmt: skip


@pytest.mark.parametrize("proposal", PROPOSALS.values(), ids=PROPOSALS.keys())
def test_proposal_equals_hand_computed_draft(front_end: Backend, proposal: tuple) -> None:
    context, n, k, options, expected = proposal
    assert propose(front_end, context, n=n, k=k, **options) == expected


STEPS = {
    # sampled tokens, options; next token, number of sampled tokens, draft, row after the step
    "rejected token ends step": ([3, 9, -1, 5], {}, 9, 2, [1, 2], [1, 2, 3, 9, 1, 2, 3, 9]),
    "no token sampled": ([-1, 3], {}, 2, 0, [], [1, 2, 3, 9, 1, 2]),
    "request discarded": ([3], {"discard": np.array([True])}, 2, 0, [], [1, 2, 3, 9, 1, 2]),
    "token outside vocabulary ends step": ([3, 100, 9], {}, 3, 1, [9, 1], [1, 2, 3, 9, 1, 2, 3]),
    # vLLM-Ascend clamps to the capacity before it selects the next token: a known difference.
    "next token exceeds capacity": ([3, 9, 1, 2], {}, 2, 4, [2, 3], [1, 2, 3, 9, 1, 2, 3, 9, 1]),
}


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("step_case", STEPS.values(), ids=STEPS.keys())
def test_step_equals_hand_computed_step(step_case: tuple, advance: bool) -> None:
    """The sampled tokens have the form that vLLM's runners pass."""
    sampled, options, next_token, num_sampled, draft, row = step_case
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


def draft_from_store(texts: list[list[int]], row: list[int], **options: Any) -> tuple[Any, ...]:
    """Stores each text in a call of its own. Returns the row's draft, the length of its match, and
    the agreement."""
    store = new_store(16, 4096, 1)
    for text in texts:
        add_text(store, 0, np.array([0, *text], np.int32), options.get("stored_scope", 0))
    ids = np.full((1, 6), -1, np.int32)
    counts, agreement = np.zeros((2, 1), np.int32)
    match_len = np.array([options.get("own_match", 0)], np.int32)
    reference.store_propose_(
        np.array([row], np.int32), np.array([len(row)], np.int32), np.array([1], np.int32),
        scopes=np.array([options.get("scope", 0)]), text=store["text"], blocks=store["blocks"],
        table=store["table"], draft_token_ids=ids, num_draft_tokens=counts, match_len=match_len,
        agreement=agreement, vocab_size=options.get("vocab_size", 1000),
    )  # fmt: skip
    return ids[0, : counts[0]].tolist(), int(match_len[0]), int(agreement[0])


EIGHT, SIXTEEN = [*range(50, 58)], [*range(50, 66)]
OWN_DRAFT, SINGLE = -2, -1


@pytest.mark.parametrize(
    ("texts", "row", "options", "expected"),
    [
        ([[1, 2, 3, 4, 10]], [9, 1, 2, 3, 4], {}, ([10], 4, SINGLE)),
        ([[4, 10], [3, 4, 20]], [9, 3, 4], {}, ([20], 2, SINGLE)),
        ([[4, 20], [3, 4, 20]], [9, 3, 4], {"own_match": 1}, ([20], 2, SINGLE)),
        ([[3, 4, 10], [4, 30], [3, 4, 20], [4, 20]], [9, 3, 4], {}, ([20], 1, 1)),
        ([[*EIGHT, 10]], [9, *EIGHT], {}, ([10], 8, SINGLE)),
        ([[*EIGHT, 10]], [9, *EIGHT], {"own_match": 7}, ([10], 8, SINGLE)),
        ([[*EIGHT, 10]], [9, *EIGHT], {"own_match": 8}, ([], 8, OWN_DRAFT)),
        ([[*SIXTEEN, 10]], [9, *SIXTEEN], {"own_match": 15}, ([10], 16, SINGLE)),
        ([[1, 2, 3, 4, 10]], [9, 1, 2, 3, 4], {"own_match": 1}, ([10], 4, SINGLE)),
        ([[1, 2, 3, 4, 10]], [9, 1, 2, 3, 4], {"own_match": 2}, ([], 2, OWN_DRAFT)),
        ([[4, 10, 11, 12], [4, 10, 11, 13]], [9, 4], {}, ([10, 11, 13], 1, 2)),
        ([[4, 10, 11], [4, 10, 11, 13]], [9, 4], {}, ([10, 11, 13], 1, 2)),
        ([[4, 10, 11, 12], [4, 10, 11]], [9, 4], {}, ([10, 11], 1, 2)),
        ([[4, 10], [4, 20]], [9, 4], {}, ([20], 1, 0)),
        ([[3, 4, 10], [3, 4, 20]], [9, 3, 4], {"own_match": 1}, ([], 1, OWN_DRAFT)),
        ([[*EIGHT, 10], [*EIGHT, 20]], [9, *EIGHT], {"own_match": 2}, ([], 2, OWN_DRAFT)),
        ([[4, 10, 4, 20]], [9, 4], {}, ([20], 1, SINGLE)),  # both in one call
        ([[4, 10, 1000, 11]], [9, 4], {}, ([10], 1, SINGLE)),
        ([[4, 1000], [4, 10]], [9, 4], {}, ([10], 1, SINGLE)),  # second: an invalid next token
        ([[4, 10], [4, 1000]], [9, 4], {}, ([], 0, OWN_DRAFT)),
        ([[4, 10]], [9, 4], {"vocab_size": 0}, ([], 0, OWN_DRAFT)),
        ([[4, 10]], [9, 5], {}, ([], 0, OWN_DRAFT)),
        ([[4, 10]], [9, 4], {"scope": 7}, ([], 0, OWN_DRAFT)),
        ([[4, 10]], [9, 4], {"scope": 7, "stored_scope": 7}, ([10], 1, SINGLE)),
        ([[4, 10]], [9, 4], {"scope": -1, "stored_scope": -1}, ([], 0, OWN_DRAFT)),
    ],
)  # fmt: skip
def test_store_drafts_the_longest_trusted_ngram(
    texts: list[list[int]], row: list[int], options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert draft_from_store(texts, row, **options) == expected


def test_row_that_returns_to_a_slot_is_not_stored_twice() -> None:
    for hold_back in (False, True):
        store, tokens = new_store(16, 64, 2), np.arange(100, 140, dtype=np.int32)[None]
        for length, slot in ((10, 0), (12, 0), (14, 1), (16, 1), (18, 0), (20, 0), (22, 0)):
            reference.store_append_(
                tokens, np.array([length], np.int32), np.array([2], np.int32), **store,
                slot_indices=np.array([slot]), max_new=64, hold_back=hold_back,
            )  # fmt: skip
        stored = store["text"][store["text"] > 0].tolist()
        assert len(stored) == len(set(stored)) > 0


def test_hash_equals_value_of_contract() -> None:
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first number for seed 0


def test_expected_tokens_equal_values_of_contract() -> None:
    assert compute_expected_tokens([]) == 0
    assert compute_expected_tokens([0] * 9) == 9 * 65536
    assert compute_expected_tokens([16]) == 32759  # half of 65536, minus sixteen roundings
    one = compute_expected_tokens([128])
    assert compute_expected_tokens([128, 0, 128]) == 2 * one > 0  # the last sum is 256
