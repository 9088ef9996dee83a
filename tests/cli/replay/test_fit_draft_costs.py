"""The fit of draft costs, on conversations with known probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import make_record, token_request
from ngram_npu.config import default_match_costs

from tools import fit_draft_costs
from tools.fit_draft_costs import (
    Observed,
    count_by_match,
    count_by_table,
    fit,
    fit_match,
    fit_store,
)

HALF = 16  # the cost of one bit: as likely as not


def coin(words: int) -> tuple[list[int], list[int]]:
    """Returns prompt and completion. The prompt is words that occur once. The completion copies
    every third of them; every second time the next word follows, then an unknown word."""
    prompt = list(range(words))
    completion = [-1]
    for word in range(0, words - 2, 3):
        completion += [word, word + 1] if word % 2 else [word]
        completion.append(words + word)
    return prompt, [token % (3 * words) for token in completion]


def test_row_table_counts_drafts_by_match_and_position() -> None:
    counts, _ = count_by_table([token_request([coin(302)])])
    # After one word: its follower, right every second time. After two: the third, never right;
    # drafted once as a second token and once as a first one.
    assert (counts.tried[1, 0], counts.right[1, 0], counts.tried[2, 0]) == (100, 50, 100)
    assert (counts.tried.sum(), counts.right.sum()) == (200, 50)
    by_match = count_by_match([token_request([coin(302)])])
    assert by_match.tried[:, 0].tolist() == counts.tried.sum(axis=1).tolist()
    costs = fit([count_by_table([token_request([coin(30_002)])])[0]])
    assert costs[1, 0] == HALF
    assert costs[2, 0] > 7 * HALF


def test_store_table_counts_drafts_of_the_store() -> None:
    """The second request repeats the first one's words and ends with another word."""
    words = list(range(10, 20))
    requests = [token_request([([1, 2], words)]), token_request([([3], [*words[:6], 99, 100])])]
    counts = count_by_table(requests)[1]
    # The last word is never entered: no step comes after it. After each of six words, the rest of
    # the text is drafted; the first wrong token is the same each time.
    tried, right = np.zeros((16, 56)), np.zeros((16, 56))
    for m in range(1, 7):
        tried[m, 32] += 1
        right[m, 32] += m < 6
        for row in range(m + 1, 7):
            tried[row, 0] += 1
            right[row, 0] += row < 6
    assert np.array_equal(counts.tried, tried)
    assert np.array_equal(counts.right, right)


def test_sets_weigh_the_same_and_empty_cells_cost_as_much_as_their_neighbours() -> None:
    tried = np.zeros((16, 32), np.int64)
    tried[5, 9] = 1_000_000
    assert fit([Observed(tried, tried), Observed(tried // 100, tried * 0)])[5, 9] == HALF
    costs = fit([Observed(tried, tried // 4)])
    assert costs[4, 9] == costs[6, 31] == costs[5, 1] == 2 * HALF
    assert costs[5, 8] == costs[8, 9] == HALF  # nothing near
    tried = np.zeros((16, 56), np.int64)
    tried[5, 32 + 4 * 2 + 1] = tried[7, 3] = 1_000_000
    costs = fit_store([Observed(tried, tried // 4)])
    assert costs.shape == (16, 56)
    assert costs[5, 32 + 4 * 2 + 1] == costs[7, 3] == 2 * HALF
    assert costs[6, 32 + 4 * 3 + 2] == costs[4, 32 + 4 + 0] == 2 * HALF, "a step apart"
    assert costs[5, 32 + 4 * 4 + 1] == costs[7, 32] == costs[9, 3] == HALF, "nothing near"
    tried = np.zeros((16, 1), np.int64)
    tried[5], tried[7] = 1_000_000, 1_000_000
    costs = fit_match([Observed(tried, tried // [[1 + (m == 5) * 3] for m in range(16)])])
    assert costs.shape == default_match_costs().shape == (16,)
    assert costs[0] == 255, "no match"
    assert (costs[5], costs[7], costs[6]) == (2 * HALF, 0, HALF)


def test_command_writes_tables_with_their_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(make_record([coin(302)], "coin"))
    data, output, second = (tmp_path / name for name in ("own.jsonl", "costs.json", "second.json"))
    data.write_text(f"{line}\n{line}\n")
    arguments = ["--tokenizer=bytes", "--data", str(data)]
    assert fit_draft_costs.main([*arguments, "--output", str(output)]) == 0
    compared = ["--output", str(second), "--compare", str(output)]
    assert fit_draft_costs.main([*arguments, *compared]) == 0
    assert json.loads(second.read_text())["mean_difference_from_another_fit"] == 0
    table = json.loads(output.read_text())
    assert np.array(table["store"]).shape == (16, 56)
    assert table["sets"]["own"]["store_draft_tokens_observed"] == 0
    assert table["sets"]["own"]["conversations"] == 1
    assert table["command"] == "python -m tools.fit_draft_costs --tokenizer=bytes"
    matches = json.loads(output.with_name("match_costs.json").read_text())
    assert matches["command"] == table["command"]
    assert matches["match"][1] == HALF
    data.unlink()
    assert fit_draft_costs.main(arguments) == 2
    assert "own.jsonl" in capsys.readouterr().err
