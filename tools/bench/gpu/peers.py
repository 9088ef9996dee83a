"""vLLM's device code as contestants: what its runners call in each step, on prepared tensors. vLLM
need not be importable: this module replaces what its files import and need."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from tools.bench.data import Workload
from tools.bench.gpu.ours import Correction, GpuContestant, by_count
from tools.bench.ops.spec_state import BLOCK_SIZE, PAD_ID
from tools.bench.options import Options, UnavailableError
from tools.bench.stand_ins import Given
from tools.bench.stats import Drafts
from tools.bench.vllm_peer import folder_of, proposer_config, take, version_in

_VOCAB = 1 << 30
"""Above every id of any workload, so that all sampled tokens count."""


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def given() -> Given:
    return {
        "vllm.config": {
            "CompilationConfig": SimpleNamespace,
            "VllmConfig": SimpleNamespace,
            "CompilationMode": SimpleNamespace(VLLM_COMPILE="vllm"),
            "CUDAGraphMode": SimpleNamespace(NONE="none"),
        },
        "vllm.compilation.decorators": {"support_torch_compile": _support_torch_compile},
        "vllm.forward_context": {"set_forward_context": _no_context},
        "vllm.v1.utils": {"record_function_or_nullcontext": _no_context},
        "vllm.platforms": {"current_platform": SimpleNamespace(simple_compile_backend="inductor")},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": PAD_ID},
        "vllm.triton_utils": _triton_utils(),
    }


def _no_context(*_: Any, **__: Any) -> Any:
    return nullcontext()


def _triton_utils() -> dict[str, Any]:
    if not has_triton():
        return {"HAS_TRITON": False, "triton": SimpleNamespace(jit=_not_compiled)}
    import triton
    import triton.language as tl

    return {"HAS_TRITON": True, "triton": triton, "tl": tl}


def _not_compiled(function: Any = None, **_: Any) -> Any:
    """``triton.jit`` where there is no Triton, with and without arguments."""
    return _not_compiled if function is None else function


def _support_torch_compile() -> Callable[[type], type]:
    """Compiles ``forward`` as vLLM does: as one graph, with the first dimension of each tensor
    dynamic and with the options of the module's own configuration. On the CPU it runs uncompiled.
    Two parts of vLLM's wrapper are left out: the cache of compiled artifacts, and the removal of
    guards, whose host time does not show in a graph's replay."""

    def decorate(cls: type) -> type:
        plain_init = cls.__init__  # type: ignore[misc]

        def __init__(self: Any, *, vllm_config: Any, prefix: str = "", **rest: Any) -> None:  # noqa: N807
            plain_init(self, vllm_config=vllm_config, prefix=prefix, **rest)
            options = vllm_config.compilation_config.inductor_compile_config
            self._compiled = torch.compile(self.forward, fullgraph=True, options=options)

        def __call__(self: Any, *tensors: torch.Tensor) -> Any:  # noqa: N807
            if tensors[0].device.type == "cpu":
                return self.forward(*tensors)
            for tensor in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return self._compiled(*tensors)

        cls.__init__ = __init__  # type: ignore[misc]
        cls.__call__ = __call__  # type: ignore[operator]
        return cls

    return decorate


def _taken(options: Options, name: str) -> Any:
    return take(folder_of(options.vllm_path), name, given)


def _version(options: Options) -> str:
    return version_in(folder_of(options.vllm_path))


@functools.lru_cache(maxsize=1)
def _proposer(options: Options, capacity: int, batch: int) -> Any:
    """V1's proposer, shared by both contestants: compiles for up to a minute and has no state."""
    proposer = _taken(options, "NgramProposerGPU")
    return proposer(proposer_config(options, capacity, batch), torch.device(options.device))


class V1(GpuContestant):
    """``update_token_ids_ngram`` and ``propose`` of the V1 runner's proposer: accept, append and
    draft. The runner uploads the lengths; here they are on the device already."""

    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match_policy != "earliest":
            raise UnavailableError("vLLM's V1 proposer knows the earliest match only")
        super().__init__(workload, options)
        self._proposer = _proposer(options, self.capacity, self.batch)
        self._proposer.device = self.token_ids.device
        self._batch = SimpleNamespace(num_reqs=self.batch, vocab_size=_VOCAB)
        self._none = torch.zeros(self.batch, dtype=torch.bool, device=self.device)
        self.semantics = (options.min_n, options.max_n, options.k, "earliest")
        self.detail = f"{_version(options)} NgramProposerGPU: update_token_ids_ngram and propose"

    def step(self, number: int) -> Any:
        lengths = self.lengths[number]
        _, counts, sampled = self._proposer.update_token_ids_ngram(
            self.sampled[number], self._batch, self.token_ids, lengths, self._none
        )
        return self._proposer.propose(self.options.k, lengths, self.token_ids, sampled, counts)

    def drafts(self, result: Any) -> Drafts:
        return by_count(*result)


