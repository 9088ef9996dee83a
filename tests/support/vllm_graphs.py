"""Lists the graphs that vLLM's V2 runner captures for a configuration. Uses vLLM's own code, but no
GPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


def make_graph_manager(
    k: int,
    max_num_seqs: int,
    *,
    table: Any = None,
    sizes: list[int] | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Makes vLLM's graph manager in the state after the capture of all graphs.

    Args:
        k: `num_speculative_tokens`; 0: no speculation.
        table: `num_speculative_tokens_per_batch_size`.
        sizes: `cudagraph_capture_sizes`; None: vLLM's default.
        options: Options of ngram_npu.
    """
    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    if sizes is not None:
        compilation.cudagraph_capture_sizes = sizes
    speculative = SimpleNamespace(
        num_speculative_tokens=k,
        num_speculative_tokens_per_batch_size=table,
        uses_dynamic_speculative_decoding=lambda: table is not None,
    )
    config: Any = SimpleNamespace(
        additional_config={"ngram_npu": options or {}},
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        compilation_config=compilation,
        model_config=SimpleNamespace(enforce_eager=False),
        num_speculative_tokens=k,
        performance_mode="balanced",
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
        speculative_config=speculative if k else None,
        uniform_decode_query_len=1 + k,
    )
    VllmConfig._set_cudagraph_sizes(config)
    manager: Any = object.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = config, compilation
    manager.cudagraph_mode = compilation.cudagraph_mode
    manager.decode_query_len, manager.max_num_reqs = 1 + k, max_num_seqs
    manager.varlen_decode, manager.lora_capture_cases, manager.ubatch_runner = False, [0], None
    manager._lora_dispatch_map, manager._max_lora_case = {}, 0
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


def has_full_graph(manager: Any, batch: int, length: int) -> bool:
    """Returns whether a decode step of `batch` requests with `length` draft tokens each runs as a
    full graph."""
    graph = manager.dispatch(batch, batch * (1 + length), 1 + length, 0)
    return bool(graph.cg_mode == CUDAGraphMode.FULL)


def find_largest_batches(manager: Any) -> dict[int, int]:
    """Returns by draft length the largest batch size of the captured full graphs."""
    largest_batches: dict[int, int] = {}
    for graph in manager._capture_descs[CUDAGraphMode.FULL]:
        length = graph.uniform_token_count - 1
        largest_batches[length] = max(largest_batches.get(length, 0), graph.num_reqs)
    return largest_batches


def count_full_graphs(manager: Any) -> dict[int, int]:
    """Returns the number of captured full graphs by draft length."""
    graphs = manager._capture_descs[CUDAGraphMode.FULL]
    return dict(sorted(Counter(graph.uniform_token_count - 1 for graph in graphs).items()))
