"""Random steps that could mix the texts of a store, and a model that detects mixed texts.

All scopes use the same few phrases, so that text of another scope would match everywhere. Marks
follow a phrase. A *mark* is a token that no request has generated before, so it identifies its
request. *Poison* tokens must never be drafted: tokens of padding and of requests that have ended.
The model only records texts. It computes no hashes, blocks or drafts.
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

    def make_mark(self) -> int:
        self._next_mark += 1
        return self._next_mark

    def add_tokens(self, request: TextRequest, tokens: Sequence[int], *, may_store: bool) -> None:
        for token in tokens:
            if token >= FIRST_MARK:
                self._owners.setdefault(token, []).append((request, len(request.tokens)))
            request.tokens.append(token)
            request.may_store.append(may_store)

    def generate_tokens(self, request: TextRequest, count: int) -> list[int]:
        """Returns the next tokens of a request: marks and phrases, and often its last draft."""
        accepts_draft = request.draft and self.rng.random() < 0.4
        tokens = request.draft[:count] if accepts_draft else []
        while len(tokens) < count:
            if request.phrase:
                tokens.append(request.phrase.pop(0))
                continue
            tokens.append(self.make_mark())
            if self.rng.random() < 0.4:
                request.phrase = list(self.rng.choice(PHRASES))
        return tokens

    def make_request(self, scope: int) -> TextRequest:
        """Returns a request with a prompt."""
        request = TextRequest(scope)
        self._requests.append(request)
        prompt = self.generate_tokens(request, self.rng.randint(1, CAPACITY // 3))
        self.add_tokens(request, prompt, may_store=False)
        return request.begin()

    def check_draft(self, request: TextRequest, tokens: Sequence[int]) -> None:
        """Checks that a draft occurs in the request's row, or in a text of the request's scope."""
        request.draft = [token for token in tokens if token != END]
        self.num_drafts += bool(tokens)
        if all(token < FIRST_MARK for token in tokens):
            return
        piece = list(tokens)
        row = request.tokens + piece  # with overlap, a draft may continue with its own first tokens
        if any(
            owner is request and row[begin : begin + len(piece)] == piece
            for owner, begin in self._find_occurrences(piece)
        ):
            return
        self.num_foreign_drafts += 1
        if not self._is_shared_text(request.scope, piece):
            raise AssertionError(f"scope {request.scope}: foreign text was drafted: {piece}")

    def check_store(self, tensor: Any) -> None:
        """Checks that each block contains tokens in a row of one text of its scope, and that the
        unused memory for text is zero."""
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
            self.num_stored += fill

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


def make_config(visibility: Any) -> NgramConfig:
    return NgramConfig(
        k=K,
        sizes="ladder",
        min_draft_probability=0.01,
        store=visibility,
        store_tokens=ROWS * 1024,
        store_costs=np.ones((16, 56), np.uint8),  # type: ignore[arg-type]
    )


class ScheduledRequest:
    """A request of a scheduler that runs ahead of the device and learns of the end late."""

    def __init__(self, request: TextRequest, stop: Stop | None) -> None:
        self.request, self.stop = request, stop
        self.end_step: int | None = None
        """The step in which the request ended, unknown to the scheduler."""

    def sample(self, ledger: Ledger, max_tokens: int, step: int) -> list[int]:
        """Returns the sampled tokens of a step; after the request's end, only poison."""
        rng, request, tokens = ledger.rng, self.request, list[int]()
        has_ended = self.end_step is not None
        if not has_ended:
            tokens = ledger.generate_tokens(request, rng.randint(1, max_tokens))
            if rng.random() < 0.06 or len(request.tokens) > CAPACITY - 40:
                self.end_step = step
                if self.stop is not None and max_tokens > 1:  # the tokens after END are poison
                    tokens, has_ended = [*tokens[: max_tokens - 1], END], True
            ledger.add_tokens(request, tokens, may_store=True)
        if has_ended:
            num_poison = rng.randint(not tokens, max_tokens - len(tokens))
            poison = [ledger.make_mark() for _ in range(num_poison)]
            ledger.add_tokens(request, poison, may_store=False)
            tokens += poison
        return tokens


