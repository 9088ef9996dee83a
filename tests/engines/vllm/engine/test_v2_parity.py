"""The stock speculator's kernels and our operators on the same random state, without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu.engines.vllm.v2 import NgramSpeculator
from v2_runs import STOCK, call_stock
from vllm.v1.worker.gpu.states import RequestState

from tools.bench.data import make_workload
from tools.bench.device_peers import VllmV2
from tools.bench.measure import Measurement, check
from tools.bench.ops.lookup import ProposeContestant
from tools.bench.options import Options, Size

CPU = torch.device("cpu")
EPISODES, STEPS = 50, 20


def _config(rng: random.Random, rows: int, capacity: int) -> Any:
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
    """A runner with a few rows, whose requests arrive, prefill in chunks, sample tokens and end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows, self.capacity = self.rng.randint(1, 5), self.rng.choice([24, 64, 100])
        self.config = _config(self.rng, self.rows, self.capacity)
        self.k = self.config.speculative_config.num_speculative_tokens
        self.alphabet = self.rng.choice([1, 2, 3, 8, 1000])
        self.state = RequestState(
            self.rows, self.capacity, 64, self.k, 1000, CPU, use_dense_all_token_ids=True
        )
        self.prefilling: set[str] = set()
        self.num_requests = 0

    def make_speculator(self, engine: str) -> NgramSpeculator:
        self.config.additional_config = {"ngram_npu": {"engine": engine}}
        return NgramSpeculator(self.config, CPU, self.state)

    def step(self) -> tuple[Any, torch.Tensor]:
        """Returns the batch of a step and the number of tokens that each row sampled."""
        for request in list(self.state.req_id_to_index):
            if self.rng.random() < 0.1 or self._length(request) + self.k + 1 > self.capacity:
                self.state.remove_request(request)
                self.prefilling.discard(request)
        while self.state.free_indices and (self.rng.random() < 0.5 or not self.state.num_reqs):
            self._add_request()
        self.state.apply_staged_writes()
        batch = self.rng.sample(
            sorted(self.state.req_id_to_index), self.rng.randint(1, self.state.num_reqs)
        )
        counts = [self._sample(request) for request in batch]
        rows = [self.state.req_id_to_index[request] for request in batch]
        return (
            SimpleNamespace(
                req_ids=batch,
                num_reqs=len(batch),
                idx_mapping=torch.tensor(rows),
                idx_mapping_np=np.array(rows, np.int32),
            ),
            torch.tensor(counts, dtype=torch.int32),
        )

    def _length(self, request: str) -> int:
        return int(self.state.total_len.gpu[self.state.req_id_to_index[request]])

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.alphabet) for _ in range(count)]

    def _add_request(self) -> None:
        request = f"request {self.num_requests}"
        self.num_requests += 1
        prompt = self._tokens(self.rng.randint(1, self.capacity - self.k - 2))
        self.state.add_request(
            req_id=request,
            prompt_len=len(prompt),
            all_token_ids=prompt,
            num_computed_tokens=0,
            max_tokens=50,
        )
        if self.rng.random() < 0.5:
            self.prefilling.add(request)

    def _sample(self, request: str) -> int:
        if request in self.prefilling and self.rng.random() < 0.5:
            return 0
        self.prefilling.discard(request)
        row, count = self.state.req_id_to_index[request], self.rng.randint(1, self.k + 1)
        tokens, length = torch.tensor(self._tokens(count)), self._length(request)
        self.state.all_token_ids.gpu[row, length : length + count] = tokens.int()
        self.state.total_len.gpu[row] = length + count
        self.state.last_sampled_tokens[row] = tokens[-1]
        return count


@pytest.fixture(autouse=True, scope="module")
def repair_interpreter() -> None:
    from vllm_on_cpu.repairs import register

    register()


def test_drafts_equal_on_a_thousand_random_steps() -> None:
    num_matched = num_prefilling = 0
    for seed in range(EPISODES):
        episode = _Episode(seed)
        stock = STOCK(episode.config, CPU, episode.state)
        ours = [episode.make_speculator(engine) for engine in ("scan", "index")]
        for step in range(STEPS):
            batch, num_sampled = episode.step()
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
