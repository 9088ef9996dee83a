"""AsyncConfig: sizes that are refused, sizes at their limits, and which engine drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import KVGroup
from ngram_npu.async_state.device import StreamDevice, device_for

from async_state.small import admit, batch_of, ints, small_state


@pytest.mark.parametrize(
    "changes",
    [
        {"max_rows": 0},
        {"row_capacity": 0},
        {"max_step_tokens": 0},
        {"kv_groups": ()},
        {"kv_groups": (KVGroup(0, 1),)},
        {"slot_dtype": "int16"},
        {"kv_groups": (KVGroup(4, 1.5),)},  # type: ignore[arg-type]
        {"kv_groups": (KVGroup(2**16, 1, 2**15),)},
        {"kv_groups": (KVGroup(4, 3), KVGroup(2**20, 1)), "cp_world": 2**11},
        {"engine": "fast"},
        {"engine": "index", "ngram": NgramConfig(min_n=1, max_n=9)},
        {"engine": "scan", "ngram": NgramConfig(sizes="ladder")},
        {"token_capacity": -1},
        {"cp_world": 0},
        {"cp_rank": 1},
        {"cp_rank": -1},
        {"cp_rank": 2, "cp_world": 2},
        {"cp_interleave": 0},
        {"cp_interleave": 3, "cp_world": 2},
        {"cp_interleave": 2**30, "cp_world": 2, "kv_groups": (KVGroup(2**30, 1),)},
        {"pad_slot": 2**31, "slot_dtype": "int32"},
        {"pad_slot": -(2**63) - 1},
        {"pad_slot": 0.5},
        {"pad_token": 2**31},
        {"max_rows": 1.5},
    ],
    ids=str,
)
def test_wrong_sizes(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"AsyncConfig: {next(iter(changes))}"):
        small_state(**changes)


def test_extreme_sizes_that_the_operators_take() -> None:
    state = small_state(
        kv_groups=(KVGroup(2**30, 1), KVGroup(4, 3)), cp_interleave=3, pad_slot=2**40, max_rows=1
    )
    blocks = (ints(1), ints(0))
    inputs = state.begin_step(batch_of([0], [4], [0], new=[admit(0, block_ids=blocks)]))
    assert inputs.slot_mappings[0][:5].tolist() == [*range(2**30, 2**30 + 4), 2**40]


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        ({}, False),
        ({"row_capacity": 2049}, True),
        ({"row_capacity": 2049, "ngram": NgramConfig(min_n=1, max_n=9)}, False),
        ({"row_capacity": 2049, "engine": "scan"}, False),
        ({"engine": "index"}, True),
        ({"ngram": NgramConfig(sizes="ladder", k=2)}, True),
    ],
    ids=str,
)
def test_which_engine_drafts(changes: dict[str, Any], indexed: bool) -> None:
    assert (small_state(**changes).index is not None) == indexed


def test_a_capacity_in_tokens_bounds_the_index() -> None:
    whole, bounded = (
        small_state(engine="index", row_capacity=4096, token_capacity=tokens).index
        for tokens in (None, 100)
    )
    assert whole is not None
    assert bounded is not None
    assert bounded.nbytes < whole.nbytes


def test_a_device_without_an_index() -> None:
    class Cuda(StreamDevice):
        def __init__(self) -> None:
            self._device = torch.device("cuda")

    for config, option in (
        (NgramConfig(), "AsyncConfig: engine: expected 'auto' or 'scan'"),
        (NgramConfig(sizes="ladder"), "NgramConfig: sizes: expected 'consecutive'"),
    ):
        with pytest.raises(ValueError, match=f"^{option} on cuda: the index is in host memory"):
            Cuda().index(config, 1, 1)
    with pytest.raises(ValueError, match="draft_on: expected 'auto' or 'host' for a store on cuda"):
        Cuda().store(NgramConfig(), 1)


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="expected cpu, cuda or npu, got meta"):
        device_for("meta")
