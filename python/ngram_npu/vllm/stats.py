"""What the drafter counts, in the log and in Prometheus.

How much of all drafts was accepted vLLM counts itself, in its ``SpecDecoding metrics`` line and as
``vllm:spec_decode_*``, for this method as for any other. The option ``metrics`` adds of which
matches and at which positions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import numpy.typing as npt

from ngram_npu.vllm.engines import Int32Array
from ngram_npu.vllm.options import Options

logger = logging.getLogger("vllm.ngram_npu")

Rows = slice | npt.NDArray[np.intp]

_LABELS = ("model_name", "engine")
_COUNTERS = {
    "proposals": ("ngram_npu_proposals", "Steps for which drafts were looked for."),
    "rows": ("ngram_npu_rows", "Requests looked up, summed over steps."),
    "drafts": ("ngram_npu_drafts", "Requests for which there was a draft, summed over steps."),
    "tokens": ("ngram_npu_draft_tokens", "Draft tokens that were found."),
    "seconds": ("ngram_npu_propose_seconds", "Time spent in propose()."),
}
_SOURCE_ROWS = "ngram_npu_source_rows", "Requests looked up, by what answered."
_NEURAL = "neural"
"""In place of the length of a match: drafts of the neural drafter beside which ours are."""
_BY_MATCH = (
    ("ngram_npu_verified_tokens", "Draft tokens whose verification the drafter saw."),
    ("ngram_npu_accepted_tokens", "Of these, accepted."),
)
# A counter's name can be registered once in a process, while engines come and go.
_registered: dict[str, Any] = {}


class Stats:
    """The counters of one engine; in the log a line for each of vLLM's own intervals in which there
    was work, the last one's at the latest when the process or the engine ends."""

    def __init__(self, vllm_config: Any, options: Options, rows: int | None = None) -> None:
        """``rows`` there can be; None: ``max_num_seqs``."""
        self._tally = tally = _Tally(vllm_config, options, rows or options.max_num_seqs)
        Finalize(self, tally.end_interval, exitpriority=0)

    def observe(
        self,
        seconds: float,
        rows: Rows,
        values: Sequence[Int32Array] | Int32Array,
        rows_indexed: int,
    ) -> None:
        """One call of ``propose()``.

        Args:
            seconds: how long it took.
            rows: [B], a request's row, which is the same as long as the request does not move.
            values: four of [B]. Lengths, with what was sampled; num_sampled, 0: nothing was looked
                for; match_len and counts: what was found, before anything fills a draft up, or a
                match_len of 0 and the tokens of a neural draft.
            rows_indexed: rows that the index has answered since it was made.
        """
        tally = self._tally
        with tally.lock:
            tally.observe(seconds, *values[1:])
            if tally.verdicts is not None:
                tally.rows_indexed = rows_indexed
                tally.verdicts.observe(rows, *values)


class Verdicts:
    """Verified and accepted draft tokens by the length of their match and by position.

    A step samples one token more than it accepts. That is the verdict on the draft that its row got
    last, if the row has since grown by what was sampled and by nothing else. So what the drafts of
    requests that ended, or whose row moved, came to is not counted.
    """

    def __init__(self, rows: int, max_n: int, k: int) -> None:
        self._lengths = np.full(rows, -1, np.int64)  # as the draft was made; -1: there is none
        self._drafts = np.zeros((2, rows), np.int64)  # length of the match, tokens found
        self._ends = np.zeros((2, max_n + 1, k + 1), np.int64)  # drafts by tokens found, accepted

    def observe(
        self,
        rows: Rows,
        lengths: Int32Array,
        num_sampled: Int32Array,
        match_len: Int32Array,
        counts: Int32Array,
    ) -> None:
        known = (num_sampled > 0) & (self._lengths[rows] == lengths - num_sampled)
        match, found = self._drafts[:, rows][:, known]
        np.add.at(self._ends[0], (match, found), 1)
        np.add.at(self._ends[1], (match, np.minimum(num_sampled[known] - 1, found)), 1)
        self._lengths[rows] = np.where(num_sampled > 0, lengths, -1)
        self._drafts[:, rows] = match_len, counts

    def take(self) -> npt.NDArray[np.int64]:
        """[2, max_n + 1, k]: verified tokens and, of these, accepted ones, since the last call."""
        tokens = self._ends[:, :, :0:-1].cumsum(axis=2)[:, :, ::-1]
        self._ends[:] = 0
        return tokens


