"""Replay with a store: conversations in the order of the file, turns as requests of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import InputError, ReplayFigures, ReplayOptions, ReplayReport, replay
from ngram_npu_cli.replay.simulation import TokenRequest, TokenTurn

ANSWERS = np.random.default_rng(8).permutation(4000).reshape(4, -1)[:, :60].tolist()
"""Four texts that share no token and do not repeat themselves."""


def line(turns: list[tuple[list[int], list[int]]]) -> str:
    asked = [{"prompt_token_ids": p, "completion_token_ids": c} for p, c in turns]
    return json.dumps({"id": "x", "turns": asked})


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """The third's completion repeats the first's, the fourth's prompt the second's completion."""
    path = tmp_path / "talks.jsonl"
    conversations = [
        [([9001], ANSWERS[0])],
        [([9002], ANSWERS[1]), (ANSWERS[2], [9003, 9004])],
        [([9005], ANSWERS[0])],
        [(ANSWERS[1], ANSWERS[3])],
        [([9006], ANSWERS[2])],
    ]
    path.write_text("".join(line(turns) + "\n" for turns in conversations))
    return path


def total(path: Path, **options: Any) -> ReplayFigures:
    given = {"min_draft_probability": 0.177, "tokenizer": "ids", "store": "live", **options}
    report = replay([path], ReplayOptions(**given))
    assert report.total.draft_time_ns > 0
    return dataclasses.replace(report.total, draft_time_ns=0)


def test_what_was_said_before_is_drafted(talks: Path) -> None:
    alone, live = total(talks, store=None), total(talks)
    assert alone.num_accepted_tokens == 0
    # Accepted in the third conversation, and in the fifth, which repeats the second's later prompt.
    assert live.num_accepted_tokens > 60
    assert live.num_requests == 5
    assert total(talks) == live
    assert total(talks, batch_size=5).num_accepted_tokens < live.num_accepted_tokens


def test_at_finish_it_is_the_same_where_nobody_repeats_himself(talks: Path) -> None:
    assert total(talks, store="finish") == total(talks)


def test_with_generated_text_only(talks: Path) -> None:
    live, apart = total(talks), total(talks, generated_only=True)
    assert apart.num_requests == 6
    assert apart.num_prompt_tokens == live.num_prompt_tokens + 61
    assert 20 < apart.num_accepted_tokens < live.num_accepted_tokens
    assert apart.num_tokens == live.num_tokens


def test_a_store_that_is_too_small_forgets(tmp_path: Path) -> None:
    texts = np.random.default_rng(9).permutation(30000).reshape(5, -1)[:, :1500].tolist()
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(line([([9], t)]) + "\n" for t in (*texts, texts[0])))
    assert total(path).num_accepted_tokens > 1000
    assert total(path, store_tokens=2048).num_accepted_tokens == 0


def test_turns_apart() -> None:
    turns = [
        TokenTurn(np.array(p, np.int32), np.array(c, np.int32))
        for p, c in (([1], [2, 3]), ([4], [5]))
    ]
    apart = TokenRequest("x", tuple(turns)).turns_apart()
    assert [r.tokens().tolist() for r in apart] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert [r.turns[0].prompt.tolist() for r in apart] == [[1], [1, 2, 3, 4]]


def test_own_tables(talks: Path, tmp_path: Path) -> None:
    costs, dear = tmp_path / "costs.json", np.full((16, 56), 200)
    tables = {"row": default_costs().tolist(), "store": default_store_costs().tolist()}
    costs.write_text(json.dumps(tables))
    assert total(talks, costs=costs) == total(talks)
    costs.write_text(json.dumps({**tables, "store": dear.tolist()}))
    assert total(talks, costs=costs).num_draft_tokens == 0
    costs.write_text(json.dumps({"row": tables["row"]}))
    with pytest.raises(InputError, match="no table of costs: 'store'"):
        total(talks, costs=costs)


def test_options_that_contradict_each_other(talks: Path) -> None:
    for options, message in (
        ({"min_draft_probability": None}, "store: expected None without"),
        ({"store": None, "generated_only": True}, "generated_only: expected False without a store"),
        ({"store": "now"}, "store: expected 'live', 'finish' or None"),
        ({"store_tokens": 1000}, "store_tokens: expected at least 1024"),
    ):
        with pytest.raises(InputError, match=message):
            total(talks, **options)  # type: ignore[arg-type]


def test_the_command(talks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    arguments = ["--min-draft-probability", "0.177", "--tokenizer", "ids", "--json", str(result)]
    chosen = ["--store", "finish", "--store-tokens", "8192", "--generated-only"]
    assert cli.main(["replay", str(talks), *arguments, *chosen]) == 0
    caption = capsys.readouterr().out.splitlines()[0]
    assert "store=finish of 8192 tokens, each turn a request" in caption
    assert "batch size 1," in caption
    report = ReplayReport.from_dict(json.loads(result.read_text()))
    found = {name: report.config[name] for name in ("store", "store_tokens", "generated_only")}
    assert found == {"store": "finish", "store_tokens": 8192, "generated_only": True}
    assert report.batch_size == 1
