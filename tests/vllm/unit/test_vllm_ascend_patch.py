"""The patch of docs/guides/ascend.md for vLLM-Ascend's runner: its code is run as it stands, on CPU
tensors, with a stand-in for the runner."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

GUIDE = Path(__file__).parents[3] / "docs/guides/ascend.md"
REQUESTS, TOKENS, BLOCKS, BLOCK = 6, 40, 16, 4


def _patch() -> str:
    _, _, section = GUIDE.read_text(encoding="utf-8").partition("## A patch for async")
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found
    return found[1]


class _Buffer:
    """Like the runner's: a host tensor and its copy on the device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.cpu, self.gpu = values, torch.zeros_like(values)

    def copy_to_gpu(self, count: int | None = None) -> None:
        self.gpu[:count] = self.cpu[:count]


class _Table:
    is_mamba_group = False
    block_size = BLOCK
    blocks_per_phys_block = 2
    max_num_batched_tokens = TOKENS

    def __init__(self, draw: np.random.Generator) -> None:
        self.block_table = _Buffer(torch.from_numpy(draw.permutation(96).reshape(6, 16)).int())
        self.block_table.copy_to_gpu()
        # Longer than the batch's tokens: a drafter's additions follow them.
        self.slot_mapping = _Buffer(torch.full((TOKENS + 5,), 7, dtype=torch.int32))
        self.slot_mapping.copy_to_gpu()

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        slots = self.slot_mapping.gpu
        slots[len(positions) : TOKENS] = -1
        for i in range(num_reqs):
            for n in range(int(query_start_loc[i]), int(query_start_loc[i + 1])):
                block, place = divmod(int(positions[n]), BLOCK)
                slots[n] = self.block_table.gpu[i, block] * BLOCK + place


def _step(draw: np.random.Generator) -> dict[str, Any]:
    """A step of four requests after one of six, two tables and a mamba group's."""
    num_reqs = 4
    scheduled = draw.integers(1, 6, num_reqs)
    prev = draw.permutation(REQUESTS)[:num_reqs]
    prev[draw.random(num_reqs) < 0.3] = -1
    drafts = draw.integers(0, 5, REQUESTS)
    tables = [_Table(draw), _Table(draw)]
    runner = SimpleNamespace(
        use_async_spec_decode=True,
        input_batch=SimpleNamespace(
            block_table=SimpleNamespace(
                block_tables=[SimpleNamespace(is_mamba_group=True), *tables]
            )
        ),
        num_computed_tokens=torch.from_numpy(draw.integers(0, 40, REQUESTS)).int(),
        num_accepted_tokens=_Buffer(torch.ones(REQUESTS, dtype=torch.int32)),
        prev_positions=_Buffer(torch.from_numpy(np.pad(prev, (0, 2)))),
        prev_num_draft_tokens=_Buffer(torch.from_numpy(drafts).int()),
        positions=torch.full((TOKENS,), 99),
        seq_lens=torch.full((REQUESTS,), 99, dtype=torch.int32),
        query_start_loc=_Buffer(torch.from_numpy(np.pad(scheduled.cumsum(), (1, 2))).int()),
    )
    runner.query_start_loc.copy_to_gpu()
    return {
        "torch": torch,
        "self": runner,
        "num_reqs": num_reqs,
        "total_num_scheduled_tokens": int(scheduled.sum()),
        "prev_req_id_to_index": {"request": 0},
        "prev_positions_gpu": None,
        "valid_sampled_token_count_gpu": torch.from_numpy(draw.integers(1, drafts + 2)),
        "computed_token_tensor_cpu": torch.from_numpy(draw.integers(0, 40, num_reqs)).int(),
    }


def _expected(step: dict[str, Any]) -> list[list[int]]:
    """Counts, lengths, positions and each table's slots, request by request."""
    runner, num_reqs = step["self"], step["num_reqs"]
    old = runner.num_computed_tokens.tolist()
    computed, lengths, positions = list(old), [0] * REQUESTS, [99] * TOKENS
    offsets = runner.query_start_loc.gpu.tolist()
    for i in range(num_reqs):
        p = int(runner.prev_positions.cpu[i])
        computed[i] = int(step["computed_token_tensor_cpu"][i])
        if p >= 0 and runner.prev_num_draft_tokens.cpu[p] > 0:
            computed[i] = old[p] + int(step["valid_sampled_token_count_gpu"][p])
        lengths[i] = computed[i] + offsets[i + 1] - offsets[i]
        for n in range(offsets[i], offsets[i + 1]):
            positions[n] = computed[i] + n - offsets[i]
    total = step["total_num_scheduled_tokens"]
    slots = []
    for table in runner.input_batch.block_table.block_tables[1:]:
        table.compute_slot_mapping(num_reqs, offsets, torch.tensor(positions[:total]))
        slots.append(table.slot_mapping.gpu.tolist())
        table.slot_mapping.copy_to_gpu()
    return [computed, lengths, positions, *slots]


def _got(step: dict[str, Any]) -> list[list[int]]:
    runner = step["self"]
    tables = runner.input_batch.block_table.block_tables[1:]
    return [
        runner.num_computed_tokens.tolist(),
        runner.seq_lens.tolist(),
        runner.positions.tolist(),
        *(table.slot_mapping.gpu.tolist() for table in tables),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_step_with_the_patch(seed: int) -> None:
    step = _step(np.random.default_rng(seed))
    expected = _expected(step)
    exec(_patch(), step)
    assert step["corrects"]
    assert _got(step) == expected


def test_a_patch_that_takes_other_counts_is_noticed() -> None:
    """The number of drafts in place of the number accepted."""
    counts = "valid_sampled_token_count_gpu.int()"
    assert counts in _patch()
    wrong = _patch().replace(counts, "self.prev_num_draft_tokens.gpu")
    differs = 0
    for seed in range(20):
        step = _step(np.random.default_rng(seed))
        expected = _expected(step)
        exec(wrong, step)
        differs += _got(step) != expected
    assert differs > 10


@pytest.mark.parametrize(
    "unlike",
    [{"prev_req_id_to_index": None}, {"valid_sampled_token_count_gpu": None}, {"dcp_manager": 1}],
    ids=lambda unlike: next(iter(unlike)),
)
def test_a_step_that_is_not_corrected(unlike: dict[str, Any]) -> None:
    step = _step(np.random.default_rng(0))
    for name, value in unlike.items():
        if name == "dcp_manager":
            setattr(step["self"], name, value)
        else:
            step[name] = value
    before = _got(step)
    exec(_patch(), step)
    assert not step["corrects"]
    assert _got(step) == before