class _Tally:
    """What :class:`Stats` counts. It does not hold it, and so learns when nobody does any more."""

    def __init__(self, vllm_config: Any, options: Options, rows: int) -> None:
        config = options.ngram
        self._interval = _log_interval()
        self._labels = {
            "model_name": str(getattr(vllm_config.model_config, "served_model_name", "")),
            "engine": str(getattr(vllm_config.parallel_config, "data_parallel_rank", 0)),
        }
        self._counters = {k: self._counter(name, text) for k, (name, text) in _COUNTERS.items()}
        self._sums: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self._is_beside = options.beside
        self._since = 0.0
        self._timer: threading.Timer | None = None
        self.lock = threading.Lock()
        self.verdicts: Verdicts | None = None
        if options.metrics:
            self.verdicts = Verdicts(rows, config.max_n, config.k)
        self.rows_indexed = self._rows_indexed_before = 0

    def observe(
        self, seconds: float, num_sampled: Int32Array, match_len: Int32Array, counts: Int32Array
    ) -> None:
        if self._is_beside:
            counts = counts * (match_len > 0)
        amounts = {
            "proposals": 1,
            "rows": int(np.count_nonzero(num_sampled)),
            "drafts": int(np.count_nonzero(counts)),
            "tokens": int(counts.sum()),
            "seconds": seconds,
        }
        for name, amount in amounts.items():
            self._sums[name] += amount
        for name, counter in self._counters.items():
            counter.inc(amounts[name])
        if self._timer is None:
            self._since = time.perf_counter() - seconds
            self._timer = threading.Timer(self._interval, self.end_interval)
            self._timer.daemon = True
            self._timer.start()

    def end_interval(self) -> None:
        with self.lock:
            if self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            sums, self._sums = self._sums, dict.fromkeys(_COUNTERS, 0)
            elapsed = time.perf_counter() - self._since
            tokens = None if self.verdicts is None else self.verdicts.take()
            indexed = self.rows_indexed - self._rows_indexed_before
            self._rows_indexed_before = self.rows_indexed
        logger.info(
            "ngram_npu metrics: last %.1f s: %d proposals, %.3f ms each, %d of %d rows drafted "
            "(%.1f%%), %.2f tokens per draft",
            elapsed,
            sums["proposals"],
            1e3 * sums["seconds"] / sums["proposals"],
            sums["drafts"],
            sums["rows"],
            100 * sums["drafts"] / max(sums["rows"], 1),
            sums["tokens"] / max(sums["drafts"], 1),
        )
        if tokens is not None:
            rows, drafts = int(sums["rows"]), int(sums["drafts"])
            answered = {"index": indexed, "scan": rows - indexed}
            if self._is_beside:
                answered = {"ngram": drafts, _NEURAL: rows - drafts}
            self._end_detail(tokens, answered)

    def _end_detail(self, tokens: npt.NDArray[np.int64], rows: dict[str, int]) -> None:
        logger.info(
            "ngram_npu acceptance: by match length %s; by position %s; rows from %s",
            _shares(tokens.sum(axis=2), first=_NEURAL),
            _shares(tokens.sum(axis=1)),
            ", ".join(f"{source}: {count}" for source, count in rows.items()),
        )
        for source, count in rows.items():
            self._counter(*_SOURCE_ROWS, source=source).inc(count)
        for (name, text), table in zip(_BY_MATCH, tokens, strict=True):
            for match_len, position in np.argwhere(table):
                labels = {"match_len": str(match_len or _NEURAL), "position": str(position)}
                self._counter(name, text, **labels).inc(int(table[match_len, position]))

    def _counter(self, name: str, text: str, **more: str) -> Any:
        """A counter in prometheus_client's default registry, the one vLLM's ``/metrics`` serves.
        Where PROMETHEUS_MULTIPROC_DIR is set they are files instead, which ``/metrics`` gathers;
        counters add up over processes, so that nothing else need be decided here."""
        try:
            import prometheus_client
        except ImportError:  # not vLLM's doing: it cannot start without
            return _Uncounted
        if name not in _registered:
            _registered[name] = prometheus_client.Counter(name, text, (*_LABELS, *more))
        return _registered[name].labels(**self._labels, **more)


class _Uncounted:
    """For a counter, where there are none."""

    @staticmethod
    def inc(amount: float) -> None: ...


def _shares(tokens: npt.NDArray[np.int64], first: str = "0") -> str:
    """``3: 41% of 120`` for each of [2, N], verified and accepted, where there are any."""
    columns = enumerate(tokens.T.tolist())
    shares = [
        f"{i or first}: {100 * part / whole:.0f}% of {whole}"
        for i, (whole, part) in columns
        if whole
    ]
    return ", ".join(shares) or "none"


def _log_interval() -> float:
    """As vLLM reads it: seconds, 10 where it is absent or not positive."""
    try:
        seconds = float(os.environ.get("VLLM_LOG_STATS_INTERVAL", "10"))
    except ValueError:
        return 10.0
    return seconds if seconds > 0 else 10.0
