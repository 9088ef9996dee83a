"""Replays many settings over many conversations in pieces, on several processes; can be resumed.

A piece is one setting on one chunk of conversations. Its result is the number of steps of each
conversation by the number of drafted tokens; all other numbers are computed from that. A store
carries text from one conversation to the next, so with one, a piece is a stream of conversations.
"""

from __future__ import annotations

import base64
import hashlib
import json
import multiprocessing
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError

from ngram_npu_cli.logs.conversations import TokenRequest
from ngram_npu_cli.replay.simulation import simulate
from ngram_npu_cli.tune.candidates import Candidate

Counts = npt.NDArray[np.int32]
"""[N, K+1], steps of each request that drafted 0, 1, ..., K tokens."""

_ROWS = 256
_TOKENS = 4 << 20
"""Maximum rows of a chunk and tokens of its buffer, which bound a worker's memory."""


def group_requests(requests: Sequence[TokenRequest]) -> list[list[int]]:
    """Groups the numbers of the requests that are replayed together.

    Requests of a group have similar lengths, so that a batch stays full to its end.
    """
    generated = [sum(end - start for start, end in r.spans()) for r in requests]
    order = sorted(range(len(requests)), key=lambda i: (generated[i], i))
    chunks: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, requests[i].num_tokens)
        is_full = chunks and (len(chunks[-1]) == _ROWS or (len(chunks[-1]) + 1) * longest > _TOKENS)
        if not chunks or is_full:
            chunks.append([])
            longest = requests[i].num_tokens
        chunks[-1].append(i)
    return chunks


def measure_settings(
    candidates: Sequence[Candidate],
    requests: Sequence[TokenRequest],
    *,
    streams: Sequence[Sequence[int]] | None = None,
    jobs: int = 1,
    cache: Cache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Candidate, Counts]:
    """Returns for each setting a [N, K+1] array: each request's steps by number of drafted tokens.

    Args:
        candidates: The settings.
        requests: The requests; each has at least one step.
        streams: Numbers of the requests that share a store, in order; the store is empty at first.
            Each request is in one stream. None: one stream of all requests.
        jobs: Number of processes.
        cache: Finished pieces, which are not replayed again.
        progress: Called with the number of finished pieces and of all pieces.
    """
    cache = Cache(None) if cache is None else cache
    results = {c: np.zeros((len(requests), c.config.k + 1), np.int32) for c in candidates}
    chunks = [(False, chunk) for chunk in group_requests(requests)]
    if any(candidate.has_store for candidate in candidates):
        chunks += [(True, list(stream)) for stream in streams or [range(len(requests))]]
    pending: list[Piece] = []
    total = 0
    # Long chunks are replayed first, so that all processes finish at about the same time.
    for is_stream, chunk in reversed(chunks):
        digest = _digest_requests(requests[n] for n in chunk)
        for candidate in candidates:
            if candidate.has_store != is_stream:
                continue
            total += 1
            piece = Piece(candidate, chunk, _make_key(candidate, digest))
            counts = cache.get(piece.key, (len(chunk), candidate.config.k + 1))
            if counts is None:
                pending.append(piece)
            else:
                results[candidate][chunk] = counts
    show = progress or (lambda done, total: None)
    done = total - len(pending)
    show(done, total)
    for piece, counts in _replay_pieces(requests, pending, jobs):
        results[piece.candidate][piece.chunk] = counts
        cache.add(piece.key, counts)
        done += 1
        show(done, total)
    return results


class Piece(NamedTuple):
    """One setting on one chunk of the requests, and the key of its result in the cache."""

    candidate: Candidate
    chunk: list[int]
    key: str


def _replay_pieces(
    requests: Sequence[TokenRequest], pieces: Sequence[Piece], jobs: int
) -> Iterator[tuple[Piece, Counts]]:
    if jobs == 1 or len(pieces) < 2:
        for piece in pieces:
            yield piece, _replay([requests[n] for n in piece.chunk], piece.candidate)
        return
    pool = ProcessPoolExecutor(
        min(jobs, len(pieces)),
        mp_context=multiprocessing.get_context("fork"),
        initializer=_initialize_worker,
        initargs=(requests,),
    )
    try:
        running = {pool.submit(_replay_inherited, piece): piece for piece in pieces}
        for future in as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_requests: Sequence[TokenRequest] = ()
"""The requests of a worker process, which inherits them from its parent without a copy."""


def _initialize_worker(requests: Sequence[TokenRequest]) -> None:
    global _requests
    from ngram_npu._C import set_num_threads

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    set_num_threads(1)
    _requests = requests


def _replay_inherited(piece: Piece) -> Counts:
    return _replay([_requests[n] for n in piece.chunk], piece.candidate)


def _replay(requests: Sequence[TokenRequest], candidate: Candidate) -> Counts:
    from ngram_npu.proposer import NgramProposer

    config = candidate.config
    # As in vLLM each turn is a request, so that only completions enter a store.
    turns = [r.split_turns() if candidate.has_store else [r] for r in requests]
    request_of_turn = np.repeat(np.arange(len(requests)), [len(part) for part in turns])
    counts: Counts = np.zeros((len(requests), config.k + 1), np.int32)

    def observe(active_turns: npt.NDArray[np.int64], drafted: npt.NDArray[np.int64]) -> None:
        counts[request_of_turn[active_turns], drafted] += 1

    simulate(
        "",
        list(chain.from_iterable(turns)),
        NgramProposer(config, "index" if config.fits_index else "scan"),
        k=config.k,
        batch_size=1 if candidate.has_store else len(requests),
        padded=candidate.drafts == "padded",
        observe=observe,
    )
    return counts


def _digest_requests(requests: Iterator[TokenRequest]) -> str:
    digest = hashlib.sha256()
    for request in requests:
        digest.update(repr([(len(t.prompt), len(t.completion)) for t in request.turns]).encode())
        digest.update(request.tokens().tobytes())
    return digest.hexdigest()


def _make_key(candidate: Candidate, chunk: str) -> str:
    """Hashes everything that a piece's result depends on, including the drafter's version."""
    from ngram_npu.config import CONTRACT_VERSION, default_costs, default_store_costs

    costs = zlib.crc32(default_costs().tobytes() + default_store_costs().tobytes())
    key = json.dumps([CONTRACT_VERSION, costs, candidate.options, candidate.drafts, chunk])
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Cache:
    """Finished pieces in a file of JSON lines; each piece is written immediately."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._entries: dict[str, str] = {}
        if path is None or not path.is_file():  # reading a device may never end
            return
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._entries[entry["key"]] = entry["counts"]
        except ValueError:
            pass  # the last line of an interrupted run may be incomplete; the piece is repeated
        except (OSError, LookupError, TypeError) as error:
            raise InputError(f"{path}: not a cache of ngram-npu tune: {error}") from error

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str, shape: tuple[int, int]) -> Counts | None:
        if key not in self._entries:
            return None
        raw = zlib.decompress(base64.b85decode(self._entries[key]))
        return np.frombuffer(raw, np.int32).reshape(shape)

    def add(self, key: str, counts: Counts) -> None:
        if self.path is None:
            return
        packed = base64.b85encode(zlib.compress(counts.astype("<i4").tobytes(), 1)).decode()
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "counts": packed}) + "\n")
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror or error}"
            ) from error