class V1Kernel(V1):
    """Drafting only: the compiled kernel alone."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._all = torch.ones(self.batch, dtype=torch.bool, device=self.device)
        self.detail = self.detail.partition(":")[0].replace("ProposerGPU", "GPUKernel, compiled")

    def step(self, number: int) -> Any:
        return self._proposer.kernel(self.lengths[number + 1], self.token_ids, self._all)


class V2(GpuContestant):
    """The V2 runner's speculator: its two Triton kernels. It only drafts: the runner appends
    the sampled tokens in a separate kernel, which is not measured here. It supports one policy,
    the latest match, and takes part only with that one."""

    def __init__(self, workload: Workload, options: Options) -> None:
        if not has_triton():
            raise UnavailableError("Triton is not installed")
        super().__init__(workload, options)
        self._state = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.token_ids), total_len=SimpleNamespace(gpu=None)
        )
        config = proposer_config(options, self.capacity, self.batch)
        speculator = _taken(options, "NgramGPUSpeculator")
        self._speculator = speculator(config, torch.device(self.device), self._state)
        order = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        self._input_batch = SimpleNamespace(num_reqs=self.batch, idx_mapping=order)
        self._counts = torch.ones(self.batch, dtype=torch.int32, device=self.device)
        # Its filling of unused places, so that they can be told from drafts.
        self._last = torch.full((self.batch, 1), -1, dtype=torch.int64, device=self.device)
        self.semantics = (options.min_n, options.max_n, options.k, "latest")
        self.detail = f"{_version(options)} NgramGPUSpeculator.propose: scan and finalize kernels"

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


class VllmAscend(GpuContestant):
    """The launcher of vLLM-Ascend's Triton kernel, from an installed vLLM-Ascend."""

    def __init__(self, workload: Workload, options: Options) -> None:
        try:
            from vllm_ascend.ops.triton.spec_decode.ngram import triton_ngram_spec_decode
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        if options.match_policy != "earliest":
            raise UnavailableError("vLLM-Ascend's kernel knows the earliest match only")
        super().__init__(workload, options)
        self._launch = functools.partial(
            triton_ngram_spec_decode,
            vocab_size=_VOCAB, min_n=options.min_n, max_n=options.max_n, k=options.k,
        )  # fmt: skip
        self._discard = torch.zeros(self.batch, dtype=torch.bool, device=self.device)
        self.semantics = (options.min_n, options.max_n, options.k, "earliest")
        self.detail = "vllm_ascend's triton_ngram_spec_decode"

    def step(self, number: int) -> Any:
        lengths, sampled = self.lengths[number], self.sampled[number]
        return self._launch(self.token_ids, lengths, sampled, self._discard)

    def drafts(self, result: Any) -> Drafts:
        _, ids, counts, _ = result
        return by_count(ids, counts)


class VllmCorrection(Correction):
    """What the V1 runner does between two forward passes: the compiled correction, the positions
    and the lengths by indexing, the slot mapping kernel. The uploads before that are left out."""

    def __init__(self, workload: Workload, options: Options) -> None:
        if not has_triton():
            raise UnavailableError("Triton is not installed")
        super().__init__(workload, options)
        self._correct = _taken(options, "update_num_computed_tokens_for_batch_change")
        kernel = _taken(options, "ComputeSlotMappingKernel")
        self._kernel, self._block = kernel.kernel, kernel.triton_block_size
        tokens = len(self.tensors["positions"])
        width = options.k + 1
        places = torch.arange(tokens, device=self.device)
        self._request = places // width
        self._place = places % width
        self._scheduled = torch.full((self.batch,), width, dtype=torch.int32, device=self.device)
        self.detail = (
            f"{_version(options)} update_num_computed_tokens_for_batch_change, positions and "
            "seq_lens by indexing, ComputeSlotMappingKernel"
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
