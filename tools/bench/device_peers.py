"""Peers of the lookups on a device: vLLM's and vLLM-Ascend's Triton kernels, eager torch, and only
reading the tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tools.bench.data import Workload
from tools.bench.measure import Contestant
from tools.bench.options import Options, UnavailableError
from tools.bench.stats import Drafts
from tools.bench.vllm_peer import VOCAB, folder_of, given, proposer_config, take, version_in


class _Rows(Contestant):
    """Only drafts: the new tokens are in the rows, and lengths say where a row ends."""

    def __init__(self, workload: Workload, options: Options) -> None:
        self._options, self._batch = options, workload.size.batch
        self._token_ids, self._lengths, self._sampled = (
            torch.from_numpy(array).to(options.device)
            for array in (workload.token_ids, workload.lengths, workload.sampled)
        )
        self.semantics = (options.min_n, options.max_n, options.k, options.match_policy)

    def arguments(self, step: int) -> tuple[Any, ...]:
        return (self._lengths[step + 1],)


class Eager(_Rows):
    """What one would write in torch: each suffix compared with the tokens at every place."""

    detail = "eager torch: comparisons of whole rows for every token of every n-gram"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._places = torch.arange(workload.capacity, device=options.device)
        self.function = self._propose

    def _propose(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, places, options = self._token_ids, self._places, self._options
        latest = options.match_policy == "latest"
        none = -1 if latest else len(places)
        start = lengths.long()
        for n in range(options.min_n, options.max_n + 1):
            suffix = tokens.gather(1, (lengths[:, None] - n + places[:n]).clamp(min=0))
            windows = len(places) - n + 1
            same = places[:windows] < lengths[:, None] - n
            for j in range(n):
                same &= tokens[:, j : j + windows] == suffix[:, j : j + 1]
            at = torch.where(same, places[:windows], none)
            at = at.amax(1) if latest else at.amin(1)
            start = torch.where(at == none, start, at + n)  # a longer n-gram's match wins
        drafts = (start[:, None] + places[: options.k]).clamp(max=len(places) - 1)
        return tokens.gather(1, drafts), (lengths - start).clamp(max=options.k)

    def drafts(self, result: Any) -> Drafts:
        ids, counts = (tensor.tolist() for tensor in result)
        return [row[:count] for row, count in zip(ids, counts, strict=True)]


class VllmV2(_Rows):
    """The two Triton kernels of the V2 runner's speculator, which knows the latest match only."""

    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match_policy != "latest":
            raise UnavailableError("vLLM's V2 speculator knows the latest match only")
        folder = folder_of(options.vllm_path)
        super().__init__(workload, options)
        ones = torch.ones(self._batch, dtype=torch.int32, device=options.device)
        self._state = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self._token_ids), total_len=SimpleNamespace(gpu=ones)
        )
        order = torch.arange(self._batch, dtype=torch.int32, device=options.device)
        self._input_batch = SimpleNamespace(num_reqs=self._batch, idx_mapping=order)
        unused = ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states",
                  "num_rejected", "next_prefill_tokens", "temperature", "seeds")  # fmt: skip
        self._unused = dict.fromkeys(unused)
        self._counts = ones
        # It fills unused places with this, so that they can be told from drafts.
        self._last = torch.full((self._batch, 1), -1, device=options.device)
        config = proposer_config(options, workload.capacity, self._batch)
        speculator = take(folder, "NgramGPUSpeculator", given)
        try:  # Triton compiles in the first call
            self._speculator = speculator(config, torch.device(options.device), self._state)
            self._propose(self._lengths[0])
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        self.function = self._propose
        self.detail = f"{version_in(folder)} NgramGPUSpeculator.propose: scan and finalize kernels"

    def _propose(self, lengths: torch.Tensor) -> Any:
        self._state.total_len.gpu = lengths
        return self._speculator.propose(
            self._input_batch, num_sampled=self._counts, last_sampled=self._last, **self._unused
        )

    def drafts(self, result: Any) -> Drafts:
        return [[token for token in row if token >= 0] for row in result.tolist()]


class VllmNgramGpu(_Rows):
    """The kernel of vLLM's ``ngram_gpu``, compiled with the options that vLLM gives it. vLLM has it
    compiled for any batch size; here for this one, which is no slower. It only drafts."""

    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match_policy != "earliest":
            raise UnavailableError("vLLM's ngram_gpu knows the earliest match only")
        folder = folder_of(options.vllm_path)
        super().__init__(workload, options)
        everyone = torch.ones(self._batch, dtype=torch.bool, device=options.device)
        config = proposer_config(options, workload.capacity, self._batch)
        try:
            proposer = take(folder, "NgramProposerGPU", given)(config, torch.device(options.device))
            wanted = proposer.vllm_config.compilation_config.inductor_compile_config
            known = torch._inductor.list_options()  # use_mixed_mm is gone from newer ones
            kernel = torch.compile(
                proposer.kernel,
                fullgraph=True,
                dynamic=False,
                options={name: value for name, value in wanted.items() if name in known},
            )
            self.function = lambda lengths: kernel(lengths, self._token_ids, everyone)
            self.function(self._lengths[0])
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        self.detail = f"{version_in(folder)} NgramProposerGPU's kernel, compiled"

    def drafts(self, result: Any) -> Drafts:
        ids, counts = (tensor.tolist() for tensor in result)
        return [row[:count] for row, count in zip(ids, counts, strict=True)]


class VllmAscend(_Rows):
    """The launcher of vLLM-Ascend's Triton kernel, from an installed vLLM-Ascend."""

    detail = "vllm_ascend's triton_ngram_spec_decode"

    def __init__(self, workload: Workload, options: Options) -> None:
        try:
            from vllm_ascend.ops.triton.spec_decode.ngram import triton_ngram_spec_decode
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        if options.match_policy != "earliest":
            raise UnavailableError("vLLM-Ascend's kernel knows the earliest match only")
        super().__init__(workload, options)
        nobody = torch.zeros(self._batch, dtype=torch.bool, device=options.device)
        lookup = {"min_n": options.min_n, "max_n": options.max_n, "k": options.k}
        self.function = lambda lengths, sampled: triton_ngram_spec_decode(
            self._token_ids, lengths, sampled, nobody, vocab_size=VOCAB, **lookup
        )

    def arguments(self, step: int) -> tuple[Any, ...]:
        return self._lengths[step], self._sampled[step]

    def drafts(self, result: Any) -> Drafts:
        _, ids, counts, _ = (tensor.tolist() for tensor in result)
        return [row[:count] for row, count in zip(ids, counts, strict=True)]


class Read(Contestant):
    """Reads as many bytes as a scan must."""

    detail = "torch's amax over as many tokens as are live, one after the other"

    def __init__(self, workload: Workload, options: Options) -> None:
        live = int(workload.lengths[0].sum())
        self.function = torch.zeros(live, dtype=torch.int32, device=options.device).amax
