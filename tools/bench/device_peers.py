"""Peers of the lookups on a device: vLLM's and vLLM-Ascend's Triton kernels, eager torch, and an
operation that only reads the tokens."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tools.bench.data import Workload
from tools.bench.measure import Drafts, Implementation
from tools.bench.options import Options, UnavailableError
from tools.bench.vllm_peer import (
    VOCAB_SIZE,
    define_device_modules,
    find_folder,
    load_class,
    make_config,
    read_version,
)

PLAIN_SCAN = Path(__file__).with_name("plain_scan.cu")


class _DeviceLookup(Implementation):
    """Drafts without appending: the rows already contain the new tokens of all steps, and each
    step passes the rows' lengths."""

    match_policy = ""
    """The match policy that the peer supports; empty if it supports both."""

    def __init__(self, workload: Workload, options: Options) -> None:
        if self.match_policy and options.match_policy != self.match_policy:
            policy = options.match_policy
            raise UnavailableError(f"match_policy: expected {self.match_policy}, got {policy}")
        self._options, self._batch = options, workload.size.batch
        self._token_ids, self._lengths, self._sampled = (
            torch.from_numpy(array).to(options.device)
            for array in (workload.token_ids, workload.lengths, workload.sampled)
        )
        self.semantics = (options.min_n, options.max_n, options.k, options.match_policy)

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return (self._lengths[step + 1],)

    def get_drafts(self, result: Any) -> Drafts:
        ids, counts = (tensor.tolist() for tensor in result)
        return [row[:count] for row, count in zip(ids, counts, strict=True)]


class Eager(_DeviceLookup):
    """The lookup in plain torch: each suffix is compared with the tokens at every position."""

    detail = "eager torch: comparisons of whole rows for every token of every n-gram"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._positions = torch.arange(workload.capacity, device=options.device)
        self.function = self._propose

    def _propose(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, positions, options = self._token_ids, self._positions, self._options
        is_latest = options.match_policy == "latest"
        no_match = -1 if is_latest else len(positions)
        start = lengths.long()
        for n in range(options.min_n, options.max_n + 1):
            suffix = tokens.gather(1, (lengths[:, None] - n + positions[:n]).clamp(min=0))
            num_windows = len(positions) - n + 1
            is_match = positions[:num_windows] < lengths[:, None] - n
            for j in range(n):
                is_match &= tokens[:, j : j + num_windows] == suffix[:, j : j + 1]
            match = torch.where(is_match, positions[:num_windows], no_match)
            match = match.amax(1) if is_latest else match.amin(1)
            start = torch.where(match == no_match, start, match + n)  # prefers the longer n-gram
        drafts = (start[:, None] + positions[: options.k]).clamp(max=len(positions) - 1)
        return tokens.gather(1, drafts), (lengths - start).clamp(max=options.k)


class VllmV2(_DeviceLookup):
    """The two Triton kernels of the V2 runner's speculator."""

    match_policy = "latest"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        folder = find_folder()
        ones = torch.ones(self._batch, dtype=torch.int32, device=options.device)
        self._state = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self._token_ids), total_len=SimpleNamespace(gpu=ones)
        )
        order = torch.arange(self._batch, dtype=torch.int32, device=options.device)
        self._input_batch = SimpleNamespace(num_reqs=self._batch, idx_mapping=order)
        names = ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states",
                 "num_rejected", "next_prefill_tokens", "temperature", "seeds")  # fmt: skip
        self._unused_arguments = dict.fromkeys(names)
        self._counts = ones
        # The speculator pads drafts with the last sampled token; -1 makes the padding recognizable.
        self._last_sampled = torch.full((self._batch, 1), -1, device=options.device)
        config = make_config(options, workload.capacity, self._batch)
        speculator = load_class(folder, "NgramGPUSpeculator", define_device_modules)
        try:  # Triton compiles in the first call
            self._speculator = speculator(config, torch.device(options.device), self._state)
            self._propose(self._lengths[0])
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        self.function = self._propose
        version = read_version(folder)
        self.detail = f"{version} NgramGPUSpeculator.propose: scan and finalize kernels"

    def _propose(self, lengths: torch.Tensor) -> Any:
        self._state.total_len.gpu = lengths
        return self._speculator.propose(
            self._input_batch,
            num_sampled=self._counts,
            last_sampled=self._last_sampled,
            **self._unused_arguments,
        )

    def get_drafts(self, result: Any) -> Drafts:
        return [[token for token in row if token >= 0] for row in result.tolist()]


