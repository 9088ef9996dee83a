"""Random attacks on a store: no text reaches another scope or another request.

The model and the attacks are in `isolation.py`. They share no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.store.isolation import FIRST_MARK, ROWS, AsyncAttack, ProposerAttack, TextRequest
from ngram_npu.async_state import device_state
from ngram_npu.drafting import Drafting
from ops.reference.store import BLOCK, HEAD_FILL, open_store

Attack = ProposerAttack | AsyncAttack
DETECTED = r"was drafted|not a text of|after its end|a draft for padding"
NAMES = [
    f"{kind} {visibility} {variant}"
    for kind, variant in (
        ("proposer", "numpy"),
        ("proposer", "torch"),
        ("async", "device"),
        ("async", "host"),
    )
    for visibility in ("live", "finish")
]


def run_attack(name: str, seed: int, row_steps: int) -> Attack:
    kind, visibility, variant = name.split()
    attack_class: Any = {"proposer": ProposerAttack, "async": AsyncAttack}[kind]
    attack: Attack = attack_class(seed, visibility, variant)
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
    """200,000 row steps in all."""
    row_steps = sum(run_attack(name, seed, 5_000).row_steps for seed in range(1, 6))
    assert row_steps >= 25_000


FAULTS: dict[str, tuple[str, Callable[[Any, Any, Any], Any]]] = {
    "scopes are not passed": ("proposer live numpy", lambda rows, i, scopes: (rows, i, None)),
    "rows are too long": (
        "proposer live torch",
        lambda rows, i, scopes: ((rows[0], rows[1] + 1, rows[2]), i, scopes),
    ),
    "negative rows count from the end": (
        "proposer finish numpy",
        lambda rows, i, scopes: (rows, None if i is None else i % ROWS, scopes),
    ),
    "scopes are permuted": ("async live device", lambda rows, i, scopes: (rows, i, scopes.flip(0))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_attack_detects_wrong_arguments(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = FAULTS[fault]
    update_store = Drafting._update_store

    def update_with_fault(
        self: Any, rows: Any, drafts: Any, costs: Any, i: Any, slots: Any, scopes: Any, fill: Any
    ) -> None:
        rows, i, scopes = change(rows, i, scopes)
        update_store(self, rows, drafts, costs, i, slots, scopes, fill)

    monkeypatch.setattr(Drafting, "_update_store", update_with_fault)
    with pytest.raises(AssertionError, match=DETECTED):
        run_attack(name, 0, 3000)


def test_attack_detects_missing_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "LAG", 0)
    with pytest.raises(AssertionError, match=DETECTED):
        run_attack("async live host", 0, 3000)


def test_ledger_detects_planted_tokens() -> None:
    attack = run_attack("proposer live numpy", 0, 500)
    ledger, words = attack.ledger, attack.store.tensor
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
    request = TextRequest(scope)
    for tokens in ([mark], [1, 2, mark], [ledger.new_mark()]):
        with pytest.raises(AssertionError, match=f"of scope {scope} was drafted"):
            ledger.check_draft(request, tokens)
    ledger.check_draft(request, [int(text[block, 0])])
