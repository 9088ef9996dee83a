"""Configurations of vLLM's with our options."""

from __future__ import annotations

from typing import Any

from vllm_config import vllm_config


def config(
    *,
    method: str = "ngram_gpu",
    lookup: tuple[int, int] = (2, 4),
    k: int = 4,
    rows: int = 8,
    length: int = 64,
    vocabulary: int = 100,
    rank: int = 0,
    ranks: int = 1,
    **options: Any,
) -> Any:
    """The lookup is vLLM's, which drops it for a custom class: there it is an option of ours."""
    bounds = {"prompt_lookup_min": lookup[0], "prompt_lookup_max": lookup[1]}
    own = method == "custom_class"
    made = vllm_config(
        k=k,
        max_model_len=length,
        max_num_seqs=rows,
        rank=rank,
        tensor_parallel_size=ranks,
        additional_config={"ngram_npu": {**(bounds if own else {}), **options}},
        **({} if own else {"method": method, **bounds}),
    )
    made.model_config.get_vocab_size = lambda: vocabulary
    return made
