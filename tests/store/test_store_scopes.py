"""Text of one scope never reaches another: drafts come from the request's own scope."""

from __future__ import annotations

import numpy as np
import pytest
from ngram_npu import NgramStore, scope_of
from ngram_npu.store import Visibility
from store.requests import Request, step

COMMON = 12
"""Smaller tokens are shared by all scopes; any other belongs to the scope of its remainder."""
NAMES = (0, 1, 2**62 - 1, "a", "b")
SCOPES = [scope_of(name) for name in NAMES]


def leaks(visibility: Visibility, steps: int, *, mixed: bool = False) -> tuple[int, int]:
    """Counts drafted tokens of other scopes, and all drafted tokens, over ``steps`` steps. Requests
    come and go in a store that is too small. ``mixed``: all use one scope, which must show."""
    rng = np.random.default_rng(13)
    slots, n = 16, len(SCOPES)
    store = NgramStore(slots, 16384, visibility=visibility)

    def begun(slot: int) -> tuple[int, Request]:
        whose = int(rng.integers(n))
        prompt = rng.integers(0, COMMON, 4).tolist()
        return whose, Request(store, slot, 0 if mixed else SCOPES[whose], prompt)

    live = [begun(slot) for slot in range(slots)]
    leaked = drafted = 0
    for at in range(steps // slots):
        for i, (whose, request) in enumerate(live):
            if len(request.row) > 60 or rng.random() < 0.02:
                if rng.random() < 0.5:
                    request.finish()
                live[i] = whose, request = begun(i)
            said = rng.integers(0, COMMON, 3)
            said[2] += (said[2] % 3 == 0) * (COMMON + (n - COMMON % n) + whose - said[2])
            request.row += said.tolist()
        for (whose, _), draft in zip(
            live, step(store, [r for _, r in live], [3] * slots, 6), strict=True
        ):
            drafted += len(draft)
            leaked += sum(token >= COMMON and token % n != whose for token in draft)
        if at % 997 == 996:
            store.clear(NAMES[at % n])
    store.check_integrity()
    return leaked, drafted


@pytest.mark.parametrize("visibility", ["live", "finish"])
@pytest.mark.parametrize("steps", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_text_crosses_scopes(visibility: Visibility, steps: int) -> None:
    leaked, drafted = leaks(visibility, steps)
    assert leaked == 0
    assert drafted > steps / 2


def test_a_store_that_mixed_scopes_up_would_be_found() -> None:
    assert leaks("live", 2_000, mixed=True)[0] > 100
