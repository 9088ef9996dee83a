"""Tests the fit of draft costs, on conversations with known probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import make_record, make_token_request
from ngram_npu.config import default_match_costs

from tools import fit_draft_costs
from tools.fit_draft_costs import (
    CellCounts,
    count_by_match,
    count_by_table,
    fit_costs,
    fit_match_costs,
    fit_store_costs,
)

ONE_BIT = 16  # the cost of a token that is accepted with probability 1/2


def make_coin_turn(num_words: int) -> tuple[list[int], list[int]]:
    """Returns prompt and completion. The prompt consists of words that occur once. For every third
    word, the completion has the word, every second time also the next word, then an unknown
    word."""
    prompt = list(range(num_words))
    completion = [-1]
    for word in range(0, num_words - 2, 3):
        completion += [word, word + 1] if word % 2 else [word]
        completion.append(num_words + word)
    return prompt, [token % (3 * num_words) for token in completion]


def test_row_table_counts_drafts_by_match_and_position() -> None:
    counts, _ = count_by_table([make_token_request([make_coin_turn(302)])])
    # After one copied word, the next word is right every second time. After two copied words, the
    # third is never right: it is drafted once as the second token of a draft and once as the first.
    assert (counts.num_drafted[1, 0], counts.num_accepted[1, 0], counts.num_drafted[2, 0]) == (
        100,
        50,
        100,
    )
    assert (counts.num_drafted.sum(), counts.num_accepted.sum()) == (200, 50)
    by_match = count_by_match([make_token_request([make_coin_turn(302)])])
    assert by_match.num_drafted[:, 0].tolist() == counts.num_drafted.sum(axis=1).tolist()
    costs = fit_costs([count_by_table([make_token_request([make_coin_turn(30_002)])])[0]])
    assert costs[1, 0] == ONE_BIT
    assert costs[2, 0] > 7 * ONE_BIT


def test_store_table_counts_drafts_of_the_store() -> None:
    """The second request repeats the first request's words and ends with another word."""
    words = list(range(10, 20))
    turns = (([1, 2], words), ([3], [*words[:6], 99, 100]))
    requests = [make_token_request([turn]) for turn in turns]
    counts = count_by_table(requests)[1]
    # The last word is never stored, because no step comes after it. After each of six words, the
    # rest of the text is drafted; the first wrong token is the same each time.
    num_drafted, num_accepted = np.zeros((16, 56)), np.zeros((16, 56))
    for m in range(1, 7):
        num_drafted[m, 32] += 1
        num_accepted[m, 32] += m < 6
        for row in range(m + 1, 7):
            num_drafted[row, 0] += 1
            num_accepted[row, 0] += row < 6
    assert np.array_equal(counts.num_drafted, num_drafted)
    assert np.array_equal(counts.num_accepted, num_accepted)


def test_sets_have_equal_weight_and_empty_cells_cost_as_much_as_their_neighbours() -> None:
    num_drafted = np.zeros((16, 32), np.int64)
    num_drafted[5, 9] = 1_000_000
    assert (
        fit_costs(
            [CellCounts(num_drafted, num_drafted), CellCounts(num_drafted // 100, num_drafted * 0)]
        )[5, 9]
        == ONE_BIT
    )
    costs = fit_costs([CellCounts(num_drafted, num_drafted // 4)])
    assert costs[4, 9] == costs[6, 31] == costs[5, 1] == 2 * ONE_BIT
    assert costs[5, 8] == costs[8, 9] == ONE_BIT  # no neighbour has counts
    num_drafted = np.zeros((16, 56), np.int64)
    num_drafted[5, 32 + 4 * 2 + 1] = num_drafted[7, 3] = 1_000_000
    costs = fit_store_costs([CellCounts(num_drafted, num_drafted // 4)])
    assert costs.shape == (16, 56)
    assert costs[5, 32 + 4 * 2 + 1] == costs[7, 3] == 2 * ONE_BIT
    assert costs[6, 32 + 4 * 3 + 2] == costs[4, 32 + 4 + 0] == 2 * ONE_BIT, "one range apart"
    assert costs[5, 32 + 4 * 4 + 1] == costs[7, 32] == costs[9, 3] == ONE_BIT, "no neighbour"
    num_drafted = np.zeros((16, 1), np.int64)
    num_drafted[5], num_drafted[7] = 1_000_000, 1_000_000
    costs = fit_match_costs(
        [CellCounts(num_drafted, num_drafted // [[1 + (m == 5) * 3] for m in range(16)])]
    )
    assert costs.shape == default_match_costs().shape == (16,)
    assert costs[0] == 255, "no match"
    assert (costs[5], costs[7], costs[6]) == (2 * ONE_BIT, 0, ONE_BIT)


def test_command_writes_tables_and_the_sources_of_the_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(make_record([make_coin_turn(302)], "coin"))
    data, output, second_output = (tmp_path / n for n in ("own.jsonl", "costs.json", "other.json"))
    data.write_text(f"{line}\n{line}\n")
    arguments = ["--tokenizer=bytes", "--data", str(data)]
    assert fit_draft_costs.main([*arguments, "--output", str(output)]) == 0
    comparison = ["--output", str(second_output), "--compare", str(output)]
    assert fit_draft_costs.main([*arguments, *comparison]) == 0
    assert json.loads(second_output.read_text())["mean_difference_from_another_fit"] == 0
    table = json.loads(output.read_text())
    assert np.array(table["store"]).shape == (16, 56)
    assert table["sets"]["own"]["store_draft_tokens_observed"] == 0
    assert table["sets"]["own"]["conversations"] == 1
    assert table["command"] == "python -m tools.fit_draft_costs --tokenizer=bytes"
    matches = json.loads(output.with_name("match_costs.json").read_text())
    assert matches["command"] == table["command"]
    assert matches["match"][1] == ONE_BIT
    data.unlink()
    assert fit_draft_costs.main(arguments) == 2
    assert "own.jsonl" in capsys.readouterr().err
