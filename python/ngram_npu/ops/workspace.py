"""How much workspace an operator needs."""

from __future__ import annotations

from ngram_npu import _C


def workspace_size(op: str, batch: int) -> int:
    """How many int32 items the workspace of ``op`` needs for up to ``batch`` requests.

    Make it once, zeroed, outside graph capture, one per operator and stream; every call leaves
    it zeroed. Device kernels want its memory aligned to 16 bytes, as torch's allocators give it::

        workspace = torch.zeros(
            workspace_size("ngram_step_", max_batch), dtype=torch.int32, device="cuda"
        )

    Args:
        op: an operator whose schema has a ``workspace``.
        batch: the largest number of requests in a call.

    Raises:
        ValueError: an operator without a workspace, or a negative batch.
    """
    if batch < 0:
        raise ValueError(f"workspace_size: batch: expected >= 0, got {batch}")
    size = _C.workspace_words(op, batch)
    if size < 0:
        raise ValueError(f"workspace_size: op: expected an operator with a workspace, got {op!r}")
    return size
