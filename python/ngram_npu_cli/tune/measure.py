"""Replays many settings over many conversations in pieces, on several processes.

A piece is one setting on one chunk of conversations. Its result is the number of steps of each
conversation by the number of drafted tokens; all other numbers are computed from these numbers.
With a store, the chunk is a stream of conversations, because the store shares text between
conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu._C import set_num_threads
from ngram_npu.proposer import NgramProposer

from ngram_npu_cli.logs.conversations import TokenRequest
from ngram_npu_cli.logs.reader import Progress, ShowProgress, ignore_progress
from ngram_npu_cli.replay.simulation import simulate
from ngram_npu_cli.tune.candidates import Candidate
from ngram_npu_cli.workers import map_in_order

Counts = npt.NDArray[np.int32]
"""[N, K+1], numbers of steps of each request that drafted 0, 1, ..., K tokens."""

_MAX_ROWS = 256
_MAX_TOKENS = 4 << 20
"""Maximum number of rows of a chunk, and of tokens in its buffer. They limit the memory of a
worker."""


def group_requests(requests: Sequence[TokenRequest]) -> list[list[int]]:
    """Returns the numbers of the requests in groups that are replayed together.

    Requests of a group have similar lengths, so that most of a batch runs until its end.
    """
    order = sorted(range(len(requests)), key=lambda i: requests[i].num_generated)
    chunks: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, requests[i].num_tokens)
        is_full = chunks and (
            len(chunks[-1]) == _MAX_ROWS or (len(chunks[-1]) + 1) * longest > _MAX_TOKENS
        )
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
    progress: ShowProgress = ignore_progress,
) -> dict[Candidate, Counts]:
    """Returns for each setting the number of steps of each request by number of drafted tokens.

    Args:
        candidates: The settings.
        requests: The requests; each has at least one step.
        streams: For each store, which is empty at first, the numbers of the requests that use it,
            in order. Each request is in one stream. None: one stream of all requests.
        jobs: Number of processes.
        progress: Called after each piece.
    """
    results = {c: np.zeros((len(requests), c.config.k + 1), np.int32) for c in candidates}
    chunks = [(False, chunk) for chunk in group_requests(requests)]
    if any(candidate.has_store for candidate in candidates):
        chunks += [(True, list(stream)) for stream in streams or [range(len(requests))]]
    # Long chunks are replayed first, so that all processes finish at about the same time.
    pieces = [
        Piece(candidate, chunk)
        for is_stream, chunk in reversed(chunks)
        for candidate in candidates
        if candidate.has_store == is_stream
    ]
    jobs = min(jobs, len(pieces))
    replay = functools.partial(_replay, requests, jobs)
    with closing(map_in_order(replay, pieces, jobs)) as all_counts:
        for done, (piece, counts) in enumerate(zip(pieces, all_counts, strict=True), start=1):
            results[piece.candidate][piece.chunk] = counts
            progress(Progress(f"{len(pieces)} pieces", "replay", done, len(pieces)))
    return results


class Piece(NamedTuple):
    """One setting on one chunk of the requests."""

    candidate: Candidate
    chunk: list[int]


def _replay(requests: Sequence[TokenRequest], jobs: int, piece: Piece) -> Counts:
    if jobs > 1:  # in a worker process
        set_num_threads(1)
    candidate, config = piece.candidate, piece.candidate.config
    requests = [requests[number] for number in piece.chunk]
    # With a store, each turn is a request, as in vLLM, so that only completions enter the store.
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
