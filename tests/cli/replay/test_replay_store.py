"""Tests the replay with a store: conversations in the order of the file, turns as requests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import Turns, make_record
from ngram_npu import Costs
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import ReplayFigures, ReplayOptions, replay

ANSWERS = np.random.default_rng(8).permutation(4000).reshape(4, -1)[:, :60].tolist()
"""Four texts that share no token and do not repeat themselves."""


@pytest.fixture
def logs(write_jsonl: Callable[..., Path]) -> Path:
    """The third completion repeats the first, and the fourth prompt repeats the second
    completion."""
    conversations: list[Turns] = [
        [([9001], ANSWERS[0])],
        [([9002], ANSWERS[1]), (ANSWERS[2], [9003, 9004])],
        [([9005], ANSWERS[0])],
        [(ANSWERS[1], ANSWERS[3])],
        [([9006], ANSWERS[2])],
    ]
    return write_jsonl(*map(make_record, conversations))


def replay_total(path: Path, **options: Any) -> ReplayFigures:
    defaults = {"min_draft_probability": 0.177, "tokenizer": "ids", "store": "live"}
    report = replay([path], ReplayOptions(**{**defaults, **options}))
    assert report.total.draft_time_ns > 0
    return dataclasses.replace(report.total, draft_time_ns=0)


def test_store_drafts_text_of_earlier_conversations(logs: Path) -> None:
    storeless_figures, live_figures = replay_total(logs, store=None), replay_total(logs)
    assert storeless_figures.num_accepted_tokens == 0
    # Drafts are accepted in conversation 3, and in 5, which repeats the last prompt of 2.
    assert live_figures.num_accepted_tokens > 60
    assert live_figures.num_requests == 5
    assert replay_total(logs) == live_figures
    assert replay_total(logs, batch_size=5).num_accepted_tokens < live_figures.num_accepted_tokens
    assert replay_total(logs, store="finish") == live_figures


def test_generated_only_stores_no_prompts(logs: Path) -> None:
    live_figures = replay_total(logs)
    generated_figures = replay_total(logs, generated_only=True)
    assert generated_figures.num_requests == 6
    assert generated_figures.num_prompt_tokens == live_figures.num_prompt_tokens + 61
    assert 20 < generated_figures.num_accepted_tokens < live_figures.num_accepted_tokens
    assert generated_figures.num_tokens == live_figures.num_tokens


def test_costs_file_has_tables_for_row_and_store(logs: Path, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    low_logit, high_logit = -768, 769
    for store_logit in (low_logit, high_logit):
        row, store = np.full((16, 32), low_logit), np.full((16, 56), store_logit)
        Costs(row, store, np.zeros((4096, 2), int)).save(path)
        assert (replay_total(logs, costs=path).num_accepted_tokens > 60) == (
            store_logit == high_logit
        )


def test_command_reports_store(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    arguments = ["--min-draft-probability", "0.177", "--tokenizer", "ids", "--json", str(result)]
    arguments += ["--no-overlap", "--k", "3"]
    store = ["--store", "finish", "--store-tokens", "8192", "--generated-only"]
    assert cli.main(["replay", str(logs), *arguments, *store]) == 0
    caption = capsys.readouterr().out.splitlines()[0]
    assert "store=finish of 8192 tokens, each turn is a separate request" in caption
    assert "batch size 1," in caption
    config = json.loads(result.read_text())["config"]
    store_options = (config["store"], config["store_tokens"], config["generated_only"])
    assert store_options == ("finish", 8192, True)
    assert (config["sizes"], config["k"], config["overlap"]) == ("ladder", 3, False)
