"""A model of the text that a request may receive from a store, and random attacks on a store.

All scopes use the same few phrases, so that text of another scope would match everywhere. A phrase
is followed by *marks*: tokens that a single request generates first, so a mark identifies the
request. *Poison* tokens must never be drafted: tokens of padding and of requests that have ended.
The model knows the texts only; it computes no hashes, blocks or drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ngram_npu import NgramConfig, NgramStore, scope_of
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup
from ngram_npu.host_drafting import Stop
from ops.reference.store import BLOCK, HEAD_FILL, HEAD_SERIAL, open_store

K = 4
ROWS, CAPACITY = 5, 400
SCOPES = [0, 7, scope_of("a"), scope_of("b")]
PHRASES = [[10 * phrase + i for i in range(1, 5)] for phrase in range(6)]
END = 99
"""The stop token of some requests."""
FIRST_MARK = 1000


class TextRequest:
    def __init__(self, scope: int) -> None:
        self.scope = scope
        self.tokens: list[int] = []
        self.shared: list[bool] = []
        """Whether the store may contain the token."""
        self.draft: list[int] = []
        """The last draft."""
        self.phrase: list[int] = []

    def begin(self) -> TextRequest:
        """Makes all tokens so far the prompt. The next generated token is a mark."""
        self.draft, self.phrase = [], []
        return self


class Ledger:
    """Records all texts, and checks drafts and the memory of a store."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._owners: dict[int, list[tuple[TextRequest, int]]] = {}
        self._requests: list[TextRequest] = []
        self._next_mark = FIRST_MARK
        self.drafts = self.from_others = self.stored = 0

    def new_mark(self) -> int:
        self._next_mark += 1
        return self._next_mark

    def add(self, request: TextRequest, tokens: Sequence[int], *, shared: bool) -> None:
        for token in tokens:
            if token >= FIRST_MARK:
                self._owners.setdefault(token, []).append((request, len(request.tokens)))
            request.tokens.append(token)
            request.shared.append(shared)

    def next_tokens(self, request: TextRequest, count: int) -> list[int]:
        """Returns the next tokens of a request: marks and phrases, and often its last draft."""
        accepts_draft = request.draft and self.rng.random() < 0.4
        tokens = request.draft[:count] if accepts_draft else []
        while len(tokens) < count:
            if request.phrase:
                tokens.append(request.phrase.pop(0))
                continue
            tokens.append(self.new_mark())
            if self.rng.random() < 0.4:
                request.phrase = list(self.rng.choice(PHRASES))
        return tokens

    def new_request(self, scope: int) -> TextRequest:
        """Returns a request with a prompt."""
        request = TextRequest(scope)
        self._requests.append(request)
        prompt = self.next_tokens(request, self.rng.randint(1, CAPACITY // 3))
        self.add(request, prompt, shared=False)
        return request.begin()

    def check_draft(self, request: TextRequest, tokens: Sequence[int]) -> None:
        """Checks that a draft is part of the request's row, or of a text of its scope."""
        request.draft = [token for token in tokens if token != END]
        self.drafts += bool(tokens)
        if all(token < FIRST_MARK for token in tokens):
            return
        piece = list(tokens)
        row = request.tokens + piece  # a draft may overlap itself
        if any(
            owner is request and row[begin : begin + len(piece)] == piece
            for owner, begin in self._occurrences(piece)
        ):
            return
        self.from_others += 1
        if not self._is_shared_text(request.scope, piece):
            raise AssertionError(f"a request of scope {request.scope} was drafted {piece}")

    def check_store(self, tensor: Any) -> None:
        """Checks that each block contains a part of one text of its scope, and that the rest of the
        memory for text is zero."""
        words = np.asarray(tensor)
        store = open_store(words)
        assert store is not None
        text = words[store.tokens : store.tokens + store.num_blocks * BLOCK]
        text = text.reshape(store.num_blocks, BLOCK)
        for block, tokens in enumerate(text):
            head = store.heads + 8 * block
            scope = store.scope(block)
            fill = store.words[head + HEAD_FILL] if store.words[head + HEAD_SERIAL] else 0
            if tokens[fill:].any():
                raise AssertionError(f"block {block} of scope {scope}: text after its end")
            if not fill:
                continue
            piece = tokens[:fill].tolist()
            if not self._is_shared_text(scope, piece):
                raise AssertionError(f"block {block}: not a text of scope {scope}: {piece}")
            self.stored += fill

    def _is_shared_text(self, scope: int, piece: list[int]) -> bool:
        """Returns whether a request of the scope generated this text, all of it for the store."""
        size = len(piece)
        return any(
            owner.scope == scope
            and owner.tokens[begin : begin + size] == piece
            and all(owner.shared[begin : begin + size])
            for owner, begin in self._occurrences(piece)
        )

    def _occurrences(self, piece: list[int]) -> list[tuple[TextRequest, int]]:
        """Returns where the piece would begin in the texts that contain its first mark."""
        at = next((i for i, token in enumerate(piece) if token >= FIRST_MARK), None)
        if at is None:  # after its block was reused, a request may continue at any token
            return [(owner, i) for owner in self._requests for i in range(len(owner.tokens))]
        owners = self._owners.get(piece[at], ())
        return [(owner, place - at) for owner, place in owners if place >= at]


def new_config(visibility: Any) -> NgramConfig:
    return NgramConfig(
        k=K,
        sizes="ladder",
        min_draft_probability=0.01,
        store=visibility,
        store_tokens=ROWS * 1024,
        store_costs=np.ones((16, 56), np.uint8),  # type: ignore[arg-type]
    )


class ScheduledRequest:
    """A request of a scheduler that runs ahead: it observes the end ``lag`` steps later."""

    def __init__(self, request: TextRequest, stop: Stop | None) -> None:
        self.request, self.stop = request, stop
        self.ended: int | None = None
        """The step in which the request ended, unknown to the scheduler."""

    def sample(self, ledger: Ledger, max_tokens: int, step: int) -> list[int]:
        """Returns the sampled tokens of a step; after the request's end, only poison."""
        rng, request, tokens = ledger.rng, self.request, list[int]()
        has_ended = self.ended is not None
        if not has_ended:
            tokens = ledger.next_tokens(request, rng.randint(1, max_tokens))
            if rng.random() < 0.06 or len(request.tokens) > CAPACITY - 40:
                self.ended = step
                if self.stop is not None and max_tokens > 1:  # the tokens after END are poison
                    tokens, has_ended = [*tokens[: max_tokens - 1], END], True
            ledger.add(request, tokens, shared=True)
        if has_ended:
            num_poison = rng.randint(not tokens, max_tokens - len(tokens))
            poison = [ledger.new_mark() for _ in range(num_poison)]
            ledger.add(request, poison, shared=False)
            tokens += poison
        return tokens


class AsyncAttack:
    """Random steps of `AsyncSpecState` with a scheduler that runs ahead. If the host drafts, its
    store lags one step, so a request that has ended may be in one more step."""

    def __init__(self, seed: int, visibility: str, draft_on: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger, self._lag = Ledger(rng), int(draft_on == "host")
        self.state = AsyncSpecState(
            AsyncConfig(
                new_config(visibility),
                max_rows=ROWS,
                row_capacity=CAPACITY,
                max_step_tokens=ROWS * CAPACITY,
                kv_groups=(KVGroup(CAPACITY, 1),),
                draft_on=draft_on,
            )
        )
        self._rows: list[ScheduledRequest | None] = [None] * ROWS
        self._computed: dict[TextRequest, int] = {}
        self._drafted: set[TextRequest] = set()
        """Requests that sampled in the last step, and may have drafts in the next."""
        self._pending = 0
        self.steps = self.row_steps = 0

    @property
    def store(self) -> NgramStore:
        assert self.state.store is not None
        return self.state.store

    def run(self, row_steps: int) -> None:
        while self.row_steps < row_steps:
            self._step()
            if self.rng.random() < 0.004:
                self._rebuild()
            if self.steps % 20 == 0:
                self.check()

    def check(self) -> None:
        self.ledger.check_store(self.store.tensor)
        while self._pending:
            self._reconcile()
        for row, scheduled in self._live():
            known = self.state.known_token_ids(row)
            assert known is not None
            assert known.tolist() == scheduled.request.tokens

    def _reconcile(self) -> None:
        assert not self.state.reconcile().faults
        self._pending -= 1

    def _admission(self, row: int, scheduled: ScheduledRequest) -> Admission:
        request = scheduled.request.begin()
        self._computed[request] = 0
        return Admission(
            row,
            np.array(request.tokens, np.int32),
            (np.array([row], np.int32),),
            scope=request.scope,
            stop=scheduled.stop,
        )

    def _change_rows(self) -> dict[str, Any]:
        rng = self.rng
        removed = []
        for row, scheduled in enumerate(self._rows):
            if scheduled is None:
                continue
            is_late = scheduled.ended is not None and self.steps - scheduled.ended > self._lag
            if is_late or rng.random() < (0.01 if scheduled.ended is None else 0.3):
                self._rows[row] = None
                removed.append(row)
        moves = []
        if rng.random() < 0.1:
            order = rng.sample(range(ROWS), ROWS)
            moves = [(row, order[row]) for row in range(ROWS) if self._rows[row]]
            before = list(self._rows)
            for row in range(ROWS):
                self._rows[order[row]] = before[row]
        new = []
        for row in range(ROWS):
            if self._rows[row] is None and rng.random() < 0.3:
                stop = Stop((END,)) if self._lag and rng.random() < 0.5 else None
                request = self.ledger.new_request(rng.choice(SCOPES))
                scheduled = self._rows[row] = ScheduledRequest(request, stop)
                new.append(self._admission(row, scheduled))
        return {
            "removed": np.array(removed, np.int32),
            "moves": np.array(moves, np.int32).reshape(-1, 2),
            "new": new,
        }

    def _step(self) -> None:
        rng = self.rng
        if self._pending > 1 or (self._pending and rng.random() < 0.5):
            self._reconcile()
        is_dummy = rng.random() < 0.2
        changes = {} if is_dummy else self._change_rows()
        live = [] if is_dummy else self._live()
        batch = rng.sample(live, rng.randint(0, len(live)))
        num_scheduled, num_drafts, sampled = [], [], []
        sampling: set[TextRequest] = set()
        for _, scheduled in batch:
            request = scheduled.request
            num_uncomputed = len(request.tokens) - self._computed[request]
            count = rng.randint(1, num_uncomputed)
            may_verify = request in self._drafted and num_uncomputed == 1
            num_drafts.append(rng.randint(0, K) if may_verify else 0)
            num_scheduled.append(count + num_drafts[-1])
            tokens: list[int] = []
            self._computed[request] += count
            if count == num_uncomputed:
                tokens = scheduled.sample(self.ledger, num_drafts[-1] + 1, self.steps)
                sampling.add(request)
                self._computed[request] = len(request.tokens) - 1
            num_unused = K + 1 - len(tokens)
            padding = [-1 if tokens else self.ledger.new_mark() for _ in range(num_unused)]
            sampled.append([*tokens, *padding])
        self._drafted = sampling
        self.row_steps += len(batch)
        self.steps += bool(batch)
        rows = np.array([row for row, _ in batch], np.int32)
        counts = (np.array(numbers, np.int32) for numbers in (num_scheduled, num_drafts))
        self.state.begin_step(Batch(rows, *counts, **changes))
        matrix = np.array(sampled, np.int32).reshape(len(batch), K + 1)
        outputs = self.state.end_step(torch.from_numpy(matrix))
        self._pending += 1
        drafts = outputs.draft_token_ids.tolist(), outputs.num_draft_tokens.tolist()
        for (_, scheduled), draft, number in zip(batch, *drafts, strict=True):
            assert draft[number:] == [-1] * (K - number)
            assert not number or scheduled.request in sampling, "a draft during prefill"
            self.ledger.check_draft(scheduled.request, draft[:number])

    def _live(self) -> list[tuple[int, ScheduledRequest]]:
        return [(row, request) for row, request in enumerate(self._rows) if request is not None]

    def _rebuild(self) -> None:
        self._rows = [None if r is None or r.ended is not None else r for r in self._rows]
        self._drafted, self._pending = set(), 0
        self.state.rebuild([self._admission(row, request) for row, request in self._live()])
