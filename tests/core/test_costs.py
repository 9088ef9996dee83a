"""Costs fitted on logs: the file, the fit, and drafts by them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import Costs, NgramConfig, NgramProposer
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu_cli.learn.fit_draft_costs import compare, costs_of, fit, logits_of
from ngram_npu_cli.replay import InputError, TokenRequest, TokenTurn, simulate
from ngram_npu_cli.replay.walks import Counts, walks

NAME = "0123456789abcdef" * 2
LADDER: dict[str, Any] = {"sizes": "ladder", "min_draft_probability": 0.177}


def some_costs(seed: int = 3) -> Costs:
    rng = np.random.default_rng(seed)
    row, store = (rng.integers(-200, 300, (16, columns)) for columns in (32, 56))
    return Costs(row, store, rng.integers(-128, 128, (4096, 2)), NAME)


def conversations(number: int, sure: int = 0) -> list[TokenRequest]:
    """Ids of 0 to 119 in any order. Behind those that leave the remainder ``sure`` by 2 always is
    the same one, from 500 on."""
    rng = np.random.default_rng(number)
    made = []
    for i in range(number):
        ids = rng.integers(0, 120, 150)
        text = np.stack([ids, np.where(ids % 2 == sure, ids + 500, -1)], axis=1).reshape(-1)
        text = text[text >= 0].astype(np.int32)
        made.append(TokenRequest(str(i), (TokenTurn(text[:40], text[40:]),)))
    return made


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = some_costs()
    costs.save(path)
    assert path.stat().st_size < 60_000
    for loaded in (Costs.load(path), Costs.load(path, NAME), pickle.loads(pickle.dumps(costs))):
        assert loaded == costs
        assert hash(loaded) == hash(costs)
        assert np.array_equal(loaded.tokens, costs.tokens)
    assert costs != some_costs(4)
    assert not costs.row.flags.writeable
    with pytest.raises(InputError, match="does not exist"):
        costs.save(tmp_path / "none" / "costs.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.update(format="x"), r"expected a file of Costs\.save"),
        (lambda file: file.update(version=2), "expected version 1, got 2"),
        (lambda file: file.pop("tokens"), "damaged: 'tokens'"),
        (
            lambda file: file["row"].pop(),
            r"damaged: .*row: .*\[16, 32\], got int64 of shape",
        ),
        (lambda file: file["row"][3].pop(), "damaged"),
        (lambda file: file["row"][3].__setitem__(3, 0.5), "row: expected integers"),
        (lambda file: file["row"][3].__setitem__(3, 40_000), "row: expected -768 to 769"),
        (lambda file: file["tokens"][9].__setitem__(1, 128), "tokens: expected -128 to 127"),
        (lambda file: file["store"][0].__setitem__(0, 9), "numbers are not those that were saved"),
        (lambda file: file.update(tokenizer="f" * 32), "numbers are not those that were saved"),
        (lambda file: file.update(tokenizer="name"), "tokenizer: expected 32 hex digits or none"),
        (lambda file: file.update(tokenizer=5), "tokenizer: expected 32 hex digits or none"),
    ],
)
def test_a_damaged_file(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    some_costs().save(path)
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))
    with pytest.raises(ValueError, match=rf"Costs: .*costs\.json: .*{message}"):
        Costs.load(path)


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"format": "ngram-npu costs"'])
def test_no_file(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"costs\.json: (cannot be read|expected a file)"):
        NgramConfig(**LADDER, costs=path)


def test_another_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    some_costs().save(path)
    with pytest.raises(ValueError, match=f"expected costs for tokenizer {'f' * 32}, got .* {NAME}"):
        Costs.load(path, "f" * 32)
    fit([]).save(path)
    assert Costs.load(path).tokenizer == ""
    with pytest.raises(ValueError, match="got those for one that is not named"):
        Costs.load(path, NAME)


def test_a_config(tmp_path: Path) -> None:
    costs = some_costs()
    costs.save(tmp_path / "costs")
    config = NgramConfig(**LADDER, store="live", costs=str(tmp_path / "costs"))
    assert config == NgramConfig(**LADDER, store="live", costs=costs)
    assert config.cost_table is config.costs.row  # type: ignore[union-attr]
    assert np.array_equal(config.store_cost_table, costs.store)  # type: ignore[arg-type]
    assert NgramConfig(**LADDER).token_logits is None
    other = NgramConfig(**LADDER, store="live", costs=some_costs(4))
    assert repr(asdict(other)) != repr(asdict(config)), "ranks compare them as text"
    assert copy.deepcopy(config) == config
    with pytest.raises(ValueError, match="store_costs: expected None, as costs has them"):
        NgramConfig(**LADDER, store="live", costs=costs, store_costs=default_store_costs())
    with pytest.raises(ValueError, match="costs: expected None without min_draft_probability"):
        NgramConfig(sizes="ladder", costs=costs)


def test_drafts_are_those_of_the_simulator() -> None:
    requests, costs = conversations(3), some_costs()
    found = walks(requests)
    for limit in (10, 40, 90):
        config = NgramConfig(sizes="ladder", min_draft_probability=2 ** (-limit / 16), costs=costs)
        figures = simulate("", requests, NgramProposer(config), k=8, batch_size=2)
        drafted = Counts(figures.num_tokens, figures.num_steps, figures.num_draft_tokens)
        assert found.replay(found.lengths(costs.of_row, limit, 8)) == drafted


def test_logits_that_say_what_a_cost_does() -> None:
    every = np.arange(256)
    assert np.array_equal(costs_of(np.rint(logits_of(every) * 32).astype(int)), every)
    assert costs_of(np.array([-1024, 1023])).tolist() == [255, 0]


def test_without_conversations_costs_are_the_shipped_ones() -> None:
    nothing = fit([], NAME)
    assert not nothing.tokens.any()
    assert nothing.tokenizer == NAME
    assert np.array_equal(costs_of(nothing.row), default_costs())
    assert np.array_equal(costs_of(nothing.store), default_store_costs())


def test_the_fit_learns_which_tokens_are_doubtful() -> None:
    requests = conversations(40)
    costs = fit(requests)
    assert costs == fit(requests)
    before = costs.tokens[:, 1].astype(int)
    assert before[0:120:2].min() > before[1:120:2].max()
    assert not before[700:].any(), "never seen"
    found = compare(requests, limit=12)
    assert found.wins
    assert found.gain > 1.05
    assert found.conversations == 20


def test_what_does_not_win_is_not_recommended() -> None:
    """What was learned of a token is wrong for the conversations that are measured."""
    both = zip(conversations(40), conversations(40, sure=1), strict=True)
    assert not compare([request for pair in both for request in pair], limit=30).wins
    with pytest.raises(InputError, match="expected two conversations"):
        compare(conversations(1))
