"""The calls that V1's runner makes to its asynchronous n-gram drafter in a step: first which
sampled tokens count, then drafts. Ours against vLLM's own class, by CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from ngram_npu import _C
from ngram_npu.vllm.v1_device import AsyncNgramProposer

from tools.bench.data import Workload
from tools.bench.measure import Contestant
from tools.bench.ops.base import Make, Op, Result, Skipped
from tools.bench.ops.vllm_propose import our_config
from tools.bench.options import MATCH_POLICY_CODES, Options, UnavailableError
from tools.bench.stats import Drafts
from tools.bench.vllm_peer import VOCAB, folder_of, given, proposer_config, take, version_in


class _Drafter(Contestant):
    def __init__(self, workload: Workload, options: Options, drafter: Any, runner: Any) -> None:
        self._drafter, self._input_batch = drafter, runner.input_batch
        self._k, self._threads = options.k, options.threads
        self._token_ids, self._lengths, self._sampled = (
            torch.from_numpy(array)
            for array in (workload.token_ids, workload.lengths, workload.sampled)
        )
        self._discard = torch.zeros(workload.size.batch, dtype=torch.bool)
        self.semantics = (options.min_n, options.max_n, options.k, options.match_policy)
        self.function = self._step

    def activate(self) -> None:
        _C.set_num_threads(self._threads)
        torch.set_num_threads(self._threads)

    def arguments(self, step: int) -> tuple[Any, ...]:
        return self._lengths[step], self._sampled[step]

    def _step(self, lengths: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, ...]:
        newest, counts, valid = self._drafter.update_token_ids_ngram(
            sampled, self._input_batch, self._token_ids, lengths, self._discard
        )
        drafts, _ = self._drafter.propose(self._k, lengths, self._token_ids, valid, counts)
        return newest, drafts

    def drafts(self, result: Any) -> Drafts:
        """Drafts without trailing copies of the newest token, drafted or filling: one side fills up
        its drafts and the other does not, so only the rest can be compared."""
        found = []
        for newest, row in zip(*(tensor.tolist() for tensor in result), strict=True):
            while row and row[-1] in (-1, newest):
                row.pop()
            found.append(row)
        return found


class Ours(_Drafter):
    def __init__(self, workload: Workload, options: Options) -> None:
        config = our_config(workload, options, drafts="padded")
        config.model_config.get_vocab_size = lambda: VOCAB
        runner = _runner(workload)
        drafter = AsyncNgramProposer(config, torch.device("cpu"), runner)
        super().__init__(workload, options, drafter, runner)
        self._index = torch.empty(0)
        index = drafter._drafting.index
        if index is not None:  # as on a server: prompts are indexed first
            slots, _ = drafter._slots.of(runner.input_batch.req_ids, runner.requests)
            index.append(
                self._token_ids,
                self._lengths[0],
                match_policy=MATCH_POLICY_CODES[options.match_policy],
                slot_indices=slots,
            )
            self._index = index.tensor
        self._saved = self._index.clone()
        engine = "scan" if index is None else "index"
        self.detail = f"ngram_npu.vllm.v1_device.AsyncNgramProposer, padded, engine: {engine}"

    def reset(self) -> None:
        self._index.copy_(self._saved)


class VllmV1(_Drafter):
    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match_policy != "earliest":
            raise UnavailableError("vLLM's V1 proposer knows the earliest match only")
        folder = folder_of(options.vllm_path)
        config = proposer_config(options, workload.capacity, workload.size.batch)
        drafter = take(folder, "NgramProposerGPU", given)(config, torch.device("cpu"))
        super().__init__(workload, options, drafter, _runner(workload))
        self.detail = f"{version_in(folder)} NgramProposerGPU, eager"


def _runner(workload: Workload) -> Any:
    """The part of a runner that drafters read: one request per row, and none ends."""
    names = [f"request {row}" for row in range(workload.size.batch)]
    batch = SimpleNamespace(req_ids=names, num_reqs=len(names), vocab_size=VOCAB)
    return SimpleNamespace(input_batch=batch, requests=dict.fromkeys(names))


class VllmAsync(Op):
    name = "vllm-async"
    help = "CPU time of V1's asynchronous drafter in a step, against vLLM's own"
    sizes = ("1x1k", "128x1k", "128x8k")
    peers = ("vllm-v1", "ours:engine=index", "ours:engine=scan")
    engines = ("auto", "index", "scan")
    peer_makers: ClassVar[Mapping[str, Make]] = {"vllm-v1": VllmV1}
    clock = time.process_time_ns
    assumptions: ClassVar[Mapping[str, Any]] = {
        "times": "CPU time of all threads of the process (time.process_time_ns), not the clock's",
        "step": "update_token_ids_ngram and propose on CPU tensors; no copies between devices",
        "vllm-v1": "eager, without the torch.compile that vLLM wraps it in; its file runs with "
        "stand-ins that do nothing for the forward context and the profiler's",
        "threads": "of torch and of ours, both sides: settings.threads",
        "max_model_len": "the rows' capacity, at most an eighth above the context; vllm-v1 looks "
        "through all of it",
    }

    def make(self, workload: Workload, options: Options) -> Contestant:
        return Ours(workload, options)

    def run(
        self, options: Options, report: Callable[[Result], None]
    ) -> tuple[list[Result], Skipped]:
        threads = torch.get_num_threads()
        try:
            return super().run(replace(options, frontend="torch"), report)
        finally:
            torch.set_num_threads(threads)
