"""The comparison behind tools/bench/results/index-identity.json: passes here, and can fail."""

from __future__ import annotations

from typing import Any

import pytest
from ngram_npu import _C

from tools.verify import identity


def test_a_short_run() -> None:
    result = identity.run(cases=12, steps=80, data=None)
    assert result["identical"]
    for kind in ("random", "replayed"):
        assert result[kind]["answered_from_index"] > result[kind]["row_steps"] // 2
        assert result[kind]["drafted"] > 0


@pytest.mark.parametrize("place", range(7))
def test_one_wrong_bit_is_found(place: int) -> None:
    """In each of the five results, in a row's tokens, in its length."""
    calls = []

    def wrong(tokens: Any, lengths: Any, *arguments: Any, **keywords: Any) -> Any:
        results = _C.ngram_index_step_(tokens, lengths, *arguments, **keywords)
        calls.append(None)
        if len(calls) == 20:
            (*results, tokens, lengths)[place].reshape(-1)[-1] ^= 1
        return results

    with pytest.raises(AssertionError, match="step 19: the index differs"):
        identity.run(cases=2, steps=40, data=None, index_step=wrong)
