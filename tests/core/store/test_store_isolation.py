"""Random attacks on a store: no text reaches another scope or another request.

The model and the attacks are in `isolation.py`. They share no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from core.store import isolation
from core.store.isolation import (
    FIRST_MARK,
    ROWS,
    AsyncAttack,
    HostAttack,
    ProposerAttack,
    Request,
)
from ngram_npu.async_state import on_host
from ngram_npu.drafting import Drafting
from ngram_npu.host_drafting import HostDrafting
from ops.reference.store import BLOCK, HEAD_FILL, opened

Attack = ProposerAttack | HostAttack | AsyncAttack
DETECTED = r"was drafted|has said|behind its end|a draft for padding"
ATTACKS: dict[str, Callable[[int], Attack]] = {
    f"{name} {visibility} {way}": partial(of, visibility=visibility, **{argument: way})
    for name, of, argument, ways in (
        ("proposer", ProposerAttack, "kind", ("numpy", "torch")),
        ("host", HostAttack, "lag", (0, 1, 2)),
        ("async", AsyncAttack, "draft_on", ("device", "host")),
    )
    for visibility in ("live", "finish")
    for way in ways  # type: ignore[attr-defined]
}


def attack(name: str, seed: int, row_steps: int) -> Attack:
    made = ATTACKS[name](seed)
    made.run(row_steps)
    made.check()
    ledger = made.ledger
    assert ledger.drafts > row_steps // 5
    assert ledger.from_others > row_steps // 20, "drafts of what another request has said"
    assert ledger.stored > row_steps
    return made


@pytest.mark.parametrize("name", ATTACKS)
def test_store_under_attack_mixes_no_text(name: str) -> None:
    attack(name, 0, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_store_under_attack_of_200000_row_steps_mixes_no_text(name: str) -> None:
    share = {"proposer": 25_000, "host": 10_000, "async": 10_000}[name.split()[0]]
    row_steps = sum(attack(name, seed, share // 5).row_steps for seed in range(1, 6))
    assert row_steps >= share


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
    "scopes are mixed up": ("async live device", lambda rows, i, scopes: (rows, i, scopes.flip(0))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_attack_on_wrong_calls_of_the_store_fails(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = FAULTS[fault]
    ask = Drafting._ask_store

    def ask_wrongly(
        self: Any, rows: Any, drafts: Any, costs: Any, i: Any, slots: Any, scopes: Any, fill: Any
    ) -> None:
        rows, i, scopes = change(rows, i, scopes)
        ask(self, rows, drafts, costs, i, slots, scopes, fill)

    monkeypatch.setattr(Drafting, "_ask_store", ask_wrongly)
    with pytest.raises(AssertionError, match=DETECTED):
        attack(name, 0, 3000)


@pytest.mark.parametrize("name", ["host live 1", "host finish 2", "async live host"])
def test_attack_on_a_store_that_lags_too_little_fails(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_host, "LAG", 0)
    monkeypatch.setattr(
        isolation, "HostDrafting", lambda *a, lag, **more: HostDrafting(*a, lag=lag - 1, **more)
    )
    with pytest.raises(AssertionError, match=DETECTED):
        attack(name, 0, 3000)


def test_attack_on_host_drafting_without_scopes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = HostDrafting.begin
    monkeypatch.setattr(HostDrafting, "begin", lambda *a, scope, **more: begin(*a, scope=0, **more))
    with pytest.raises(AssertionError, match=DETECTED):
        attack("host live 0", 0, 3000)


def test_planted_tokens_are_detected() -> None:
    made = attack("proposer live numpy", 0, 500)
    ledger, words = made.ledger, made.store.tensor
    store = opened(words)
    assert store is not None
    text = words[store.tokens : store.tokens + store.num_blocks * BLOCK].reshape(-1, BLOCK)
    fills = [store.words[store.heads + 8 * block + HEAD_FILL] for block in range(len(text))]
    scopes = [store.scope(block) for block in range(len(text))]
    first = next(block for block, fill in enumerate(fills) if 0 < fill < BLOCK)
    other = next(b for b, fill in enumerate(fills) if fill and scopes[b] != scopes[first])
    mark = int(text[other, 0])
    assert mark >= FIRST_MARK
    foreign = f"block {first}: nobody in scope {scopes[first]} has said"
    for place, message in ((0, foreign), (fills[first], f"block {first} .*behind its end")):
        before, text[first, place] = int(text[first, place]), mark
        with pytest.raises(AssertionError, match=message):
            ledger.check_store(words)
        text[first, place] = before
    ledger.check_store(words)
    request = Request(scopes[first])
    for tokens in ([mark], [1, 2, mark], [ledger.new_mark()]):
        with pytest.raises(AssertionError, match=f"of scope {scopes[first]} was drafted"):
            ledger.check_draft(request, tokens)
    ledger.check_draft(request, [int(text[first, 0])])