class VllmNgramGpu(_DeviceLookup):
    """The kernel of vLLM's ``ngram_gpu``, compiled with vLLM's options. vLLM compiles the kernel
    for all batch sizes; here, it is compiled for one batch size, which does not make it slower."""

    match_policy = "earliest"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        folder = find_folder()
        all_rows = torch.ones(self._batch, dtype=torch.bool, device=options.device)
        config = make_config(options, workload.capacity, self._batch)
        try:
            proposer_class = load_class(folder, "NgramProposerGPU", define_device_modules)
            proposer = proposer_class(config, torch.device(options.device))
            inductor_options = proposer.vllm_config.compilation_config.inductor_compile_config
            known = torch._inductor.list_options()  # newer torch lacks some of vLLM's options
            kernel = torch.compile(
                proposer.kernel,
                fullgraph=True,
                dynamic=False,
                options={name: value for name, value in inductor_options.items() if name in known},
            )
            self.function = lambda lengths: kernel(lengths, self._token_ids, all_rows)
            self.function(self._lengths[0])
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        self.detail = f"{read_version(folder)} NgramProposerGPU's kernel, compiled"


class VllmAscend(_DeviceLookup):
    """The function that launches vLLM-Ascend's Triton kernel, from an installed vLLM-Ascend."""

    detail = "vllm_ascend's triton_ngram_spec_decode"
    match_policy = "earliest"

    def __init__(self, workload: Workload, options: Options) -> None:
        try:
            from vllm_ascend.ops.triton.spec_decode.ngram import triton_ngram_spec_decode
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        super().__init__(workload, options)
        no_discards = torch.zeros(self._batch, dtype=torch.bool, device=options.device)
        lookup = {"min_n": options.min_n, "max_n": options.max_n, "k": options.k}
        self.function = lambda lengths, sampled: triton_ngram_spec_decode(
            self._token_ids, lengths, sampled, no_discards, vocab_size=VOCAB_SIZE, **lookup
        )

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return self._lengths[step], self._sampled[step]

    def get_drafts(self, result: Any) -> Drafts:
        return super().get_drafts(result[1:3])


class PlainScan(_DeviceLookup):
    """A scan with one block per row and one token per load (plain_scan.cu), compiled by nvcc."""

    detail = "plain_scan.cu: one block of 256 threads per row, one token per load, no append"
    match_policy = "latest"

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if nvcc is None or options.device != "cuda":
            raise UnavailableError("nvcc and a CUDA device are required")
        self._results = tuple(
            torch.empty(shape, dtype=torch.int32, device=options.device)
            for shape in ((self._batch, options.k), (self._batch,))
        )
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "plain_scan.so"
            flags = ("-arch=native", "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC")
            subprocess.run([nvcc, *flags, PLAIN_SCAN, "-o", library], check=True)
            self._scan = ctypes.CDLL(str(library)).plain_scan
        self.function = self._propose

    def _propose(self, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options, rows = self._options, self._token_ids
        error = self._scan(
            ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(rows.stride(0)),
            ctypes.c_void_p(lengths.data_ptr()), self._batch, options.min_n, options.max_n,
            options.k, *(ctypes.c_void_p(result.data_ptr()) for result in self._results),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"plain_scan: the launch failed with CUDA error {error}")
        return self._results


class TokenReader(Implementation):
    """Reads as many tokens as a scan must read, and does nothing else."""

    detail = "torch's amax over an array of as many tokens as the rows have; one thread on a CPU"

    def __init__(self, workload: Workload, options: Options) -> None:
        num_tokens = int(workload.lengths[0].sum())
        self.function = torch.ones(num_tokens, dtype=torch.int32, device=options.device).amax

    def activate(self) -> None:
        torch.set_num_threads(1)
