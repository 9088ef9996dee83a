"""The fit of the costs, on conversations whose probabilities are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ngram_npu.config import default_match_costs
from ngram_npu_cli.replay import TokenRequest, TokenTurn

from tools import fit_costs
from tools.fit_costs import Observed, by_match, fit, fit_match, fit_store, in_tables

HALF = 16  # a cost: one bit


def coin(words: int) -> tuple[list[int], list[int]]:
    """Prompt and completion. The prompt is words that occur once. The completion takes every third
    of them. Every second time the next word follows, then a word that never occurred."""
    prompt = list(range(words))
    completion = [-1]
    for taken in range(0, words - 2, 3):
        completion += [taken, taken + 1] if taken % 2 else [taken]
        completion.append(words + taken)
    return prompt, [token % (3 * words) for token in completion]


def observed(words: int) -> Observed:
    prompt, completion = coin(words)
    turn = TokenTurn(np.array(prompt, np.int32), np.array(completion, np.int32))
    return in_tables([TokenRequest("coin", (turn,))])[0]


def test_what_is_observed() -> None:
    found = observed(302)
    # After one word: its follower, right every second time. After two: the third, never right;
    # drafted once as a second token and once as a first one.
    assert found.tried[1, 0] == 100
    assert found.right[1, 0] == 50
    assert found.tried[2, 0] == 100
    assert found.tried.sum() == 200
    assert found.right.sum() == 50


def test_the_costs_of_known_probabilities() -> None:
    costs = fit([observed(30_002)])
    assert costs[1, 0] == HALF
    assert costs[2, 0] > 7 * HALF


def test_sets_weigh_the_same_whatever_their_length() -> None:
    tried = np.zeros((16, 32), np.int64)
    tried[5, 9] = 1_000_000
    tried[5, 7] = 10_000
    always, never = Observed(tried, tried), Observed(tried // 100, tried * 0)
    costs = fit([always, never])
    assert costs[5, 9] == HALF


def test_an_empty_cell_costs_what_its_neighbours_do() -> None:
    tried = np.zeros((16, 32), np.int64)
    tried[5, 9] = 1_000_000
    costs = fit([Observed(tried, tried // 4)])
    for neighbour in (costs[4, 9], costs[6, 31], costs[5, 1]):
        assert neighbour == 2 * HALF
    assert costs[5, 8] == costs[8, 9] == HALF  # nothing near: as likely as not


def said(prompt: list[int], completion: list[int]) -> TokenRequest:
    turn = TokenTurn(np.array(prompt, np.int32), np.array(completion, np.int32))
    return TokenRequest("said", (turn,))


def test_what_a_store_drafts_is_observed() -> None:
    """The second request repeats the first one's words and ends with another word."""
    words = list(range(10, 20))
    found = in_tables([said([1, 2], words), said([3], [*words[:6], 99, 100])])[1]
    # The last word is never entered: no step comes after it. After each of six words, the rest of
    # the text is drafted; the first wrong token is the same each time.
    tried, right = np.zeros((16, 56)), np.zeros((16, 56))
    for m in range(1, 7):
        tried[m, 32] += 1
        right[m, 32] += m < 6
        for row in range(m + 1, 7):
            tried[row, 0] += 1
            right[row, 0] += row < 6
    assert np.array_equal(found.tried, tried)
    assert np.array_equal(found.right, right)


def test_a_store_s_costs_of_known_probabilities() -> None:
    tried = np.zeros((16, 56), np.int64)
    tried[5, 32 + 4 * 2 + 1] = tried[7, 3] = 1_000_000
    costs = fit_store([Observed(tried, tried // 4)])
    assert costs.shape == (16, 56)
    assert costs[5, 32 + 4 * 2 + 1] == costs[7, 3] == 2 * HALF
    assert costs[6, 32 + 4 * 3 + 2] == costs[4, 32 + 4 + 0] == 2 * HALF, "a step apart"
    assert costs[5, 32 + 4 * 4 + 1] == costs[7, 32] == costs[9, 3] == HALF, "nothing near"


def test_costs_by_match_alone() -> None:
    tried = np.zeros((16, 1), np.int64)
    tried[5], tried[7] = 1_000_000, 1_000_000
    costs = fit_match([Observed(tried, tried // [[1 + (m == 5) * 3] for m in range(16)])])
    assert costs.shape == (16,)
    assert costs[0] == 255, "no match"
    assert (costs[5], costs[7], costs[6]) == (2 * HALF, 0, HALF)
    found = by_match([said(*coin(302))])
    assert found.tried[:, 0].tolist() == observed(302).tried.sum(axis=1).tolist()


def test_the_packaged_tables_have_their_sizes() -> None:
    assert default_match_costs().shape == (16,)
    table = json.loads(fit_costs.TABLE.read_text())
    assert np.array(table["row"]).shape == (16, 32)
    assert np.array(table["store"]).shape == (16, 56)


def test_the_command_writes_a_table_that_says_where_it_is_from(tmp_path: Path) -> None:
    prompt, completion = coin(302)
    turn = {"prompt_token_ids": prompt, "completion_token_ids": completion}
    line = json.dumps({"id": "coin", "turns": [turn]})
    data, output = tmp_path / "own.jsonl", tmp_path / "costs.json"
    data.write_text(f"{line}\n{line}\n")
    assert fit_costs.main(["--tokenizer=bytes", "--data", str(data), "--output", str(output)]) == 0
    table = json.loads(output.read_text())
    compared = ["--tokenizer=bytes", "--data", str(data), "--output", str(data.with_suffix(".2"))]
    assert fit_costs.main([*compared, "--compare", str(output)]) == 0
    again = json.loads(data.with_suffix(".2").read_text())
    assert again["mean_difference_from_another_fit"] == 0
    assert np.array(table["store"]).shape == (16, 56)
    assert table["sets"]["own"]["store_draft_tokens_observed"] == 0
    assert table["sets"]["own"]["conversations"] == 1
    assert table["command"] == "python -m tools.fit_costs --tokenizer=bytes"
    matches = json.loads(output.with_name("match_costs.json").read_text())
    assert matches["command"] == table["command"]
    assert matches["match"][1] == HALF


def test_missing_data_is_an_error_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tokenizer=bytes", "--data", str(tmp_path / "none.jsonl")]
    assert fit_costs.main(arguments) == 2
    assert "none.jsonl" in capsys.readouterr().err
