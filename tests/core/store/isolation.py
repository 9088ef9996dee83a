"""Random steps that could mix the texts of a store, and a model that detects mixed texts.

All scopes use the same few phrases, so that text of another scope would match everywhere. Marks
follow a phrase. A *mark* is a token that no request has generated before, so it identifies its
request. *Poison* tokens must never be drafted: tokens of padding and of requests that have ended.
The model only records texts. It computes no hashes, blocks or drafts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from ngram_npu import PRIVATE_SCOPE, NgramConfig, NgramProposer, NgramStore, Scope, scope_of
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup
from ngram_npu.store.contents import HEAD_FILL, HEAD_NUMBER, read_scopes

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
        self.end_step: int | None = None
        """The step in which the request ended, unknown to the scheduler."""

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
            request.may_store.append(may_store and request.scope != PRIVATE_SCOPE)

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

    def check_draft(self, request: TextRequest, tokens: Sequence[int]) -> None:
        """Checks that a draft occurs in the request's row, or in a text of the request's scope."""
        request.draft = list(tokens)
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
    """Random steps with a store that is cleared and warmed."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger = Ledger(rng)
        self.store = NgramStore(num_blocks * 256, num_slots=ROWS)
        self.rows: list[TextRequest | None] = [None] * ROWS
        self.num_steps = self.num_row_steps = 0

    def run(self, num_row_steps: int) -> None:
        while self.num_row_steps < num_row_steps:
            if self.rng.random() < 0.004:
                scope = self.rng.choice(SCOPES[:3])
                self.store.clear(scope)
                self.ledger.forget(scope)
            if self.rng.random() < 0.01:
                self._warm(self.rng.choice(SCOPES[:3]))
            self.step()
            if self.num_steps % 20 == 0:
                self.check()
        self.check()
        self.store.check_integrity()

    def _warm(self, scope: Scope) -> None:
        request = self.ledger.make_request(scope)
        begin = len(request.tokens)
        tokens = self.ledger.generate_tokens(request, self.rng.randint(1, 300))
        self.ledger.add_tokens(request, tokens, may_store=True)
        self.store.warm([request.tokens[begin:]], scope=scope)

    def check(self) -> None:
        self.ledger.check_store(self.store)

    def step(self) -> None:
        raise NotImplementedError

    def list_rows(self) -> list[tuple[int, TextRequest]]:
        return [(row, request) for row, request in enumerate(self.rows) if request is not None]

    def sample(self, request: TextRequest, max_tokens: int) -> list[int]:
        """Returns the sampled tokens of a step; after the request's end, only poison."""
        rng, ledger = self.rng, self.ledger
        has_ended = request.end_step is not None
        if has_ended:
            tokens = [ledger.make_mark() for _ in range(rng.randint(1, max_tokens))]
        else:
            tokens = ledger.generate_tokens(request, rng.randint(1, max_tokens))
            if rng.random() < 0.06 or len(request.tokens) > CAPACITY - 40:
                request.end_step = self.num_steps
        ledger.add_tokens(request, tokens, may_store=not has_ended)
        return tokens


class RandomSynchronousSteps(RandomSteps):
    """Steps of a runner like V1 of vLLM, which tells the proposer nothing about rows: they are
    swapped, condensed, preempted and reused. The store is saved, and loaded by another process."""

    def __init__(self, seed: int, num_blocks: int = 512) -> None:
        super().__init__(seed, num_blocks)
        self.proposer = NgramProposer(CONFIG, store=self.store)
        self.token_ids = np.zeros((ROWS, CAPACITY), np.int32)
        self.lengths = np.zeros(ROWS, np.int32)
        self._preempted: list[TextRequest] = []

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.01:
            with TemporaryDirectory() as folder:
                self.store.save(f"{folder}/store")
                self.store = NgramStore.load(f"{folder}/store")
            self.proposer = NgramProposer(CONFIG, store=self.store)
        self._change_rows()
        sampled = np.zeros(ROWS, np.int32)
        scopes = np.zeros(ROWS, np.int64)
        for row, request in self.list_rows():
            scopes[row] = request.scope
            if rng.random() < 0.8:
                tokens = self.sample(request, K + 1)
                sampled[row] = len(tokens)
                self.num_row_steps += 1
            self.token_ids[row, : len(request.tokens)] = request.tokens
            self.lengths[row] = len(request.tokens)
        self.num_steps += 1
        drafts = self.proposer.propose(
            self.token_ids, self.lengths, num_sampled=sampled, scopes=scopes
        )
        counts = drafts.num_draft_tokens.tolist()
        for row, request in self.list_rows():
            assert not counts[row] or sampled[row], "a draft for a request that sampled nothing"
            self.ledger.check_draft(request, drafts.draft_token_ids[row, : counts[row]].tolist())

    def _change_rows(self) -> None:
        rng, rows = self.rng, self.rows
        for row, request in self.list_rows():
            if request.end_step is not None:
                rows[row] = None
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


