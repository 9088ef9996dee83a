from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from ngram_npu import NgramConfig
from ngram_npu.async_state import AsyncConfig, KVGroup


def test_defaults_and_codes() -> None:
    config = NgramConfig()
    assert (config.min_n, config.max_n, config.k, config.match_policy_code) == (2, 5, 5, 0)
    assert config.max_len_or_unlimited == 2**63 - 1
    assert config.vocab_size_or_unlimited == 2**31 - 1
    assert NgramConfig(match_policy="latest", max_len=7).match_policy_code == 1
    assert NgramConfig(max_len=7).max_len_or_unlimited == 7


def test_vllm_names() -> None:
    config = NgramConfig(prompt_lookup_min=3, prompt_lookup_max=4, num_speculative_tokens=6)
    assert config == NgramConfig(min_n=3, max_n=4, k=6)


def test_a_missing_bound() -> None:
    """Under vLLM's names it equals the other bound, as in vLLM; ours have defaults."""
    assert NgramConfig(prompt_lookup_max=4) == NgramConfig(min_n=4, max_n=4)
    assert NgramConfig(prompt_lookup_min=3) == NgramConfig(min_n=3, max_n=3)
    assert NgramConfig(max_n=4).min_n == 2
    assert NgramConfig(max_n=1).min_n == 1


def test_numpy_integers() -> None:
    config = NgramConfig(prompt_lookup_max=np.int64(4), k=np.int32(3))  # type: ignore[arg-type]
    assert config == NgramConfig(min_n=4, max_n=4, k=3)
    assert {type(v) for v in (config.min_n, config.max_n, config.k)} == {int}


def test_frozen_and_hashable() -> None:
    config = NgramConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.k = 3  # type: ignore[misc]
    assert hash(config) == hash(NgramConfig())
    assert dataclasses.replace(config, k=3).k == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_n": 0}, ValueError, "min_n: expected 1 to 5, got 0"),
        ({"min_n": 6}, ValueError, "min_n: expected 1 to 5, got 6"),
        ({"max_n": 65}, ValueError, "max_n: expected 1 to 64, got 65"),
        ({"k": 0}, ValueError, "k: expected 1 to 64, got 0"),
        ({"k": 65}, ValueError, "k: expected 1 to 64, got 65"),
        (
            {"match_policy": "first"},
            ValueError,
            "match_policy: expected 'earliest' or 'latest', got 'first'",
        ),
        ({"max_len": -1}, ValueError, "max_len: expected 0 to"),
        ({"vocab_size": -1}, ValueError, "vocab_size: expected 0 to"),
        ({"k": 2.0}, TypeError, "k: expected int, got 2.0"),
        ({"k": True}, TypeError, "k: expected int, got True"),
        ({"overlap": 1}, TypeError, "overlap: expected bool, got 1"),
        ({"k": 2, "num_speculative_tokens": 2}, ValueError, "k is given twice"),
        ({"prompt_lookup_min": 65}, ValueError, "max_n: expected 1 to 64, got 65"),
    ],
)
def test_bad_values(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NgramConfig(**options)


def test_positions_of_all_ranks_and_kernel_blocks_fit_32_bits() -> None:
    """A block of the block manager covers its kernel blocks times their size, on every rank."""
    group = KVGroup(block_size=2**20, max_blocks=1, blocks_per_kv_block=2**5)
    sizes = {"ngram": NgramConfig(), "max_rows": 1, "row_capacity": 64, "max_step_tokens": 64}
    AsyncConfig(**sizes, kv_groups=(group,), cp_world=2**6 - 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kv_groups: .* below 2\*\*31, got 2147483648"):
        AsyncConfig(**sizes, kv_groups=(group,), cp_world=2**6)  # type: ignore[arg-type]
