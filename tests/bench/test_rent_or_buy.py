"""What rules for indexing a row take, with costs that are easy to add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.ops.rent_or_buy import LONG, Costs

COSTS = Costs(lengths=(0, 1000), scan=(10, 10), index=(1, 1), build=1)


def test_rules_of_one_answer() -> None:
    """Nine steps, of rows of 11 to 19 tokens; the second has rented enough to buy for 12 ns."""
    expected = {"scan": 90, "index": 11 + 9, "long": 90, "rent": 10 + 12 + 8, "better": 20}
    assert COSTS.by_rule([(10, 20)], 1) == {rule: ns / 1e3 for rule, ns in expected.items()}


def test_a_row_becomes_long() -> None:
    found = COSTS.by_rule([(LONG - 2, LONG + 3)], 1)["long"]
    assert found == pytest.approx((2 * 10 + LONG + 1 + 2 * 1) / 1e3)


def test_what_is_given_between_answers_is_indexed_when_there_is_an_index() -> None:
    spans = [(10, 20), (100, 110)]
    found = COSTS.by_rule(spans, 1)
    assert found["scan"] == 0.18
    assert found["index"] == pytest.approx((11 + 18 + (101 - 19)) / 1e3)
    dear = Costs(COSTS.lengths, COSTS.scan, COSTS.index, build=100)
    assert dear.by_rule(spans, 1)["rent"] == 0.18


def test_costs_between_and_beyond_the_lengths_measured() -> None:
    costs = Costs(lengths=(0, 10, 20), scan=(0, 10, 30), index=(0, 0, 0), build=0)
    for start, ns in ((4, 5), (14, 20), (29, 50)):
        assert costs.by_rule([(start, start + 2)], 1)["scan"] == ns / 1e3


def test_it_runs(tmp_path: Path) -> None:
    ids = [1, 2, 3, 4] * 40
    turns = [
        {"prompt_token_ids": ids[:20], "completion_token_ids": ids[20:90]},
        {"prompt_token_ids": ids[90:99], "completion_token_ids": ids[99:]},
    ]
    (tmp_path / "one.jsonl").write_text(json.dumps({"id": "1", "turns": turns}))
    arguments = ["--sizes", "2x64", "2x128", "--rounds", "2", "--data-kind", "random"]
    out = tmp_path / "out.json"
    assert main(["rent-or-buy", "--data", str(tmp_path), "--json", str(out), *arguments]) == 0
    results = json.loads(out.read_text())["results"]
    assert [r["same_drafts"] for r in results[:2]] == [True, True]
    sets = {result["set"]: result["us"] for result in results[2:]}
    assert len(sets) == 12 + 3
    assert 0 < sets["made-up"]["better"] <= min(sets["made-up"]["scan"], sets["made-up"]["index"])
    assert sets["recorded turns"]["scan"] == sets["recorded conversations"]["scan"]
    assert sets["recorded turns"]["index"] > sets["recorded conversations"]["index"]
