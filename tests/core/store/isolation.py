"""A model of which text a request may get from a store, and attacks that are checked with it.

All scopes say the same few phrases, so text of another scope would fit everywhere. What follows a
phrase are *marks*: tokens that one request of one scope says first, so a mark shows whose text it
is from. *Poison* is what nobody may get: tokens of padding, of rejected drafts, of requests that
have ended. The model knows texts only; it computes no hashes, blocks or drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ngram_npu import NgramConfig, NgramProposer, NgramStore, scope_of
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup
from ngram_npu.host_drafting import HostDrafting, Stop
from ngram_npu.index import make_index
from ops.reference.store import BLOCK, HEAD_FILL, HEAD_SERIAL, opened

K = 4
ROWS, CAPACITY = 5, 400
SCOPES = [0, 7, scope_of("a"), scope_of("b")]
PHRASES = [[10 * phrase + i for i in range(1, 5)] for phrase in range(6)]
END = 99
"""Token that ends a request which has it as its stop token."""
FIRST_MARK, VOCABULARY = 1000, 1 << 30
BAD_LENGTHS = [-1, -(2**31), CAPACITY + 1, 2**31 - 1]


class Request:
    def __init__(self, scope: int) -> None:
        self.scope = scope
        self.tokens: list[int] = []
        self.shared: list[bool] = []
        """Whether the store may have the token."""
        self.draft: list[int] = []
        """What it got last."""
        self.phrase: list[int] = []

    def begin(self) -> Request:
        """All tokens so far are a prompt. What the request says next begins with a mark."""
        self.draft, self.phrase = [], []
        return self


class Ledger:
    """All texts, and the checks of what comes out of a store."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._owners: dict[int, list[tuple[Request, int]]] = {}
        self._next_mark = FIRST_MARK
        self.drafts = self.from_others = self.stored = 0

    def new_mark(self) -> int:
        self._next_mark += 1
        return self._next_mark

    def add(self, request: Request, tokens: Sequence[int], *, shared: bool) -> None:
        for token in tokens:
            if token >= FIRST_MARK:
                self._owners.setdefault(token, []).append((request, len(request.tokens)))
            request.tokens.append(token)
            request.shared.append(shared)

    def words(self, request: Request, count: int) -> list[int]:
        """The next tokens of a request: marks and phrases, and often what it was drafted."""
        if request.draft and self.rng.random() < 0.4:
            words = request.draft[:count]
        else:
            words = []
        while len(words) < count:
            if request.phrase:
                words.append(request.phrase.pop(0))
                continue
            words.append(self.new_mark())
            if self.rng.random() < 0.4:
                request.phrase = list(self.rng.choice(PHRASES))
        return words

    def prompt(self, scope: int) -> Request:
        """A request that has a prompt."""
        made = Request(scope)
        self.add(made, self.words(made, self.rng.randint(1, CAPACITY // 3)), shared=False)
        return made.begin()

    def check_draft(self, request: Request, tokens: Sequence[int]) -> None:
        """A draft is a piece of the request's own row, or of what one of its scope has said."""
        request.draft = [token for token in tokens if token != END]
        self.drafts += bool(tokens)
        if all(token < FIRST_MARK for token in tokens):
            return
        piece = list(tokens)
        grown = request.tokens + piece  # the draft may read on in itself
        if any(
            whose is request and grown[begin : begin + len(piece)] == piece
            for whose, begin in self._begins(piece)
        ):
            return
        self.from_others += 1
        if not self._said(request.scope, piece):
            raise AssertionError(f"a request of scope {request.scope} was drafted {piece}")

    def check_store(self, tensor: Any) -> None:
        """Each block holds a piece of what one request of its scope has said, and nothing else is
        in the memory for text."""
        words = np.asarray(tensor)
        store = opened(words)
        assert store is not None
        text = words[store.tokens : store.tokens + store.num_blocks * BLOCK]
        text = text.reshape(store.num_blocks, BLOCK)
        for block, tokens in enumerate(text):
            head = store.heads + 8 * block
            scope = store.scope(block)
            fill = store.words[head + HEAD_FILL] if store.words[head + HEAD_SERIAL] else 0
            if tokens[fill:].any():
                raise AssertionError(f"block {block} of scope {scope}: text behind its end")
            if not fill:
                continue
            piece = tokens[:fill].tolist()
            if not self._said(scope, piece):
                raise AssertionError(f"block {block}: nobody in scope {scope} has said {piece}")
            self.stored += fill

    def _said(self, scope: int, piece: list[int]) -> bool:
        """Whether one request of the scope has said this, and the store may have all of it."""
        size = len(piece)
        return any(
            whose.scope == scope
            and whose.tokens[begin : begin + size] == piece
            and all(whose.shared[begin : begin + size])
            for whose, begin in self._begins(piece)
        )

    def _begins(self, piece: list[int]) -> list[tuple[Request, int]]:
        """Where the piece would begin in the texts that have its first mark."""
        at = next((i for i, token in enumerate(piece) if token >= FIRST_MARK), None)
        owners = () if at is None else self._owners.get(piece[at], ())
        return [(whose, place - at) for whose, place in owners if place >= at]  # type: ignore[operator]


def config(visibility: Any) -> NgramConfig:
    return NgramConfig(
        k=K,
        sizes="ladder",
        min_draft_probability=0.01,
        store=visibility,
        store_tokens=ROWS * 1024,
        store_costs=np.ones((16, 56), np.uint8),  # type: ignore[arg-type]
        vocab_size=VOCABULARY,
    )


class ProposerAttack:
    """Random steps of `NgramProposer`. Rows are never cleared, so behind each row's end is text of
    requests that had it before. Free rows have lengths that no row can have."""

    def __init__(self, seed: int, visibility: str, kind: str) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger = Ledger(rng)
        self._by_slots = rng.random() < 0.5
        self.proposer = NgramProposer(config(visibility), num_slots=ROWS)
        self._wrap: Any = torch.from_numpy if kind == "torch" else np.asarray
        self._tokens = np.zeros((ROWS, CAPACITY), np.int32)
        self._lengths = np.zeros(ROWS, np.int32)
        self._arrays = self._wrap(self._tokens), self._wrap(self._lengths)
        self._rows: list[Request | None] = [None] * ROWS
        self._unread = [0] * ROWS
        """Tokens of each row's prompt that are still to come."""
        self._slots = list(range(ROWS))
        self._preempted: list[Request] = []
        self.steps = self.row_steps = 0

    @property
    def store(self) -> NgramStore:
        assert self.proposer.store is not None
        return self.proposer.store

    def run(self, row_steps: int) -> None:
        while self.row_steps < row_steps:
            self._change_rows()
            self._step()
            self.steps += 1
            if self.steps % 20 == 0:
                self.check()

    def check(self) -> None:
        self.ledger.check_store(self.store.tensor)
        for row, request in enumerate(self._rows):
            if request is not None:
                length = self._lengths[row]
                assert self._tokens[row, :length].tolist() == request.tokens[:length]

    def _change_rows(self) -> None:
        rng = self.rng
        for row, request in enumerate(self._rows):
            full = self._lengths[row] == CAPACITY
            if request is not None and (full or rng.random() < 0.02):
                self._rows[row] = None
                if not full and not self._unread[row] and rng.random() < 0.3:
                    self._preempted.append(request)
                if self.proposer.store is not None and rng.random() < 0.6:
                    self.proposer.reset(self._wrap(np.array([self._slot(row), -1, ROWS])))
            if self._rows[row] is None:
                self._lengths[row] = rng.choice(BAD_LENGTHS)
                if rng.random() < 0.3:
                    self._begin(row)
        if rng.random() < 0.05 and self._by_slots:
            a, b = rng.sample(range(ROWS), 2)
            for array in (self._tokens, self._lengths):
                array[[a, b]] = array[[b, a]]
            for of_rows in (self._rows, self._unread, self._slots):
                of_rows[a], of_rows[b] = of_rows[b], of_rows[a]  # type: ignore[index]

    def _slot(self, row: int) -> int:
        return self._slots[row] if self._by_slots else row

    def _begin(self, row: int) -> None:
        if self._preempted and self.rng.random() < 0.5:
            request = self._preempted.pop().begin()
        else:
            request = self.ledger.prompt(self.rng.choice(SCOPES))
        length = len(request.tokens)
        self._rows[row] = request
        self._unread[row] = self.rng.randrange(length)
        self._lengths[row] = length - self._unread[row]
        self._tokens[row, :length] = request.tokens

    def _grow(self, row: int, request: Request) -> None:
        """More of the prompt, or a later prompt of a conversation."""
        if self._unread[row]:
            read = self.rng.randint(0, self._unread[row])
            self._unread[row] -= read
            self._lengths[row] += read
        elif self.rng.random() < 0.03 and self._lengths[row] < CAPACITY // 2:
            begin = len(request.tokens)
            self.ledger.add(request, self.ledger.words(request, 20), shared=True)
            self._tokens[row, begin : begin + 20] = request.tokens[begin:]
            self._lengths[row] += 20

    def _poison(self, count: int) -> list[int]:
        return [self.ledger.new_mark() for _ in range(count)]

    def _step(self) -> None:
        rng, ledger = self.rng, self.ledger
        by_rows = rng.random() < 0.7
        batch = rng.sample(range(ROWS), rng.randint(0, ROWS))
        if not by_rows:
            batch = list(range(len(batch)))
        padding = [-1, -ROWS, ROWS, ROWS + 3, 2**31 - 1, -(2**31)]
        if by_rows:
            batch += rng.choices(padding, k=rng.randint(0, 2)) + batch[: rng.random() < 0.1]
            rng.shuffle(batch)
        size = len(batch)
        self.row_steps += size
        propose = rng.random() < 0.2 and (by_rows or size == ROWS)
        sampled = np.full((size, K + 1), -1, np.int32)
        discard = np.zeros(size, np.bool_)
        num_sampled = np.zeros(size, np.int32)
        scopes = np.array([rng.choice(SCOPES) for _ in batch], np.int64)
        live: list[Request | None] = []
        for i, row in enumerate(batch):
            request = self._rows[row] if 0 <= row < ROWS else None
            live.append(request)
            if request is None or row in batch[:i]:  # padding, which may name a row again
                if request is not None or rng.random() < 0.3:
                    discard[i] = not propose
                else:
                    num_sampled[i] = rng.randint(0, K + 1)
                sampled[i] = self._poison(K + 1)
                continue
            scopes[i] = request.scope
            self._grow(row, request)
            if self._unread[row] or rng.random() < 0.1:
                discard[i] = not propose
                sampled[i] = self._poison(K + 1)
                continue
            begin = int(self._lengths[row])
            words = ledger.words(request, rng.randint(1, K + 1))
            rest = [rng.choice([-1, VOCABULARY]), *self._poison(K)]
            sampled[i] = [*words, *rest][: K + 1]
            num_sampled[i] = len(words) if not propose else min(len(words), CAPACITY - begin)
            ledger.add(request, words[: CAPACITY - begin], shared=True)
        given: dict[str, Any] = {"scopes": self._wrap(scopes)}
        if by_rows:
            given["row_indices"] = self._wrap(np.array(batch, rng.choice([np.int32, np.int64])))
        if self._by_slots:
            slots = [self._slots[row] if 0 <= row < ROWS else rng.choice(padding) for row in batch]
            given["slot_indices"] = self._wrap(np.array(slots, np.int64))
        grown = {row: request for row, request in zip(batch, live, strict=True) if request}
        if propose:
            self._append(grown)
            given["num_sampled"] = self._wrap(num_sampled)
            found = self.proposer.propose(*self._arrays, **given)
        else:
            advance = rng.random() < 0.5
            if discard.any() or rng.random() < 0.5:
                given["discard"] = self._wrap(discard)
            before = self._lengths.copy()
            found = self.proposer.step(*self._arrays, self._wrap(sampled), advance=advance, **given)
            if not advance:
                assert np.array_equal(self._lengths, before)
                self._append(grown)
        drafts, counts = found.draft_token_ids.tolist(), found.num_draft_tokens.tolist()
        for request, draft, count in zip(live, drafts, counts, strict=True):
            assert draft[count:] == [-1] * (K - count)
            if request is None:
                assert not count, "a draft for padding"
            else:
                ledger.check_draft(request, draft[:count])

    def _append(self, grown: dict[int, Request]) -> None:
        """What a runner does that owns its rows and lengths."""
        for row, request in grown.items():
            length = len(request.tokens) - self._unread[row]
            self._tokens[row, :length] = request.tokens[:length]
            self._lengths[row] = length


class Ending:
    """A request that a scheduler runs ahead of: its end becomes known only ``lag`` steps after."""

    def __init__(self, request: Request, stop: Stop | None) -> None:
        self.request, self.stop = request, stop
        self.ended: int | None = None
        """The step in which it ended, unknown to the scheduler."""

    def says(self, ledger: Ledger, most: int, step: int) -> list[int]:
        """What a step samples for it: after its end only poison."""
        rng, request, words = ledger.rng, self.request, list[int]()
        over = self.ended is not None
        if not over:
            words = ledger.words(request, rng.randint(1, most))
            if rng.random() < 0.06 or len(request.tokens) > CAPACITY - 40:
                self.ended = step
                if self.stop is not None and most > 1:  # what follows END is behind the end
                    words, over = [*words[: most - 1], END], True
            ledger.add(request, words, shared=True)
        if over:
            poison = [ledger.new_mark() for _ in range(rng.randint(not words, most - len(words)))]
            ledger.add(request, poison, shared=False)
            words += poison
        return words


class HostAttack:
    """Random jobs of `HostDrafting`, which lags: a request that has ended is in at most ``lag``
    further steps. Between the steps are jobs without requests, as of a dummy run."""

    def __init__(self, seed: int, visibility: str, lag: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger, self._lag = Ledger(rng), lag
        ngram = config(visibility)
        self.store = NgramStore(ROWS, ngram.store_tokens, visibility=visibility)  # type: ignore[arg-type]
        self._fill = rng.random() < 0.5
        self._drafting = HostDrafting(
            ngram,
            num_rows=ROWS,
            capacity=CAPACITY,
            most_sampled=K + 1,
            device=torch.device("cpu"),
            lag=lag,
            index=make_index(ngram, ROWS, ROWS * CAPACITY, kind="numpy"),
            store=self.store,
            fill=self._fill,
        )
        self._rows: list[Ending | None] = [None] * ROWS
        self.steps = self.row_steps = self.dummies = 0

    def run(self, row_steps: int) -> None:
        while self.row_steps < row_steps:
            dummy = self.rng.random() < 0.3
            if not dummy:  # a dummy run is told nothing
                self._announce()
            self._job(dummy=dummy)
            if self.steps % 20 == 0:
                self.check()

    def check(self) -> None:
        self.ledger.check_store(self.store.tensor)

    def _announce(self) -> None:
        rng = self.rng
        for row, of in enumerate(self._rows):
            if of is not None:
                late = of.ended is not None and self.steps - of.ended > self._lag
                if late or rng.random() < (0.01 if of.ended is None else 0.3):
                    self._rows[row] = of = None
                    if rng.random() < 0.7:  # otherwise the next request's begin says it
                        self._drafting.end(row)
                    else:
                        self._begin(row)
            if of is None and self._rows[row] is None and rng.random() < 0.3:
                self._begin(row)

    def _begin(self, row: int) -> None:
        request = self.ledger.prompt(self.rng.choice(SCOPES))
        stop = Stop((END,)) if self.rng.random() < 0.5 else None
        self._rows[row] = Ending(request, stop)
        self._drafting.begin(row, request.tokens, scope=request.scope, stop=stop)

    def _job(self, *, dummy: bool) -> None:
        rng = self.rng
        free = [row for row, of in enumerate(self._rows) if of is None]
        rows = rng.sample([-1, ROWS, 2**31 - 1, -(2**31), *free], rng.randint(0, 3))
        if not dummy:
            live = [row for row in range(ROWS) if row not in free]
            rows += rng.sample(live, rng.randint(0, len(live)))
        rng.shuffle(rows)
        del rows[ROWS:]
        sampled = np.array(
            [[K + 1, *(self.ledger.new_mark() for _ in range(K + 1))] for _ in rows], np.int32
        ).reshape(len(rows), K + 2)
        of_rows = [self._rows[row] if 0 <= row < ROWS else None for row in rows]
        for tokens, of in zip(sampled, of_rows, strict=True):
            if of is not None:
                said = of.says(self.ledger, K + 1, self.steps) if rng.random() < 0.9 else []
                tokens[: 1 + len(said)] = [len(said), *said]
        self.row_steps += len(rows)
        self.steps += any(of_rows)
        self.dummies += not any(of_rows)
        found = self._drafting.propose(np.array(rows, np.int32), torch.from_numpy(sampled))
        drafts, counts = found.draft_token_ids.tolist(), found.num_draft_tokens.tolist()
        for of, draft, count in zip(of_rows, drafts, counts, strict=True):
            if of is None:
                assert not count, "a draft for padding"
                continue
            self.ledger.check_draft(of.request, draft[:count])
            if self._fill:  # what continues the draft, then the newest token
                while draft[-1:] == of.request.tokens[-1:]:
                    draft.pop()
                self.ledger.check_draft(of.request, draft)


class AsyncAttack:
    """Random steps of `AsyncSpecState` under a scheduler that runs ahead. On the host its store
    lags one step, so a request that has ended may be in one more; on the device in none."""

    def __init__(self, seed: int, visibility: str, draft_on: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger, self._lag = Ledger(rng), int(draft_on == "host")
        self.state = AsyncSpecState(
            AsyncConfig(
                config(visibility),
                max_rows=ROWS,
                row_capacity=CAPACITY,
                max_step_tokens=ROWS * CAPACITY,
                kv_groups=(KVGroup(CAPACITY, 1),),
                draft_on=draft_on,
            )
        )
        self._rows: list[Ending | None] = [None] * ROWS
        self._computed: dict[Request, int] = {}
        self._drafted: set[Request] = set()
        """Requests that have sampled in the last step, and so may have drafts in the next."""
        self._pending = 0
        self.steps = self.row_steps = self.dummies = 0

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
        for row, of in enumerate(self._rows):
            if of is not None:
                known = self.state.known_token_ids(row)
                assert known is not None
                assert known.tolist() == of.request.tokens

    def _reconcile(self) -> None:
        assert not self.state.reconcile().faults
        self._pending -= 1

    def _admission(self, row: int, of: Ending) -> Admission:
        request = of.request.begin()
        self._computed[request] = 0
        return Admission(
            row,
            np.array(request.tokens, np.int32),
            (np.array([row], np.int32),),
            scope=request.scope,
            stop=of.stop,
        )

    def _change_rows(self) -> dict[str, Any]:
        rng = self.rng
        removed = []
        for row, of in enumerate(self._rows):
            if of is None:
                continue
            late = of.ended is not None and self.steps - of.ended > self._lag
            if late or rng.random() < (0.01 if of.ended is None else 0.3):
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
                of = self._rows[row] = Ending(self.ledger.prompt(rng.choice(SCOPES)), stop)
                new.append(self._admission(row, of))
        return {
            "removed": np.array(removed, np.int32),
            "moves": np.array(moves, np.int32).reshape(-1, 2),
            "new": new,
        }

    def _step(self) -> None:
        rng = self.rng
        if self._pending > 1 or (self._pending and rng.random() < 0.5):
            self._reconcile()
        if rng.random() < 0.05:
            self._bad_step()
        dummy = rng.random() < 0.2
        changes = {} if dummy else self._change_rows()
        live = [(row, of) for row, of in enumerate(self._rows) if of is not None and not dummy]
        batch = rng.sample(live, rng.randint(0, len(live)))
        scheduled, drafts, sampled = [], [], []
        said: set[Request] = set()
        for _, of in batch:
            request = of.request
            known = len(request.tokens) - self._computed[request]
            count = rng.randint(1, known)
            drafts.append(rng.randint(0, K) if request in self._drafted and known == 1 else 0)
            scheduled.append(count + drafts[-1])
            words: list[int] = []
            self._computed[request] += count
            if count == known:
                words = of.says(self.ledger, drafts[-1] + 1, self.steps)
                said.add(request)
                self._computed[request] = len(request.tokens) - 1
            rest = K + 1 - len(words)
            tail = [-1] * rest if words else [self.ledger.new_mark() for _ in range(rest)]
            sampled.append([*words, *tail])
        self._drafted = said
        self.row_steps += len(batch)
        self.steps += bool(batch)
        self.dummies += not batch
        rows = np.array([row for row, _ in batch], np.int32)
        counts = (np.array(numbers, np.int32) for numbers in (scheduled, drafts))
        self.state.begin_step(Batch(rows, *counts, **changes))
        matrix = np.array(sampled, np.int32).reshape(len(batch), K + 1)
        found = self.state.end_step(torch.from_numpy(matrix))
        self._pending += 1
        of_batch = found.draft_token_ids.tolist(), found.num_draft_tokens.tolist()
        for (_, of), draft, number in zip(batch, *of_batch, strict=True):
            assert draft[number:] == [-1] * (K - number)
            assert not number or of.request in said, "a draft for a request that is in prefill"
            self.ledger.check_draft(of.request, draft[:number])

    def _bad_step(self) -> None:
        free = [row for row, of in enumerate(self._rows) if of is None]
        row = self.rng.choice([-1, ROWS, 2**31 - 1, *free])
        one = np.ones(1, np.int32)
        try:
            self.state.begin_step(Batch(np.array([row], np.int32), one, 0 * one))
        except ValueError:
            return
        raise AssertionError(f"expected row {row} to be rejected")

    def _rebuild(self) -> None:
        self._rows = [None if of is None or of.ended is not None else of for of in self._rows]
        self._drafted, self._pending = set(), 0
        live = [(row, of) for row, of in enumerate(self._rows) if of is not None]
        self.state.rebuild([self._admission(row, of) for row, of in live])
