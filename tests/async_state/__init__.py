"""Simulation tests of AsyncSpecState: a scheduler with random events, a target model that turns
every error into a wrong token, and a device that delays its work as long as streams and events
allow. This module makes a small AsyncSpecState and the arguments of its methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup


def to_ints(*values: Any) -> Any:
    return np.array(values, np.int32)


def make_small_state(runtime: Any = None, **changes: Any) -> AsyncSpecState:
    sizes: dict[str, Any] = {
        "ngram": NgramConfig(min_n=1, max_n=3, k=2),
        "max_rows": 3,
        "row_capacity": 12,
        "max_step_tokens": 16,
        "kv_groups": (KVGroup(4, 3),),
    }
    return AsyncSpecState(AsyncConfig(**{**sizes, **changes}), runtime=runtime)


def admit_row(row: int, length: int = 4, **changes: Any) -> Admission:
    blocks = to_ints(2 * row, 2 * row + 1)
    values: dict[str, Any] = {"token_ids": np.arange(length), "block_ids": (blocks,)}
    return Admission(row, **{**values, **changes})


def make_batch(rows: Any, scheduled: Any, drafts: Any, **changes: Any) -> Batch:
    return Batch(to_ints(*rows), to_ints(*scheduled), to_ints(*drafts), **changes)


def make_samples(*rows: Any) -> torch.Tensor:
    """Returns the sampler's output [B,3]; an integer is the only token of its row."""
    padded = [[row, -1, -1] if isinstance(row, int) else row for row in rows]
    return torch.tensor(padded, dtype=torch.int32).reshape(len(rows), -1)
