"""Tests NgramConfig."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from ngram_npu import NgramConfig
from ngram_npu.async_state import AsyncConfig, KVGroup


def test_config_has_documented_defaults() -> None:
    config = NgramConfig()
    assert (config.min_n, config.max_n, config.k, config.match_policy_code) == (1, 16, 5, 1)
    assert config.overlap
    assert config.vocab_size_or_unlimited == 2**31 - 1
    assert config.cost_limit is None
    assert config.limit_arguments == {}


def test_lookup_arguments_contain_what_differs_from_the_operators_defaults() -> None:
    options: dict[str, Any] = {"min_n": 2, "max_n": 5, "match_policy": "earliest"}
    config = NgramConfig(**options, overlap=False)
    assert config.lookup_arguments == {"min_n": 2, "max_n": 5, "k": 5}
    limits = {"max_len": 0, "vocab_size": 7}
    config = NgramConfig(**limits)
    assert config.limit_arguments == limits
    assert config.lookup_arguments == {
        "min_n": 1,
        "max_n": 16,
        "k": 5,
        "match_policy": 1,
        "overlap": True,
        **limits,
    }


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
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_n": 0}, "min_n: expected 1 to 16, got 0"),
        ({"min_n": 6, "max_n": 5}, "min_n: expected 1 to 5, got 6"),
        ({"max_n": 65}, "max_n: expected 1 to 64, got 65"),
        ({"k": 0}, "k: expected 1 to 64, got 0"),
        ({"k": 65}, "k: expected 1 to 64, got 65"),
        ({"max_len": -1}, "max_len: expected 0 to"),
        ({"vocab_size": -1}, "vocab_size: expected 0 to"),
        ({"match_policy": "x"}, "match_policy: expected 'earliest' or 'latest', got 'x'"),
        ({"min_draft_probability": 0}, ".* above 0, at most 1, got 0"),
        ({"min_draft_probability": 1.5}, ".* at most 1, got 1.5"),
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
        ("overlap", 1, "bool"),
        ("min_draft_probability", True, "float"),
    ],
)
def test_option_of_wrong_type_is_rejected(option: str, value: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=f"{option}: expected {expected}, got {value}"):
        NgramConfig(**{option: value})


def test_slots_beyond_32_bits_on_all_ranks_are_rejected() -> None:
    """A block of the block manager has block_size * blocks_per_kv_block * cp_world tokens."""
    group = KVGroup(block_size=2**20, max_blocks=1, blocks_per_kv_block=2**5)
    sizes = {"ngram": NgramConfig(), "max_rows": 1, "row_capacity": 64, "max_step_tokens": 64}
    AsyncConfig(**sizes, kv_groups=(group,), cp_world=2**6 - 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kv_groups: .* below 2\*\*31, got 2147483648"):
        AsyncConfig(**sizes, kv_groups=(group,), cp_world=2**6)  # type: ignore[arg-type]
