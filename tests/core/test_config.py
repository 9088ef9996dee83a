"""Tests NgramConfig, and the files of fitted costs."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import Costs, NgramConfig
from ngram_npu.async_state import AsyncConfig, KVGroup
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu.draft_costs import costs_to_logits
from ngram_npu.errors import InputError
from ops.reference import ladder

LADDER: dict[str, Any] = {"sizes": "ladder", "min_draft_probability": 0.177}
COSTS = np.full((16, 32), 7, np.int64)
STORE_COSTS = np.arange(16 * 56).reshape(16, 56) % 256
TOKENIZER = "0123456789abcdef" * 2


def make_costs(seed: int = 3) -> Costs:
    rng = np.random.default_rng(seed)
    row_table, store_table = (rng.integers(-200, 300, (16, columns)) for columns in (32, 56))
    return Costs(row_table, store_table, rng.integers(-128, 128, (4096, 2)), TOKENIZER)


def test_config_has_documented_defaults() -> None:
    config = NgramConfig()
    assert (config.min_n, config.max_n, config.k, config.match_policy_code) == (2, 5, 5, 0)
    assert config.vocab_size_or_unlimited == 2**31 - 1
    assert (config.store, config.store_tokens, config.store_cost_table) == (None, 1_000_000, None)
    assert NgramConfig(match_policy="latest").match_policy_code == 1
    assert NgramConfig(max_n=4).min_n == 2
    assert NgramConfig(max_n=1).min_n == 1


def test_ladder_has_its_own_defaults() -> None:
    config = NgramConfig(**LADDER)
    assert (config.min_n, config.max_n, config.k, config.match_policy) == (1, 16, 8, "latest")
    assert config.overlap
    assert config.fits_index
    assert config.cost_limit == 40
    assert np.array_equal(config.cost_table, default_costs())  # type: ignore[arg-type]
    assert np.array_equal(config.store_cost_table, default_store_costs())  # type: ignore[arg-type]
    assert config.token_logits is None
    assert NgramConfig(sizes="ladder").cost_table is None
    assert not NgramConfig(sizes="ladder", overlap=False).overlap
    assert NgramConfig(sizes="ladder", min_draft_probability=1).cost_limit == 0


def test_config_converts_numpy_integers_to_int() -> None:
    config = NgramConfig(max_n=np.int64(4), k=np.int32(3))  # type: ignore[arg-type]
    assert config == NgramConfig(max_n=4, k=3)
    assert {type(value) for value in (config.min_n, config.max_n, config.k)} == {int}


def test_config_is_frozen_and_hashable() -> None:
    config = NgramConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.k = 3  # type: ignore[misc]
    assert hash(config) == hash(NgramConfig())
    assert dataclasses.replace(config, k=3).k == 3
    tables: dict[str, Any] = {"costs": COSTS, "store": "finish", "store_costs": STORE_COSTS}
    config = NgramConfig(**LADDER, **tables)
    assert np.array_equal(config.cost_table, COSTS)  # type: ignore[arg-type]
    assert np.array_equal(config.store_cost_table, STORE_COSTS)  # type: ignore[arg-type]
    assert config == NgramConfig(**{**LADDER, **tables, "costs": COSTS.tolist()})
    assert hash(config) != hash(NgramConfig(**LADDER))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_n": 0}, "min_n: expected 1 to 5, got 0"),
        ({"min_n": 6}, "min_n: expected 1 to 5, got 6"),
        ({"max_n": 65}, "max_n: expected 1 to 64, got 65"),
        ({"k": 0}, "k: expected 1 to 64, got 0"),
        ({"k": 65}, "k: expected 1 to 64, got 65"),
        ({"max_len": -1}, "max_len: expected 0 to"),
        ({"vocab_size": -1}, "vocab_size: expected 0 to"),
        ({"match_policy": "x"}, "match_policy: expected 'earliest' or 'latest', got 'x'"),
        ({"sizes": "x"}, "sizes: expected 'consecutive' or 'ladder', got 'x'"),
        ({"sizes": "ladder", "min_n": 2}, "min_n: expected 1 with sizes='ladder', got 2"),
        ({"sizes": "ladder", "max_n": 5}, "max_n: expected 16 with sizes='ladder', got 5"),
        ({"sizes": "ladder", "match_policy": "earliest"}, "match_policy: expected 'latest' with"),
        ({"sizes": "ladder", "min_draft_probability": 0}, ".* above 0, at most 1, got 0"),
        ({"sizes": "ladder", "min_draft_probability": 1.5}, ".* at most 1, got 1.5"),
        ({"costs": COSTS}, "costs: expected None with sizes='consecutive'"),
        ({"sizes": "ladder", "costs": COSTS}, "costs: expected None without min_draft_prob"),
        ({"sizes": "ladder", "costs": make_costs()}, "costs: expected None without min_draft_prob"),
        ({"sizes": "ladder", "costs": COSTS[1:]}, r"costs: expected 16 rows of 32 .*\[15, 32\]"),
        ({"sizes": "ladder", "costs": COSTS + 250}, "costs: .* integers of 0 to 255"),
        ({"sizes": "ladder", "costs": COSTS * 0.5}, "costs: .* of 0 to 255, got float64"),
        ({"store": "live"}, "store: expected None without sizes='ladder' and a min_draft"),
        ({"min_draft_probability": 0.2, "store": "live"}, "store: expected None without sizes="),
        ({"sizes": "ladder", "store": "live"}, "store: expected None without sizes='ladder'"),
        ({"store_costs": STORE_COSTS}, "store_costs: expected None without sizes='ladder'"),
        ({**LADDER, "store": "now"}, "store: expected 'live', 'finish' or None, got 'now'"),
        ({**LADDER, "store_costs": STORE_COSTS[:, :32]}, "store_costs: expected 16 rows of 56"),
        (
            {**LADDER, "costs": make_costs(), "store_costs": STORE_COSTS},
            "store_costs: expected None, because costs contains them",
        ),
        ({**LADDER, "store": "live", "store_tokens": 0}, "store_tokens: expected 1 to"),
    ],
)
def test_config_with_invalid_option_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^NgramConfig: {message}"):
        NgramConfig(**options)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("k", 2.0, "int"),
        ("k", True, "int"),
        ("max_n", 2.5, "int"),
        ("store_tokens", 1.5, "int"),
        ("overlap", 1, "bool"),
        ("min_draft_probability", True, "float"),
    ],
)
def test_option_of_wrong_type_is_rejected(option: str, value: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=f"{option}: expected {expected}, got {value}"):
        NgramConfig(sizes="ladder" if option == "min_draft_probability" else "consecutive",
                    **{option: value})  # fmt: skip


def test_default_costs_decrease_with_match_length_and_correct_drafts() -> None:
    costs = default_costs()
    assert (costs.shape, costs.dtype) == ((16, 32), np.uint8)
    assert not costs.flags.writeable
    # A token costs less after a correct draft than after a wrong one, and less after a long match.
    assert costs[1, 3] < costs[1, 2]
    assert costs[15, 31] < costs[1, 3]


def test_slots_beyond_32_bits_on_all_ranks_are_rejected() -> None:
    """A block of the block manager has block_size * blocks_per_kv_block * cp_world tokens."""
    group = KVGroup(block_size=2**20, max_blocks=1, blocks_per_kv_block=2**5)
    sizes = {"ngram": NgramConfig(), "max_rows": 1, "row_capacity": 64, "max_step_tokens": 64}
    AsyncConfig(**sizes, kv_groups=(group,), cp_world=2**6 - 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kv_groups: .* below 2\*\*31, got 2147483648"):
        AsyncConfig(**sizes, kv_groups=(group,), cp_world=2**6)  # type: ignore[arg-type]


def test_loaded_costs_equal_saved_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = make_costs()
    costs.save(path)
    assert path.stat().st_size < 60_000
    copies = Costs.load(path), Costs.load(path, TOKENIZER), pickle.loads(pickle.dumps(costs))
    for costs_copy in copies:
        assert costs_copy == costs
        assert hash(costs_copy) == hash(costs)
        assert np.array_equal(costs_copy.tokens, costs.tokens)
    assert costs != make_costs(4)
    assert not costs.row.flags.writeable
    with pytest.raises(InputError, match="does not exist"):
        costs.save(tmp_path / "none" / "costs.json")


def test_costs_of_another_tokenizer_are_rejected(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", make_costs()
    costs.save(path)
    expected = f"expected costs for tokenizer {'f' * 32}, got costs for {TOKENIZER}"
    with pytest.raises(ValueError, match=expected):
        Costs.load(path, "f" * 32)
    Costs(costs.row, costs.store, costs.tokens).save(path)
    assert Costs.load(path).tokenizer == ""
    with pytest.raises(ValueError, match="got costs for an unknown tokenizer"):
        Costs.load(path, TOKENIZER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.update(format="x"), r"expected a file written by Costs\.save"),
        (lambda file: file.update(version=2), "expected version 1, got 2"),
        (lambda file: file.pop("tokens"), "damaged: 'tokens'"),
        (lambda file: file["row"].pop(), r"damaged: .*row: .*\[16, 32\], got int64 of shape"),
        (lambda file: file["row"][3].pop(), "damaged"),
        (lambda file: file["row"][3].__setitem__(3, 0.5), "row: expected integers"),
        (lambda file: file["row"][3].__setitem__(3, 40_000), "row: expected -768 to 769"),
        (lambda file: file["tokens"][9].__setitem__(1, 128), "tokens: expected -128 to 127"),
        (lambda file: file["store"][0].__setitem__(0, 9), "the numbers do not match the digest"),
        (lambda file: file.update(tokenizer="f" * 32), "the numbers do not match the digest"),
        (lambda file: file.update(tokenizer="name"), "tokenizer: expected 32 hex digits or none"),
        (lambda file: file.update(tokenizer=5), "tokenizer: expected 32 hex digits or none"),
    ],
)
def test_damaged_cost_file_is_rejected(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    make_costs().save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"Costs: .*costs\.json: .*{message}"):
        Costs.load(path)


@pytest.mark.parametrize("text", [None, "", "[]", '{"format": "ngram-npu costs"'])
def test_unreadable_cost_file_is_rejected(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"costs\.json: (cannot be read|expected a file)"):
        NgramConfig(**LADDER, costs=path)


def test_config_reads_fitted_costs_from_path(tmp_path: Path) -> None:
    costs = make_costs()
    costs.save(tmp_path / "costs")
    config = NgramConfig(**LADDER, store="live", costs=str(tmp_path / "costs"))
    assert config == NgramConfig(**LADDER, store="live", costs=costs)
    assert config.cost_table is config.costs.row  # type: ignore[union-attr]
    assert np.array_equal(config.store_cost_table, costs.store)  # type: ignore[arg-type]
    assert np.array_equal(config.token_logits, costs.tokens)  # type: ignore[arg-type]
    other_config = NgramConfig(**LADDER, store="live", costs=make_costs(4))
    # The ranks of vLLM compare their configurations by their repr.
    assert repr(dataclasses.asdict(other_config)) != repr(dataclasses.asdict(config))
    assert copy.deepcopy(config) == config


def test_logits_convert_to_costs_and_back() -> None:
    logits = np.rint(costs_to_logits(np.arange(256)) * 32).astype(int).tolist()
    token_logits = np.zeros((4096, 2), int)
    costs = [ladder.compute_cost(logit, token_logits, 0, 0) for logit in (*logits, -1024, 1023)]
    assert costs == [*range(256), 255, 0]
