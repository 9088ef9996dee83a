"""Random attacks on a store: no text reaches another scope or another request.

The model and the attacks are in `isolation.py`. They share no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.store.isolation import FIRST_MARK, AsyncAttack
from ngram_npu.async_state import device_state
from ngram_npu.config import STORES
from ngram_npu.drafting import Drafting
from ops.reference.store import BLOCK, HEAD_FILL, open_store

DETECTED = r"was drafted|not a text of|after its end|a draft for padding"
NAMES = [f"{draft_on} {visibility}" for draft_on in ("device", "host") for visibility in STORES]


def run_attack(name: str, seed: int, row_steps: int) -> AsyncAttack:
    draft_on, visibility = name.split()
    attack = AsyncAttack(seed, visibility, draft_on)
    attack.run(row_steps)
    attack.check()
    ledger = attack.ledger
    assert ledger.drafts > row_steps // 5
    assert ledger.from_others > row_steps // 20, "drafts from other requests' text"
    assert ledger.stored > row_steps
    return attack


@pytest.mark.parametrize("name", NAMES)
def test_store_under_attack_mixes_no_text(name: str) -> None:
    run_attack(name, 0, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_store_under_long_attack_mixes_no_text(name: str) -> None:
    """100,000 row steps in all."""
    row_steps = sum(run_attack(name, seed, 5_000).row_steps for seed in range(1, 6))
    assert row_steps >= 25_000


FAULTS: dict[str, Callable[[Any, Any], Any]] = {
    "scopes are not passed": lambda rows, scopes: (rows, None),
    "scopes are permuted": lambda rows, scopes: (rows, scopes.flip(0)),
    "rows are too long": lambda rows, scopes: ((rows[0], rows[1] + 1, rows[2]), scopes),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_attack_detects_wrong_arguments(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update_store = Drafting._update_store

    def update_with_fault(
        self: Any, rows: Any, drafts: Any, costs: Any, i: Any, slots: Any, scopes: Any, fill: Any
    ) -> None:
        rows, scopes = FAULTS[fault](rows, scopes)
        update_store(self, rows, drafts, costs, i, slots, scopes, fill)

    monkeypatch.setattr(Drafting, "_update_store", update_with_fault)
    with pytest.raises(AssertionError, match=DETECTED):
        run_attack("device live", 0, 3000)


def test_attack_detects_missing_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "LAG", 0)
    with pytest.raises(AssertionError, match=DETECTED):
        run_attack("host live", 0, 3000)


def test_ledger_detects_planted_tokens() -> None:
    attack = run_attack("device live", 0, 500)
    ledger, words = attack.ledger, attack.store.tensor.numpy()
    store = open_store(words)
    assert store is not None
    text = words[store.tokens : store.tokens + store.num_blocks * BLOCK].reshape(-1, BLOCK)
    fills = [store.words[store.heads + 8 * block + HEAD_FILL] for block in range(len(text))]
    scopes = [store.scope(block) for block in range(len(text))]
    block = next(b for b, fill in enumerate(fills) if 0 < fill < BLOCK)
    scope = scopes[block]
    mark = next(int(text[b, 0]) for b, fill in enumerate(fills) if fill and scopes[b] != scope)
    assert mark >= FIRST_MARK
    foreign = f"block {block}: not a text of scope {scope}"
    for place, message in ((0, foreign), (fills[block], f"block {block} .*after its end")):
        token, text[block, place] = int(text[block, place]), mark
        with pytest.raises(AssertionError, match=message):
            ledger.check_store(words)
        text[block, place] = token
    ledger.check_store(words)
