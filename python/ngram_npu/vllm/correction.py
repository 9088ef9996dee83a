"""The correction of an asynchronous V1 runner's counts, vLLM's or vLLM-Ascend's, as one operator.

After a step with drafts, the runner corrects on the device what the host assumed: some dozen small
operators in one function, a global of the runner's module, for every asynchronous method. What
follows from the counts (positions, lengths, slots) is in the middle of ``_prepare_inputs``, where
no plugin reaches: docs/design/upstream.md.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ngram_npu import _library
from ngram_npu.ops import correct_num_computed_tokens_
from ngram_npu.vllm.after_import import refuse, serve, unlike
from ngram_npu.vllm.options import CORRECTION

NAME = "update_num_computed_tokens_for_batch_change"
WHAT = "the correction of counts"


def install(runner: ModuleType, device: Callable[[Any], str]) -> None:
    """Replaces the function in the runner's module if the environment asks for it, and logs one
    line. Never raises; may be called again.

    Args:
        device: the type of the runner's device, from its module.
    """
    refused = f" for {WHAT}, which is left as it is"
    wish = os.environ.get(CORRECTION, "0")
    if wish not in ("0", "1"):
        refuse(refused, f"{CORRECTION}: expected 0 or 1, got {wish!r}")
    elif wish == "1":
        serve(runner.__name__, functools.partial(_replace, device=device), WHAT, refused)


def _replace(runner: Any, device: Callable[[Any], str]) -> str | None:
    ours = update_num_computed_tokens_for_batch_change
    theirs = getattr(runner, NAME, None)
    if theirs is ours:
        return None
    if doubt := unlike(NAME, theirs, ours):
        return doubt
    if not _library.has_kernel("correct_num_computed_tokens_", kind := device(runner)):
        return f"there is no kernel for {kind!r}"
    setattr(runner, NAME, ours)
    return ""


def update_num_computed_tokens_for_batch_change(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    """``correct_num_computed_tokens_`` under the name and with the arguments of vLLM's function."""
    correct_num_computed_tokens_(
        num_computed_tokens,
        num_accepted_tokens,
        prev_positions=prev_positions,
        num_sampled_prev=valid_sampled_token_count.int(),  # int64 from some of Ascend's drafters
        num_draft_prev=prev_num_draft_tokens,
        host_num_computed_tokens=cpu_num_computed_tokens,
    )
