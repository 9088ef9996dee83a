"""The stock speculator's kernels and our operators on the same random state, without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import engines  # noqa: F401, repairs Triton's interpreter
import numpy as np
import torch
from ngram_npu.engines.vllm.v2 import NgramSpeculator
from v2_runs import call_stock
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.states import RequestState

from tools.bench.data import make_workload
from tools.bench.device_peers import VllmV2
from tools.bench.measure import Measurement, check
from tools.bench.ops.lookup import ProposeContestant
from tools.bench.options import Options, Size

CPU = torch.device("cpu")
EPISODES, STEPS = 50, 20


def _make_config(rng: random.Random, rows: int, capacity: int) -> Any:
    low = rng.randint(1, 4)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="ngram_gpu",
            num_speculative_tokens=rng.randint(1, 6),
            prompt_lookup_min=low,
            prompt_lookup_max=rng.randint(low, 6),
        ),
        max_concurrent_batches=1,
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(max_model_len=capacity),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=1),
    )


class _Episode:
    """A runner with a few rows, whose requests begin, sample tokens or none, and end."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        rows, self._capacity = self._rng.randint(1, 5), self._rng.choice([24, 64, 100])
        self.config = _make_config(self._rng, rows, self._capacity)
        self._k = self.config.speculative_config.num_speculative_tokens
        self._alphabet = self._rng.choice([1, 2, 3, 8, 1000])
        self.state = RequestState(
            rows, self._capacity, 64, self._k, 1000, CPU, use_dense_all_token_ids=True
        )

    def make_speculator(self, engine: str) -> NgramSpeculator:
        self.config.additional_config = {"ngram_npu": {"engine": engine}}
        return NgramSpeculator(self.config, CPU, self.state)

    def step(self, number: int) -> tuple[Any, torch.Tensor]:
        """Returns the batch of a step and the number of tokens that each row sampled."""
        rng, state = self._rng, self.state
        for request, row in list(state.req_id_to_index.items()):
            if rng.random() < 0.1 or state.total_len.gpu[row] + self._k + 1 > self._capacity:
                state.remove_request(request)
        while state.free_indices and (rng.random() < 0.5 or not state.num_reqs):
            prompt = self._make_tokens(rng.randint(1, self._capacity - self._k - 2))
            state.add_request(
                req_id=f"{number}-{len(state.free_indices)}",
                prompt_len=len(prompt),
                all_token_ids=prompt,
                num_computed_tokens=0,
                max_tokens=50,
            )
        state.apply_staged_writes()
        requests = rng.sample(sorted(state.req_id_to_index), rng.randint(1, state.num_reqs))
        rows = [state.req_id_to_index[request] for request in requests]
        counts = [self._sample(row) for row in rows]
        batch = SimpleNamespace(
            req_ids=requests,
            num_reqs=len(rows),
            idx_mapping=torch.tensor(rows),
            idx_mapping_np=np.array(rows, np.int32),
        )
        return batch, torch.tensor(counts, dtype=torch.int32)

    def _make_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._alphabet) for _ in range(count)]

    def _sample(self, row: int) -> int:
        """Appends sampled tokens, or none as in a chunk of a prompt, and returns their number."""
        count = self._rng.choice([0, *range(1, self._k + 2)])
        if count:
            tokens, length = torch.tensor(self._make_tokens(count)), self.state.total_len.gpu[row]
            self.state.all_token_ids.gpu[row, length : length + count] = tokens.int()
            self.state.total_len.gpu[row] = length + count
            self.state.last_sampled_tokens[row] = tokens[-1]
        return count


def test_drafts_equal_on_a_thousand_random_steps() -> None:
    num_matched = num_prefilling = 0
    for seed in range(EPISODES):
        episode = _Episode(seed)
        stock = NgramGPUSpeculator(episode.config, CPU, episode.state)
        ours = [episode.make_speculator(engine) for engine in ("scan", "index")]
        for step in range(STEPS):
            batch, num_sampled = episode.step(step)
            rest: list[Any] = [None] * 4 + [num_sampled, None, episode.state.last_sampled_tokens]
            expected = call_stock(stock, episode.state, batch, *rest, *[None] * 3)
            for speculator in ours:
                drafts = speculator.propose(batch, *rest, *[None] * 3)
                assert drafts.dtype == torch.int64
                assert torch.equal(drafts, expected), (seed, step, speculator.index)
            newest = episode.state.last_sampled_tokens[batch.idx_mapping]
            num_matched += int(((expected != newest).any(1) & (num_sampled > 0)).sum())
            num_prefilling += int((num_sampled == 0).sum())
        index = ours[1].index
        assert index is not None
        index.check_integrity()
    assert num_matched >= 400
    assert num_prefilling >= 100


def test_benchmark_peer_drafts_equally() -> None:
    options = Options(min_n=1, data_kind="zipf", match_policy="latest", frontend="torch")
    workload = make_workload(Size(3, 40), options)
    ours, stock = ProposeContestant(workload, options), VllmV2(workload, options)
    stock.name = "vllm-v2"
    measurement = Measurement()
    check([ours, stock], measurement)  # raises if they differ
    assert measurement.same_drafts is True
    assert measurement.drafted_share
