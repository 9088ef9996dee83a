"""vLLM's GPU code as contestants: what its runners call in each step, on tensors that are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tools.bench.contestant import Drafts
from tools.bench.data import Workload
from tools.bench.gpu.contestant import GpuContestant, by_count
from tools.bench.gpu.ours import Correction
from tools.bench.gpu.vllm_files import Files, has_triton, load
from tools.bench.ops.spec_state import BLOCK_SIZE, PAD_ID
from tools.bench.options import Options, UnavailableError
from tools.bench.vllm_peer import proposer_config

_VOCAB = 1 << 30
"""Above every id of any workload: all sampled tokens count."""


_proposers: dict[tuple[Any, ...], Any] = {}


def _proposer(files: Files, workload: Workload, options: Options, device: str) -> Any:
    """V1's, the same for both contestants: it compiles for up to a minute and keeps no state."""
    lookup = (options.min_n, options.max_n, options.k)
    key = (files, *lookup, workload.capacity, workload.size.batch, device)
    if key not in _proposers:
        _proposers.clear()
        config = proposer_config(workload, options)
        _proposers[key] = files.proposer(config, torch.device(device))
    return _proposers[key]


class V1(GpuContestant):
    """``update_token_ids_ngram`` and ``propose`` of the V1 runner's proposer: accept, append and
    draft. The lengths are the runner's, which uploads them; here they are there."""

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        if options.match != "earliest":
            raise UnavailableError("vLLM's V1 proposer knows the earliest match only")
        super().__init__(workload, options, device)
        files = load(options.vllm_path)
        self._proposer = _proposer(files, workload, options, device)
        self._proposer.device = self.token_ids.device
        self._batch = SimpleNamespace(num_reqs=self.batch, vocab_size=_VOCAB)
        self._none = torch.zeros(self.batch, dtype=torch.bool, device=device)
        self.semantics = (options.min_n, options.max_n, options.k, "earliest")
        self.detail = f"{files.version} NgramProposerGPU: update_token_ids_ngram and propose"

    def step(self, number: int) -> Any:
        lengths = self.lengths[number]
        _, counts, sampled = self._proposer.update_token_ids_ngram(
            self.sampled[number], self._batch, self.token_ids, lengths, self._none
        )
        return self._proposer.propose(self.options.k, lengths, self.token_ids, sampled, counts)

    def drafts(self, result: Any) -> Drafts:
        return by_count(*result)


class V1Kernel(V1):
    """The compiled kernel alone: drafting."""

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        super().__init__(workload, options, device)
        self._all = torch.ones(self.batch, dtype=torch.bool, device=device)
        self.detail = self.detail.partition(":")[0].replace("ProposerGPU", "GPUKernel, compiled")

    def step(self, number: int) -> Any:
        return self._proposer.kernel(self.lengths[number + 1], self.token_ids, self._all)


class V2(GpuContestant):
    """The V2 runner's speculator: its two Triton kernels. It only drafts: the runner has appended
    what was sampled in a kernel of its own, which is not part of this."""

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        if options.match != "latest":
            raise UnavailableError("vLLM's V2 speculator knows the latest match only")
        if not has_triton():
            raise UnavailableError("Triton is not installed")
        super().__init__(workload, options, device)
        files = load(options.vllm_path)
        self._state = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.token_ids), total_len=SimpleNamespace(gpu=None)
        )
        config = proposer_config(workload, options)
        self._speculator = files.speculator(config, torch.device(device), self._state)
        order = torch.arange(self.batch, dtype=torch.int32, device=device)
        self._input_batch = SimpleNamespace(num_reqs=self.batch, idx_mapping=order)
        self._counts = torch.ones(self.batch, dtype=torch.int32, device=device)
        # What it fills unused slots with: so they can be told from drafts.
        self._last = torch.full((self.batch, 1), -1, dtype=torch.int64, device=device)
        self.semantics = (options.min_n, options.max_n, options.k, "latest")
        self.detail = f"{files.version} NgramGPUSpeculator.propose: scan and finalize kernels"

    def step(self, number: int) -> Any:
        self._state.total_len.gpu = self.lengths[number + 1]
        unused = dict.fromkeys(
            ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states",
             "num_rejected", "next_prefill_tokens", "temperature", "seeds")
        )  # fmt: skip
        return self._speculator.propose(
            self._input_batch, num_sampled=self._counts, last_sampled=self._last, **unused
        )

    def drafts(self, result: Any) -> Drafts:
        return [[token for token in row if token >= 0] for row in result.tolist()]


class VllmCorrection(Correction):
    """What the V1 runner does between two forward passes: the compiled correction, the positions
    and the lengths by indexing, the slot mapping kernel. Uploads before it are left out."""

    def __init__(self, workload: Workload, options: Options, device: str) -> None:
        if not has_triton():
            raise UnavailableError("Triton is not installed")
        super().__init__(workload, options, device)
        files = load(options.vllm_path)
        self._correct = files.correct
        kernel = files.slot_mapping_kernel
        self._kernel, self._block = kernel.kernel, kernel.triton_block_size
        tokens = len(self.tensors["positions"])
        width = options.k + 1
        places = torch.arange(tokens, device=device)
        self._request = places // width
        self._place = places % width
        self._scheduled = torch.full((self.batch,), width, dtype=torch.int32, device=device)
        self.detail = (
            f"{files.version} update_num_computed_tokens_for_batch_change, positions and seq_lens "
            "by indexing, ComputeSlotMappingKernel"
        )

    def step(self, number: int) -> Any:
        t = self.tensors
        computed, positions, table = t["num_computed_tokens"], t["positions"], t["block_table"]
        self._correct(
            computed, t["num_accepted_tokens"], t["prev_positions"], t["num_sampled_prev"],
            t["num_draft_prev"], t["host_num_computed_tokens"],
        )  # fmt: skip
        positions[:] = computed[self._request].to(torch.int64) + self._place
        t["seq_lens"][: self.batch] = computed[: self.batch] + self._scheduled
        t["seq_lens"][self.batch :].fill_(0)
        count = len(positions)
        self._kernel[(self.batch + 1,)](
            count, count, t["query_start_loc"], positions, table, table.stride(0),
            t["slot_mapping"], KV_CACHE_BLOCK_SIZE=BLOCK_SIZE, TOTAL_CP_WORLD_SIZE=1,
            TOTAL_CP_RANK=0, CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=PAD_ID, BLOCK_SIZE=self._block,
        )  # fmt: skip
