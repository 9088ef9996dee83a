"""Mends two faults of vLLM's CPU platform (0.32.0) that have nothing to do with who drafts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils


def _expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    *_: Any,
    **__: Any,
) -> None:
    """Each request's value at each of its drafted positions. vLLM's writes them to a copy that is
    lost: temperature, top_k and top_p there are what memory held before."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts))


cpu_triton_utils._expand_kernel_impl = _expand

# A worker looks through all modules when it starts, and trips over numba's. What it does there
# holds for the process, so it is done before numba comes in, and once.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
