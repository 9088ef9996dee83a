"""Repairs of vLLM's CPU platform (0.32.0) for V1's runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils


def repair_platform() -> None:
    """Applies all repairs. Call this function before numba is imported. A worker searches all
    loaded modules when it starts, and fails on a module of numba, so the search is made here."""
    cpu_triton_utils._expand_kernel_impl = _expand_values  # before vLLM registers the function
    current_platform.register_triton_kernel_overrides()
    # A worker calls this method when it starts.
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

    import vllm.v1.worker.cpu.shm  # noqa: F401, replaces events and streams

    zeros = torch.zeros
    torch.zeros = lambda *a, pin_memory=False, **kw: zeros(*a, **kw)


def _expand_values(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    *_: Any,
    **__: Any,
) -> None:
    """Writes each request's value to all of its positions in `output`. vLLM's function writes to a
    temporary copy instead, so temperature, top_k and top_p would be uninitialized memory."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts))
