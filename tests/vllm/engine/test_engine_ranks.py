"""Two tensor-parallel ranks of the V1 runner, each of which makes the model's drafts itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_engine_processes import PLAIN, serve

if TYPE_CHECKING:
    from conftest import Runs

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "method", ["store_padded", pytest.param("padded", marks=pytest.mark.prove)]
)
def test_both_draft_alike_and_one_speaks(model: Path, runs: Runs, method: str) -> None:
    result, log = serve(
        model,
        method,
        {"tensor_parallel_size": 2, "worker_cls": "noting_workers.NotingWorker"},
        NGRAM_NPU_VLLM="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # fewer NUMA nodes than ranks
        asynchronous=True,
    )
    expected = runs("none", "greedy").outputs
    assert result["token_ids"] == [expected[i][0].token_ids for i in PLAIN]
    first, second = re.findall(r"DRAFTED (\w{64} \d{2,})", log)
    assert first == second
    assert log.count("drafts for this engine (method ngram_gpu)") == 1
    assert "not enabled" not in log
