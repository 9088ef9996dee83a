"""How many of the rows' tokens are indexed beside a step, and which steps are only scanned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from configs import config
from ngram_npu import _C
from ngram_npu.config import INDEX_POLICY
from ngram_npu.engines.vllm import NgramProposer
from ngram_npu.index import NgramIndex
from vllm_config import vllm_config


def _proposer(engine: str, **more: Any) -> Any:
    return NgramProposer(config(method="custom_class", engine=engine, **more))


def _caught_up(
    index: NgramIndex,
    token_ids: Any,
    lengths: Any,
    slots: Any,
    counts: Any,
    least: int,
    prompt: int,
    steps: int = 1,
) -> tuple[list[int], int, list[int]]:
    """The result of ``index_catch_up``, and each slot's number of tokens afterwards."""
    policy = _C.IndexPolicy()
    policy.least_tokens, policy.prompt_tokens = least, prompt
    arguments = policy, token_ids, lengths, index.tensor, slots, counts
    looked_up, behind = _C.index_catch_up(*arguments, 2, 4, 0, False, False, steps)
    header, slot_words, length = 64, 48, 1
    indexed = [int(index.tensor[header + slot * slot_words + length]) for slot in slots]
    return looked_up.tolist(), behind, indexed


def test_catching_up_costs_a_32nd_of_a_scan_and_what_it_saves() -> None:
    """One token is indexed per 768 scanned; an unfinished row is scanned."""
    index = NgramIndex(4, 10**6, min_n=2, max_n=4)
    token_ids = np.random.default_rng(0).integers(0, 50, (3, 60000), np.int32)
    lengths, one = np.array([50000, 30000, 51200], np.int32), np.ones(3, np.int32)
    slots = np.array([2, 0, 1], np.int32)
    rows = token_ids, lengths, slots, one
    allowed = (131200 // 32) // 768
    assert _caught_up(index, *rows, 0, 7) == ([-1, -1, -1], 3, [allowed, 0, 0])
    assert _caught_up(index, *rows, 100, 7, 3)[2] == [allowed + 300, 0, 0]
    index.append(token_ids, lengths - 65, row_indices=np.array([2]), slot_indices=slots[2:])
    more = (131200 // 32 + 51200 - 2048) // 768
    expected = [-1, -1, 1], 2, [allowed + 300 + more, 0, 51200 - 65]
    assert _caught_up(index, *rows, 0, 7) == expected


def test_prompts_alone_in_a_step_have_a_share_of_their_own() -> None:
    index = NgramIndex(4, 10**6, min_n=2, max_n=4)
    token_ids = np.random.default_rng(0).integers(0, 50, (2, 500), np.int32)
    slots, lengths = np.array([2, 0], np.int32), np.array([500, 300], np.int32)
    none, mixed = np.zeros(2, np.int32), np.array([1, 0], np.int32)
    rows = token_ids, lengths, slots
    assert _caught_up(index, *rows, none, 50, 600) == ([2, -1], 1, [500, 100])
    assert _caught_up(index, *rows, mixed, 50, 600) == ([2, -1], 1, [500, 150])


def test_catching_up_takes_lengths_and_slots_for_data() -> None:
    index = NgramIndex(2, 1000, min_n=2, max_n=4)
    token_ids = np.zeros((5, 20), np.int32)
    slots = np.array([-1, 2, 2**31 - 1, 0, 1], np.int32)
    lengths = np.array([-5, 2**31 - 1, 7, -(2**31), 9], np.int32)
    counts = np.array([2**31 - 1, -(2**31), -3, 1, 0], np.int32)
    for words in (index.tensor, np.zeros(3, np.int32)):
        arguments = INDEX_POLICY, token_ids, lengths, words, slots, counts
        looked_up, _ = _C.index_catch_up(*arguments, 2, 4, 0, False, False, 1)
        assert set(looked_up.tolist()) <= {-1, *slots.tolist()}
    index.check_integrity({0: token_ids[3, :0]})
    for name, at, wrong in (
        ("token_ids: expected 5 rows, got 4", 1, token_ids[:4]),
        ("num_tokens: expected size 5, got size 2", 2, lengths[:2]),
        ("index: expected int32", 3, index.tensor.astype(np.int64)),
        ("min_n: expected", 6, 9),
        ("steps: expected 1 to", 11, 0),
    ):
        given: list[Any] = [
            INDEX_POLICY, token_ids, lengths, index.tensor, slots, counts,
            2, 4, 0, False, False, 1,
        ]  # fmt: skip
        given[at] = wrong
        with pytest.raises(ValueError, match=f"^index_catch_up: {name}"):
            _C.index_catch_up(*given)


def test_a_step_of_few_tokens_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens in total, or per row of many; not for a ladder, whose scan drafts differently."""
    monkeypatch.setattr(INDEX_POLICY, "scanned_tokens", 1280)
    token_ids = np.random.default_rng(0).integers(0, 9, (200, 1300), np.int32)
    for rows, length, scanned in (
        (1, 1280, True),
        (1, 1281, False),
        (2, 640, True),
        (2, 641, False),
        (200, 10, True),
        (200, 11, False),
    ):
        arguments = [[1]] * rows, np.full(rows, length, np.int32), token_ids
        proposer = _proposer("index", rows=200, length=1300)
        expected = _proposer("scan", rows=200, length=1300).propose(*arguments)
        assert proposer.propose(*arguments) == expected
        assert (proposer.engine.index is None) == scanned
    ladder = NgramProposer(
        vllm_config(additional_config={"ngram_npu": {"sizes": "ladder"}}, length=1300)
    )
    ladder.propose([[1]], np.full(1, 20, np.int32), token_ids)
    assert ladder.engine.index is not None


@pytest.mark.parametrize("match_policy", ["earliest", "latest"])
def test_drafts_are_the_scans_while_prompts_are_caught_up_with(match_policy: str) -> None:
    token_ids = np.random.default_rng(1).integers(0, 12, (4, 4000), np.int32)
    lengths = np.array([3000, 2000, 1500, 2500], np.int32)
    index = _proposer("index", length=4000, match_policy=match_policy)
    scan = _proposer("scan", length=4000, match_policy=match_policy)
    answered = []
    for _ in range(800):
        lengths += 1
        arguments = [[1]] * 4, lengths, token_ids
        assert index.propose(*arguments) == scan.propose(*arguments)
        answered.append(index.engine.index.statistics.rows_indexed)
    steps = np.diff(answered, prepend=0)
    assert steps[0] == 0
    assert steps[-1] == 4
    assert (np.diff(steps) >= 0).all()  # one after the other
    assert 9000 / 16 / 2 < np.argmax(steps == 4) < 9000 / 12 + 10
