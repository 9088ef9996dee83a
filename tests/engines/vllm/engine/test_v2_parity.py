"""Compares the stock speculator's drafts with ours on random states, without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import engines  # noqa: F401, repairs Triton's interpreter
import numpy as np
import torch
from ngram_npu.engines.vllm.v2 import NgramSpeculator
from runs import call_stock
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.states import RequestState

CPU = torch.device("cpu")


def _make_config(rng: random.Random, rows: int, capacity: int) -> Any:
    min_n = rng.randint(1, 4)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="ngram_gpu",
            num_speculative_tokens=rng.randint(1, 6),
            prompt_lookup_min=min_n,
            prompt_lookup_max=rng.randint(min_n, 6),
        ),
        max_concurrent_batches=1,
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(max_model_len=capacity, get_vocab_size=lambda: 1000),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=1),
    )


def _add_requests(rng: random.Random, state: RequestState, k: int) -> None:
    """Adds a request with a random prompt to each row."""
    alphabet = rng.choice([1, 2, 3, 8, 1000])
    for row in range(state.max_num_reqs):
        length = rng.randint(1, state.max_model_len - k - 1)
        prompt = [rng.randrange(alphabet) for _ in range(length)]
        state.add_request(
            req_id=f"request {row}",
            prompt_len=length,
            all_token_ids=prompt,
            num_computed_tokens=0,
            max_tokens=50,
        )
    state.apply_staged_writes()


def _append_sampled(rng: random.Random, state: RequestState, k: int) -> tuple[Any, torch.Tensor]:
    """Appends sampled tokens to some rows. Returns the batch, and each row's number of sampled
    tokens; 0 means that the row is in prefill."""
    requests = rng.sample(sorted(state.req_id_to_index), rng.randint(1, state.num_reqs))
    rows = [state.req_id_to_index[request] for request in requests]
    counts = [rng.randint(0, k + 1) for _ in rows]
    for row, count in zip(rows, counts, strict=True):
        length = int(state.total_len.gpu[row])
        tokens = state.all_token_ids.gpu[row]
        for position in range(length, length + count):
            tokens[position] = tokens[rng.randrange(length)]  # repeats an earlier token
            state.last_sampled_tokens[row] = tokens[position]
        state.total_len.gpu[row] += count
    batch = SimpleNamespace(
        req_ids=requests,
        num_reqs=len(rows),
        idx_mapping=torch.tensor(rows),
        idx_mapping_np=np.array(rows, np.int32),
    )
    return batch, torch.tensor(counts, dtype=torch.int32)


def test_drafts_equal_stock_speculator_on_random_states() -> None:
    num_matched = num_prefilling = 0
    for seed in range(150):
        rng = random.Random(seed)
        rows, capacity = rng.randint(1, 5), rng.choice([24, 64, 100])
        config = _make_config(rng, rows, capacity)
        k = config.speculative_config.num_speculative_tokens
        state = RequestState(rows, capacity, 64, k, 1000, CPU, use_dense_all_token_ids=True)
        config.additional_config = {"ngram_npu": {"lookup": "ngram"}}
        speculator = NgramSpeculator(config, CPU, state)
        _add_requests(rng, state, k)
        batch, num_sampled = _append_sampled(rng, state, k)
        args: list[Any] = [None] * 4 + [num_sampled, None, state.last_sampled_tokens] + [None] * 3
        expected = call_stock(NgramGPUSpeculator(config, CPU, state), state, batch, *args)
        drafts = speculator.propose(batch, *args)
        assert drafts.dtype == torch.int64
        assert torch.equal(drafts, expected), seed
        newest = state.last_sampled_tokens[batch.idx_mapping]
        num_matched += int(((expected != newest).any(1) & (num_sampled > 0)).sum())
        num_prefilling += int((num_sampled == 0).sum())
    assert num_matched >= 75
    assert num_prefilling >= 25
