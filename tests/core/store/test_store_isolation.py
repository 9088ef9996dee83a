"""Tests that a request receives only text of its scope from a store, and no text of prompts.

The steps are those of a synchronous runner that tells the proposer nothing about rows, like V1 of
vLLM: rows are swapped, condensed, preempted and reused. The store is cleared, warmed, saved, and
loaded by another process. The scenarios of tests/async_state test asynchronous steps. A ledger
records all texts and checks drafts and the store without any kernel code.

All scopes use the same few phrases, so that text of another scope would match everywhere. Marks
follow a phrase. A *mark* is a token that no request has generated before, so it identifies its
request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import PRIVATE_SCOPE, NgramConfig, NgramProposer, NgramStore, Scope, scope_of
from ngram_npu.store.contents import HEAD_FILL, HEAD_NUMBER, read_scopes
from store_integrity import check_integrity

K = 4
ROWS, CAPACITY = 5, 400
SCOPES = [Scope(0), Scope(7), scope_of("a"), scope_of("b"), PRIVATE_SCOPE]
PHRASES = [[10 * phrase + i for i in range(1, 5)] for phrase in range(6)]
FIRST_MARK = 1000
CONFIG = NgramConfig(k=K, min_n=4, max_n=4)


class TextRequest:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.tokens: list[int] = []
        self.may_store: list[bool] = []
        """Per token: whether the store may contain the token."""
        self.draft: list[int] = []
        """The last draft."""
        self.phrase: list[int] = []
        """Tokens of a phrase that the request generates next."""

    def begin(self) -> TextRequest:
        """Makes all tokens so far the prompt, so that the next generated token is a mark."""
        self.draft, self.phrase = [], []
        return self


class Ledger:
    """Records all texts, and checks drafts and the memory of a store."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._owners: dict[int, list[tuple[TextRequest, int]]] = {}
        self._requests: list[TextRequest] = []
        self._next_mark = FIRST_MARK
        self.num_drafts = self.num_foreign_drafts = self.num_stored = 0

    def add_tokens(self, request: TextRequest, tokens: Sequence[int], *, may_store: bool) -> None:
        for token in tokens:
            if token >= FIRST_MARK:
                self._owners.setdefault(token, []).append((request, len(request.tokens)))
            request.tokens.append(token)
            request.may_store.append(may_store and request.scope != PRIVATE_SCOPE)

    def generate_tokens(self, request: TextRequest, count: int) -> list[int]:
        """Returns the next tokens of a request: marks and phrases, and often its last draft."""
        accepts_draft = request.draft and self.rng.random() < 0.4
        tokens = request.draft[:count] if accepts_draft else []
        while len(tokens) < count:
            if request.phrase:
                tokens.append(request.phrase.pop(0))
                continue
            self._next_mark += 1
            tokens.append(self._next_mark)
            if self.rng.random() < 0.4:
                request.phrase = list(self.rng.choice(PHRASES))
        return tokens

    def make_request(self, scope: Scope) -> TextRequest:
        """Returns a request with a prompt."""
        request = TextRequest(scope)
        self._requests.append(request)
        prompt = self.generate_tokens(request, self.rng.randint(1, CAPACITY // 3))
        self.add_tokens(request, prompt, may_store=False)
        return request.begin()

    def forget(self, scope: Scope) -> None:
        """The store must not contain the scope's text so far."""
        for request in self._requests:
            if request.scope == scope:
                request.may_store = [False] * len(request.tokens)

    def check_draft(self, request: TextRequest, piece: list[int]) -> None:
        """Checks that a draft occurs in the request's row, or in a text of the request's scope."""
        request.draft = list(piece)
        self.num_drafts += bool(piece)
        if all(token < FIRST_MARK for token in piece):
            return
        row = request.tokens + piece  # with overlap, a draft may continue with its own first tokens
        if any(
            owner is request and row[begin : begin + len(piece)] == piece
            for owner, begin in self._find_occurrences(piece)
        ):
            return
        self.num_foreign_drafts += 1
        if not self._is_shared_text(request.scope, piece):
            raise AssertionError(f"scope {request.scope}: foreign text was drafted: {piece}")

    def check_store(self, store: NgramStore) -> None:
        """Checks that each block contains tokens in a row of one text of its scope, that no text is
        stored twice, and that the unused memory for text is zero."""
        marks: Counter[int] = Counter()
        scopes, heads = read_scopes(store.blocks), store.blocks.tolist()
        for scope, head, tokens in zip(scopes.tolist(), heads, store.text, strict=True):
            fill = head[HEAD_FILL] if head[HEAD_NUMBER] else 0
            if tokens[fill:].any():
                raise AssertionError(f"a block of scope {scope}: text after its end")
            piece = tokens[:fill].tolist()
            if fill and not self._is_shared_text(scope, piece):
                raise AssertionError(f"not a text of scope {scope}: {piece}")
            marks.update(token for token in piece if token >= FIRST_MARK)
            self.num_stored += fill
        for mark, count in marks.items():
            if count > sum(owner.may_store[position] for owner, position in self._owners[mark]):
                raise AssertionError(f"text was stored twice: {mark}")

    def _is_shared_text(self, scope: int, piece: list[int]) -> bool:
        """Returns whether a request of the scope generated this text, and may store all of it."""
        size = len(piece)
        return any(
            owner.scope == scope
            and owner.tokens[begin : begin + size] == piece
            and all(owner.may_store[begin : begin + size])
            for owner, begin in self._find_occurrences(piece)
        )

    def _find_occurrences(self, piece: list[int]) -> list[tuple[TextRequest, int]]:
        """Returns the requests whose text may contain the piece, and the position where the piece
        would begin, given by its first mark."""
        offset = next((i for i, token in enumerate(piece) if token >= FIRST_MARK), None)
        if offset is None:  # a block without a mark may begin at any token of a text
            return [(owner, i) for owner in self._requests for i in range(len(owner.tokens))]
        owners = self._owners.get(piece[offset], ())
        return [(owner, position - offset) for owner, position in owners if position >= offset]


class RandomSteps:
    def __init__(self, seed: int, num_blocks: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger = Ledger(rng)
        self.rows: list[TextRequest | None] = [None] * ROWS
        self._path = folder / "store"
        self._preempted: list[TextRequest] = []
        self._token_ids = np.zeros((ROWS, CAPACITY), np.int32)
        self._use_store(NgramStore(num_blocks * 256, num_slots=ROWS))

    def _use_store(self, store: NgramStore) -> None:
        self.store, self._proposer = store, NgramProposer(CONFIG, store=store)

    def run(self, num_steps: int) -> None:
        rng, ledger = self.rng, self.ledger
        for number in range(num_steps):
            if rng.random() < 0.004:
                scope = rng.choice(SCOPES[:3])
                self.store.clear(scope)
                ledger.forget(scope)
            if rng.random() < 0.01:
                self._warm(rng.choice(SCOPES[:3]))
            if rng.random() < 0.01:
                self.store.save(self._path)
                self._use_store(NgramStore.load(self._path))
            self._change_rows()
            self._step()
            if number % 20 == 0:
                ledger.check_store(self.store)
        ledger.check_store(self.store)
        check_integrity(self.store)
        assert ledger.num_drafts > num_steps // 4
        assert ledger.num_foreign_drafts > num_steps // 20, "drafts from other requests' text"
        assert ledger.num_stored > num_steps

    def _warm(self, scope: Scope) -> None:
        request = self.ledger.make_request(scope)
        begin = len(request.tokens)
        tokens = self.ledger.generate_tokens(request, self.rng.randint(1, 300))
        self.ledger.add_tokens(request, tokens, may_store=True)
        self.store.warm([request.tokens[begin:]], scope=scope)

    def _change_rows(self) -> None:
        rng, rows = self.rng, self.rows
        for row, request in enumerate(rows):
            if request is None:
                continue
            if rng.random() < 0.05 or len(request.tokens) > CAPACITY - 40:
                rows[row] = None  # the request has ended
            elif rng.random() < 0.02:
                self._preempted.append(request.begin())
                rows[row] = None
        if rng.random() < 0.2:  # swaps of two rows
            first, second = rng.sample(range(ROWS), 2)
            rows[first], rows[second] = rows[second], rows[first]
        if rng.random() < 0.5:  # the last rows move to free rows
            remaining = [request for request in rows if request is not None]
            rows[:] = [*remaining, *[None] * (ROWS - len(remaining))]
        for row in range(ROWS):
            if rows[row] is None and rng.random() < 0.4:
                if self._preempted and rng.random() < 0.5:
                    rows[row] = self._preempted.pop(0)
                else:
                    rows[row] = self.ledger.make_request(rng.choice(SCOPES))

    def _step(self) -> None:
        requests = [(row, request) for row, request in enumerate(self.rows) if request is not None]
        lengths, sampled = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        scopes = np.zeros(ROWS, np.int64)
        for row, request in requests:
            scopes[row] = request.scope
            if self.rng.random() < 0.8:
                tokens = self.ledger.generate_tokens(request, self.rng.randint(1, K + 1))
                self.ledger.add_tokens(request, tokens, may_store=True)
                sampled[row] = len(tokens)
            self._token_ids[row, : len(request.tokens)] = request.tokens
            lengths[row] = len(request.tokens)
        drafts = self._proposer.propose(
            self._token_ids, lengths, num_sampled=sampled, scopes=scopes
        )
        for row, request in requests:
            count = int(drafts.num_draft_tokens[row])
            assert not count or sampled[row], "a draft for a request that sampled nothing"
            self.ledger.check_draft(request, drafts.draft_token_ids[row, :count].tolist())


@pytest.mark.parametrize(
    ("num_steps", "num_blocks"),
    [(400, 8), (400, 512), pytest.param(4000, 8, marks=pytest.mark.slow)],
)
def test_store_in_random_steps_mixes_no_texts(
    num_steps: int, num_blocks: int, tmp_path: Path
) -> None:
    RandomSteps(num_steps, num_blocks, tmp_path).run(num_steps)


CHANGES: dict[str, Any] = {
    "scopes are not passed": lambda scopes: None,
    "scopes are permuted": lambda scopes: scopes[::-1].copy(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_random_steps_detect_wrong_scopes(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for method in ("append", "propose"):
        call = getattr(NgramStore, method)

        def call_with_fault(
            self: Any, *rows: Any, scopes: Any, _call: Any = call, **arguments: Any
        ) -> None:
            _call(self, *rows, scopes=CHANGES[change](scopes), **arguments)

        monkeypatch.setattr(NgramStore, method, call_with_fault)
    with pytest.raises(AssertionError, match=r"was drafted|not a text of|was stored twice"):
        RandomSteps(0, 512, tmp_path).run(400)