class RandomAsyncSteps(RandomSteps):
    """Random steps of `AsyncSpecState` with a scheduler that runs ahead of the device. An ended
    request may be in one more step, whose tokens must not be stored."""

    def __init__(self, seed: int, num_blocks: int = 512) -> None:
        super().__init__(seed, num_blocks)
        self.state = AsyncSpecState(
            AsyncConfig(
                CONFIG,
                max_rows=ROWS,
                row_capacity=CAPACITY,
                max_step_tokens=ROWS * CAPACITY,
                kv_groups=(KVGroup(CAPACITY, 1),),
            ),
            store=self.store,
        )
        self._computed: dict[TextRequest, int] = {}
        self._drafted: set[TextRequest] = set()
        """Requests that sampled in the last step, and may have drafts in the next."""
        self._num_unreconciled = 0

    def check(self) -> None:
        super().check()
        while self._num_unreconciled:
            self._reconcile()
        for row, request in self.list_rows():
            known_tokens = self.state.known_token_ids(row)
            assert known_tokens is not None
            assert known_tokens.tolist() == request.tokens

    def _reconcile(self) -> None:
        assert not self.state.reconcile().faults
        self._num_unreconciled -= 1

    def _make_admission(self, row: int, request: TextRequest) -> Admission:
        self._computed[request.begin()] = 0
        tokens = np.array(request.tokens, np.int32)
        return Admission(row, tokens, (np.array([row], np.int32),), scope=request.scope)

    def _change_rows(self) -> dict[str, Any]:
        rng = self.rng
        removed_rows = []
        for row, request in self.list_rows():
            is_late = request.end_step is not None and self.num_steps - request.end_step > 1
            if is_late or rng.random() < (0.01 if request.end_step is None else 0.3):
                self.rows[row] = None
                removed_rows.append(row)
        moves = []
        if rng.random() < 0.1:
            order = rng.sample(range(ROWS), ROWS)
            moves = [(row, order[row]) for row, _ in self.list_rows()]
            old_rows = list(self.rows)
            for row in range(ROWS):
                self.rows[order[row]] = old_rows[row]
        admissions = []
        for row in range(ROWS):
            if self.rows[row] is None and rng.random() < 0.3:
                request = self.rows[row] = self.ledger.make_request(rng.choice(SCOPES))
                admissions.append(self._make_admission(row, request))
        return {
            "removed": np.array(removed_rows, np.int32),
            "moves": np.array(moves, np.int32).reshape(-1, 2),
            "new": admissions,
        }

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.004:
            self._rebuild()
        if self._num_unreconciled > 1 or (self._num_unreconciled and rng.random() < 0.5):
            self._reconcile()
        is_dummy = rng.random() < 0.2
        changes = {} if is_dummy else self._change_rows()
        candidates = [] if is_dummy else self.list_rows()
        batch = rng.sample(candidates, rng.randint(0, len(candidates)))
        num_scheduled, num_drafts, sampled = [], [], []
        sampling: set[TextRequest] = set()
        for _, request in batch:
            num_uncomputed = len(request.tokens) - self._computed[request]
            count = rng.randint(1, num_uncomputed)
            may_verify = request in self._drafted and num_uncomputed == 1
            num_drafts.append(rng.randint(0, K) if may_verify else 0)
            num_scheduled.append(count + num_drafts[-1])
            tokens: list[int] = []
            self._computed[request] += count
            if count == num_uncomputed:
                tokens = self.sample(request, num_drafts[-1] + 1)
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
        for (_, request), draft, count in zip(batch, *drafts, strict=True):
            assert draft[count:] == [-1] * (K - count)
            assert not count or request in sampling, "a draft during prefill"
            self.ledger.check_draft(request, draft[:count])

    def _rebuild(self) -> None:
        self.rows = [None if r is None or r.end_step is not None else r for r in self.rows]
        self._drafted, self._num_unreconciled = set(), 0
        self.state.rebuild(
            [self._make_admission(row, request) for row, request in self.list_rows()]
        )
