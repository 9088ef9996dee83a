"""Tests what only the drafters of V1's runners do: limits of drafts, drafts for recurrent models,
and vLLM-Ascend's launcher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import CPU, LENGTH, V1, VOCABULARY, Ascend, K, Request, V1Async, make_config
from ngram_npu import num_threads
from ngram_npu.engines.vllm import NgramProposer, ascend
from ngram_npu.engines.vllm.v1 import StockNgramProposer


def test_empty_buffer_is_accepted_and_invalid_buffer_raises() -> None:
    proposer = NgramProposer(make_config(method="custom_class"))
    buffer = np.empty((2, 0), np.int32)
    assert proposer.propose([[1], []], np.zeros(2, np.int32), buffer) == [[], []]
    assert proposer.propose([], np.zeros(2, np.int32), np.zeros((2, 4), np.int32)) == []
    with pytest.raises(ValueError, match="ngram_propose: token_ids: expected"):
        proposer.propose([[1]], np.ones(1, np.int32), np.ones((1, 4), np.int64))
    for arguments in (buffer, np.zeros(2, np.int32)), (np.zeros(2, np.int32), [3]), ([3], buffer):
        with pytest.raises(ValueError, match="propose: expected num_tokens_no_spec of rank 1 and"):
            proposer.propose([[1], []], *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", [StockNgramProposer, ascend.AscendNgramProposer])
def test_drafter_with_stock_signature_limits_drafts_to_argument_k(drafter: Any) -> None:
    arguments = (object(),) if drafter is ascend.AscendNgramProposer else ()
    vllm_config = make_config(method="ngram", bounds=(2, 2), lookup="ngram")
    proposer = drafter(vllm_config, *arguments)
    rows, lengths = np.array([[1, 2, 3, 4, 1, 2]], np.int32), np.array([6], np.int32)
    drafts = [proposer.propose(k, [[2]], lengths, rows, slot_mappings={}) for k in (0, 1, 2, 9)]
    assert drafts == [[[]], [[3]], [[3, 4]], [[3, 4, 1, 2]]]
    assert proposer.load_model(object()) is None
    assert not arguments or proposer.dummy_run(1, with_prefill=True) is None


def test_recurrent_model_gets_a_draft_for_every_sampled_row() -> None:
    """If nothing matches, the newest token is the draft, except in rows that sampled nothing and in
    full rows."""
    token_ids = np.arange(5 * 64, dtype=np.int32).reshape(5, 64)
    token_ids[0, :5] = [1, 2, 3, 1, 2]
    lengths = np.array([5, 5, 5, 64, 63], np.int32)
    samples = [[2], [7, 68], [], [255], [318]]
    vllm_config = make_config(
        method="custom_class", lookup="ngram", length=64, rows=5, vocabulary=400
    )
    proposer = NgramProposer(vllm_config)
    assert proposer.propose(samples, lengths, token_ids)[1:] == [[], [], [], []]
    vllm_config.model_config.is_hybrid = True
    proposer = NgramProposer(vllm_config)
    assert proposer.propose(samples, lengths, token_ids) == [[3, 1, 2], [68], [], [], [318]]
    vllm_config = make_config(method="ngram", length=64, rows=5)
    vllm_config.model_config.is_hybrid = True
    assert StockNgramProposer(vllm_config).propose(0, samples, lengths, token_ids) == [[]] * 5


def test_number_of_threads_is_one_by_default(
    plugin_log: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    V1()
    assert num_threads() == 1
    V1(num_threads=2)
    assert num_threads() == 2
    assert caplog.messages[-1].startswith("ngram_npu: num_threads=2 has no effect beyond OMP_NUM")


def test_table_of_draft_lengths_is_logged_as_unused(caplog: pytest.LogCaptureFixture) -> None:
    vllm_config = make_config(method="custom_class")
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = [[1, 8, 4]]
    NgramProposer(vllm_config)
    assert "num_speculative_tokens_per_batch_size has no effect" in caplog.messages[-1]


# The asynchronous runners.


@pytest.mark.parametrize("k", [0, 1, 3, K + 2])
@pytest.mark.parametrize("engine_class", [V1Async, Ascend])
def test_asynchronous_drafts_have_the_requested_length(engine_class: Any, k: int) -> None:
    engine = engine_class()
    engine.begin(Request("a", [1, 2, 3, 9, 9, 9, 9, 1, 2]), Request("b", [4]))
    length = min(k, K) if engine_class is V1Async else k
    padding = [5] * length if engine.pads else []
    assert engine.step({"a": [3], "b": [5]}, k)["b"] == padding
    assert engine.step({"a": [9]}, k)["a"][:4] == [9, 9, 9, 1][:length]


@pytest.mark.parametrize("is_recurrent", [True, False])
def test_ascend_drafts_the_newest_token_for_recurrent_models(is_recurrent: bool) -> None:
    """Drafts are then empty only for requests that sampled nothing."""
    engine = Ascend()
    vllm_config = make_config()
    vllm_config.model_config.is_hybrid = is_recurrent
    engine.adapter = ascend.AscendNgramProposerNPU(vllm_config, CPU, object())
    engine.begin(Request("a", [1, 2, 1]), Request("b", [4]), Request("c", [5]))
    drafts = engine.step({"a": [2], "b": [], "c": [6]}, 2)
    assert drafts == {"a": [1, 2], "b": [], "c": [6] if is_recurrent else []}


def test_ascend_launcher_accepts_lists_additional_rows_and_no_rows() -> None:
    drafter: Any = Ascend(lookup="ngram").adapter
    assert (drafter.min_n, drafter.max_n, drafter.k) == (2, 4, K)
    drafter.load_model(object())
    drafter.dummy_run(num_tokens=8, with_prefill=True, is_profile=False)
    tokens = torch.full((5, LENGTH), 7, dtype=torch.int32)
    tokens[0, :4] = torch.tensor([1, 2, 3, 1])
    tokens[1, :3] = torch.tensor([4, 5, 6])
    lengths, mask = torch.tensor([4, 3], dtype=torch.int32), torch.tensor([False, False])
    lookup = VOCABULARY, 2, 4, K
    sampled_tensor = torch.tensor([[2, -1], [4, 5], [8, 8]])  # int64, with an additional row
    for samples in ([[2], [4, 5]], sampled_tensor):
        rows = tokens.clone()
        results = ascend.triton_ngram_spec_decode(rows[:2], lengths, samples, mask, *lookup)
        next_tokens, drafts, counts, num_sampled = (result.tolist() for result in results)
        assert (next_tokens, counts, num_sampled) == ([2, 5], [3, 3], [1, 2])
        assert drafts == [[3, 1, 2, -1], [6, 4, 5, -1]]
        assert rows[2:].eq(7).all()
    no_rows = tokens[:0], lengths[:0]
    for samples in ([], sampled_tensor[:0]):
        results = ascend.triton_ngram_spec_decode(*no_rows, samples, mask[:0], *lookup)
        assert [tuple(result.shape) for result in results] == [(0,), (0, K), (0,), (0,)]
