"""Engines in processes of their own: as deployed, and with speculators that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import mutant
import pytest
import v2_runs
from processes import SERVE, Process
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from conftest import Runs

DEPLOYED = [0, 5, 6, 11]  # requests without further conditions

Started = dict[str, tuple[dict[str, Any], str]]
"""Result and log of each process."""


@pytest.fixture(scope="module")
def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Both kinds at once, since starting takes most of their time."""
    logs = tmp_path_factory.mktemp("logs")
    requests = v2_runs.requests(AutoTokenizer.from_pretrained(model))
    served = Process(
        logs / "served",
        SERVE,
        model,
        v2_runs.METHODS["async-index"].arguments,
        [(requests[i][0], requests[i][1].max_tokens) for i in DEPLOYED],
        NGRAM_NPU_VLLM="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_LOGGING_LEVEL="DEBUG",
    )
    mutants = Process(logs / "mutants", mutant.__file__, model)
    return {"mutants": mutants.result(), "served": served.result()}


def test_spawned_workers_have_it_by_its_entry_point(started: Started, runs: Runs) -> None:
    result, log = started["served"]
    expected = runs("none").outputs
    assert result["token_ids"] == [expected[i][0] for i in DEPLOYED]
    (line,) = [line for line in log.splitlines() if "drafts for this engine" in line]
    assert "MainProcess" not in line
    assert "(method ngram_gpu, V2 runner): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "match_policy=latest" in line
    assert "engine=index" in line
    assert "not enabled" not in log
    assert "Batch queue is enabled with size 2" in log
    assert log.count("ngram_npu acceptance: by match length ") == 1  # as the worker ended


def test_without_a_fault_nothing_is_noticed(started: Started, runs: Runs) -> None:
    end = started["mutants"][0]["no_fault"]
    assert end["status"] == 0
    assert end["result"]["mismatches"] == []
    assert end["result"]["state_changes"] == 0
    assert end["result"]["partly_accepted"] > 0
    expected = runs("none").outputs[: mutant.REQUESTS]
    assert [tuple(output) for output in end["result"]["outputs"]] == expected


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [("num_rejected_off_by_one", "mismatches"), ("history_overwritten", "state_changes")],
)
def test_wrong_drafts_and_writes_are_noticed(started: Started, fault: str, noticed: str) -> None:
    end = started["mutants"][0][fault]
    assert end["status"] == 0
    assert end["result"][noticed]


@pytest.mark.parametrize("fault", ["int32_drafts", "one_token_too_many"])
def test_drafts_of_another_kind_end_the_engine(started: Started, fault: str) -> None:
    end = started["mutants"][0][fault]
    assert end["status"] != 0
    assert end["result"] == {}