class RandomAsyncSteps:
    """Random steps of `AsyncSpecState` with a scheduler that runs ahead of the device. If the host
    drafts, text is stored one step later, so an ended request may be in one more step."""

    def __init__(self, seed: int, visibility: str, draft_on: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger, self._lag = Ledger(rng), int(draft_on == "host")
        self.state = AsyncSpecState(
            AsyncConfig(
                make_config(visibility),
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
        self._num_unreconciled = 0
        self.num_steps = self.num_row_steps = 0

    @property
    def store(self) -> NgramStore:
        assert self.state.store is not None
        return self.state.store

    def run(self, num_row_steps: int) -> None:
        while self.num_row_steps < num_row_steps:
            self._step()
            if self.rng.random() < 0.004:
                self._rebuild()
            if self.num_steps % 20 == 0:
                self.check()

    def check(self) -> None:
        self.ledger.check_store(self.store.tensor)
        while self._num_unreconciled:
            self._reconcile()
        for row, scheduled_request in self._list_scheduled():
            known_tokens = self.state.known_token_ids(row)
            assert known_tokens is not None
            assert known_tokens.tolist() == scheduled_request.request.tokens

    def _reconcile(self) -> None:
        assert not self.state.reconcile().faults
        self._num_unreconciled -= 1

    def _make_admission(self, row: int, scheduled_request: ScheduledRequest) -> Admission:
        request = scheduled_request.request.begin()
        self._computed[request] = 0
        return Admission(
            row,
            np.array(request.tokens, np.int32),
            (np.array([row], np.int32),),
            scope=request.scope,
            stop=scheduled_request.stop,
        )

    def _change_rows(self) -> dict[str, Any]:
        rng = self.rng
        removed_rows = []
        for row, scheduled_request in enumerate(self._rows):
            if scheduled_request is None:
                continue
            end_step = scheduled_request.end_step
            is_late = end_step is not None and self.num_steps - end_step > self._lag
            if is_late or rng.random() < (0.01 if end_step is None else 0.3):
                self._rows[row] = None
                removed_rows.append(row)
        moves = []
        if rng.random() < 0.1:
            order = rng.sample(range(ROWS), ROWS)
            moves = [(row, order[row]) for row in range(ROWS) if self._rows[row]]
            old_rows = list(self._rows)
            for row in range(ROWS):
                self._rows[order[row]] = old_rows[row]
        admissions = []
        for row in range(ROWS):
            if self._rows[row] is None and rng.random() < 0.3:
                stop = Stop((END,)) if self._lag and rng.random() < 0.5 else None
                request = self.ledger.make_request(rng.choice(SCOPES))
                scheduled_request = self._rows[row] = ScheduledRequest(request, stop)
                admissions.append(self._make_admission(row, scheduled_request))
        return {
            "removed": np.array(removed_rows, np.int32),
            "moves": np.array(moves, np.int32).reshape(-1, 2),
            "new": admissions,
        }

    def _step(self) -> None:
        rng = self.rng
        if self._num_unreconciled > 1 or (self._num_unreconciled and rng.random() < 0.5):
            self._reconcile()
        is_dummy = rng.random() < 0.2
        changes = {} if is_dummy else self._change_rows()
        candidates = [] if is_dummy else self._list_scheduled()
        batch = rng.sample(candidates, rng.randint(0, len(candidates)))
        num_scheduled, num_drafts, sampled = [], [], []
        sampling: set[TextRequest] = set()
        for _, scheduled_request in batch:
            request = scheduled_request.request
            num_uncomputed = len(request.tokens) - self._computed[request]
            count = rng.randint(1, num_uncomputed)
            may_verify = request in self._drafted and num_uncomputed == 1
            num_drafts.append(rng.randint(0, K) if may_verify else 0)
            num_scheduled.append(count + num_drafts[-1])
            tokens: list[int] = []
            self._computed[request] += count
            if count == num_uncomputed:
                tokens = scheduled_request.sample(self.ledger, num_drafts[-1] + 1, self.num_steps)
                sampling.add(request)
                self._computed[request] = len(request.tokens) - 1
            num_unused = K + 1 - len(tokens)
            padding = [-1 if tokens else self.ledger.make_mark() for _ in range(num_unused)]
            sampled.append([*tokens, *padding])
        self._drafted = sampling
        self.num_row_steps += len(batch)
        self.num_steps += bool(batch)
        rows = np.array([row for row, _ in batch], np.int32)
        counts = (np.array(numbers, np.int32) for numbers in (num_scheduled, num_drafts))
        self.state.begin_step(Batch(rows, *counts, **changes))
        matrix = np.array(sampled, np.int32).reshape(len(batch), K + 1)
        outputs = self.state.end_step(torch.from_numpy(matrix))
        self._num_unreconciled += 1
        drafts = outputs.draft_token_ids.tolist(), outputs.num_draft_tokens.tolist()
        for (_, scheduled_request), draft, count in zip(batch, *drafts, strict=True):
            assert draft[count:] == [-1] * (K - count)
            assert not count or scheduled_request.request in sampling, "a draft during prefill"
            self.ledger.check_draft(scheduled_request.request, draft[:count])

    def _list_scheduled(self) -> list[tuple[int, ScheduledRequest]]:
        return [(row, request) for row, request in enumerate(self._rows) if request is not None]

    def _rebuild(self) -> None:
        self._rows = [None if r is None or r.end_step is not None else r for r in self._rows]
        self._drafted, self._num_unreconciled = set(), 0
        scheduled_rows = self._list_scheduled()
        self.state.rebuild([self._make_admission(row, request) for row, request in scheduled_rows])
