"""Makes objects with the fields of a VllmConfig that the proposers read, for tests without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def make_vllm_config(
    *,
    k: int = 4,
    additional_config: Any = None,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    rank: int = 0,
    tensor_parallel_size: int = 1,
    **speculative: Any,
) -> Any:
    lookup = {"prompt_lookup_min": 0, "prompt_lookup_max": 0}  # vLLM's values for a custom class
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            **{"num_speculative_tokens": k, **lookup, **speculative}
        ),
        additional_config={} if additional_config is None else additional_config,
        max_concurrent_batches=1,
        model_config=SimpleNamespace(
            max_model_len=max_model_len, served_model_name="model", get_vocab_size=lambda: 32000
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel_config=SimpleNamespace(
            rank=rank, tensor_parallel_size=tensor_parallel_size, data_parallel_index=0
        ),
    )
