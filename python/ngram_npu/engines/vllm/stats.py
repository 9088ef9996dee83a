"""Logs a drafter's settings at start-up, and its counts, which Prometheus gets too.

vLLM itself counts accepted drafts for every method, in its ``SpecDecoding metrics`` line and as
``vllm:spec_decode_*``. The option ``metrics`` adds acceptance by match length and by position.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu.engines.vllm.metrics import StoreMetrics, call_repeatedly, get_metric, make_labels
from ngram_npu.engines.vllm.options import Options
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.request_scopes import require_scope_checks
from ngram_npu.engines.vllm.sharing import ranks_of_stage
from ngram_npu.index import NgramIndex
from ngram_npu.tensors import Int32Array

if TYPE_CHECKING:
    import torch

Rows = slice | npt.NDArray[np.intp]
Values = Sequence[Int32Array] | Int32Array

_COUNTERS = {
    "proposals": ("proposals", "Steps with a lookup."),
    "rows": ("rows", "Requests looked up, summed over steps."),
    "drafts": ("drafts", "Requests with a draft, summed over steps."),
    "tokens": ("draft_tokens", "Draft tokens found."),
    "seconds": ("propose_seconds", "Time spent in propose()."),
}
_SOURCE_ROWS = "source_rows", "Requests by source of their draft: index, scan, ngram or neural."
_NEURAL_LABEL = "neural"
"""Label in place of a match length if the draft is from a neural drafter."""
_MATCH_COUNTERS = (
    ("verified_tokens", "Draft tokens verified, except those of requests that ended or moved."),
    ("accepted_tokens", "Draft tokens that were accepted, of those in verified_tokens."),
)


def log_start(drafter: Any, vllm_config: Any, options: Options, method: str, engine: str) -> bool:
    """Sets the number of threads, logs the settings, and starts to save the store.

    Returns:
        Whether this rank logs and counts: it is the first of the ranks that make the same drafts.
    """
    if drafter.shared_store is not None:
        require_scope_checks()
    config, threads = options.ngram, options.num_threads
    # vLLM runs one drafter per tensor-parallel rank on the cores that also tokenise.
    _C.set_num_threads(threads)
    parallel = vllm_config.parallel_config
    if getattr(parallel, "rank", 0) != ranks_of_stage(parallel)[0]:
        return False
    lookup = f"prompt_lookup_min={config.min_n} prompt_lookup_max={config.max_n}"
    if options.lookup != "ngram":
        lookup = f"lookup={options.lookup}"
    min_probability = options.min_draft_probability
    num_threads = threads or "as torch's"
    drafts = f" drafts={options.drafts}" if method == "ngram_gpu" else ""
    if config.is_ladder:
        lookup += f" min_draft_probability={min_probability}"
    logger.info(
        f"ngram_npu {_C.__version__} drafts for this engine (method {method}): {lookup} "
        f"num_speculative_tokens={config.k} match_policy={config.match_policy} "
        f"overlap={config.overlap} max_model_len={options.max_model_len} engine={engine} "
        f"device={getattr(drafter, 'device', 'cpu')} num_threads={num_threads} "
        f"instruction_set={_C.instruction_set()} keep_drafting={options.keep_drafting}{drafts}; "
        f"options from {' and '.join(options.sources) or 'the defaults'}"
    )
    if options.step_times_batch:
        logger.info(
            "ngram_npu: min_draft_probability follows from the step times of "
            f"{options.step_times_batch} requests in step_times_file"
        )
    if min_probability != config.min_draft_probability:
        logger.info(
            f"ngram_npu: min_draft_probability={min_probability} ends no draft here: vLLM verifies "
            f"num_speculative_tokens={config.k} tokens of every request, however many are likely"
        )
    if options.ignored_bounds:
        logger.info(
            f"ngram_npu: lookup={options.lookup} sets the n-gram lengths; "
            f"{options.ignored_bounds} has no effect"
        )
    cores = os.environ.get("OMP_NUM_THREADS", "")
    if cores.isdigit() and 0 < int(cores) < threads:
        logger.warning(
            f"ngram_npu: num_threads={threads} has no effect beyond OMP_NUM_THREADS={cores}"
        )
    if drafter.shared_store is not None:
        drafter.shared_store.start_saving(drafter)
        closed = threading.Event()
        Finalize(drafter, closed.set)
        call_repeatedly(StoreMetrics(vllm_config, drafter.shared_store).update, closed)
    return True


class AcceptanceCounts:
    """Counts verified and accepted draft tokens by the length of their match and by position.

    A step samples one token more than it accepts. The sampled tokens belong to the last draft of
    the row if the row has since grown only by these tokens. Drafts of requests that ended or moved
    to another row are not counted.
    """

    def __init__(self, rows: int, max_n: int, k: int) -> None:
        self._lengths = np.full(rows, -1, np.int64)  # of the rows, when drafted; -1: no draft
        self._drafts = np.zeros((2, rows), np.int64)  # length of the match, number of draft tokens
        # Numbers of drafts. [0]: by match length and number of draft tokens. [1]: by match length
        # and number of accepted tokens.
        self._num_drafts = np.zeros((2, max_n + 1, k + 1), np.int64)

    def observe(self, rows: Rows, values: Values) -> None:
        """Counts the tokens of a step. The arguments are those of :meth:`Stats.observe`."""
        lengths, num_sampled, match_len, counts = values
        is_known = (num_sampled > 0) & (self._lengths[rows] == lengths - num_sampled)
        match, drafted = self._drafts[:, rows][:, is_known]
        accepted = np.minimum(num_sampled[is_known] - 1, drafted)
        np.add.at(self._num_drafts[0], (match, drafted), 1)
        np.add.at(self._num_drafts[1], (match, accepted), 1)
        self._lengths[rows] = np.where(num_sampled > 0, lengths, -1)
        self._drafts[:, rows] = match_len, counts

    def read_and_reset(self) -> npt.NDArray[np.int64]:
        """Returns [2, max_n + 1, k]: the numbers of verified and of accepted tokens since the last
        call, by match length and position."""
        # Sums from the longest drafts to those of one token: n tokens are at positions 0 to n - 1.
        tokens = self._num_drafts[:, :, :0:-1].cumsum(axis=2)[:, :, ::-1]
        self._num_drafts[:] = 0
        return tokens


class Stats:
    """Counts the calls of one engine. Logs one line per log interval of vLLM in which the engine
    drafted, and the last line when the process or ``owner``, the engine's drafter, ends."""

    def __init__(self, owner: object, vllm_config: Any, options: Options) -> None:
        interval = float(os.environ.get("VLLM_LOG_STATS_INTERVAL", "10"))
        self._interval = interval if interval > 0 else 10.0  # as in vLLM
        self._labels = make_labels(vllm_config)
        self._counters = {k: self._get_counter(name, text) for k, (name, text) in _COUNTERS.items()}
        self._sums: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self._has_neural = options.beside
        self._interval_start = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self.acceptance: AcceptanceCounts | None = None
        if options.metrics:
            self.acceptance = AcceptanceCounts(
                options.max_num_seqs, options.ngram.max_n, options.ngram.k
            )
        self.rows_indexed = self._rows_indexed_before = 0
        Finalize(owner, self.end_interval, exitpriority=0)

    def observe(self, seconds: float, rows: Rows, values: Values, index: NgramIndex | None) -> None:
        """Counts one call of ``propose()``, which took ``seconds``.

        Args:
            rows: [B], the row of each request.
            values: Four arrays [B]: lengths of the rows with the sampled tokens, numbers of sampled
                tokens, match lengths (0 for a neural draft), and numbers of draft tokens.
            index: The index in which rows were looked up; None: all rows were scanned.
        """
        with self._lock:
            _, num_sampled, match_len, counts = values
            if self._has_neural:
                counts = counts * (match_len > 0)
            num_rows, num_drafts = np.count_nonzero(num_sampled), np.count_nonzero(counts)
            tokens = int(np.add.reduce(counts))  # takes half the time of sum()
            increments = 1, int(num_rows), int(num_drafts), tokens, seconds
            for name, increment in zip(_COUNTERS, increments, strict=True):
                self._sums[name] += increment
                self._counters[name].inc(increment)
            if self._timer is None:
                self._interval_start = time.perf_counter() - seconds
                self._timer = threading.Timer(self._interval, self.end_interval)
                self._timer.daemon = True
                self._timer.start()
            if self.acceptance is not None:
                self.rows_indexed = 0 if index is None else index.statistics.rows_indexed
                self.acceptance.observe(rows, values)

    def end_interval(self) -> None:
        with self._lock:
            if self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            sums, self._sums = self._sums, dict.fromkeys(_COUNTERS, 0)
            elapsed = time.perf_counter() - self._interval_start
            tokens = None if self.acceptance is None else self.acceptance.read_and_reset()
            rows_indexed = self.rows_indexed - self._rows_indexed_before
            self._rows_indexed_before = self.rows_indexed
        rows, drafts = int(sums["rows"]), int(sums["drafts"])
        logger.info(
            f"ngram_npu metrics: last {elapsed:.1f} s: {sums['proposals']} proposals, "
            f"{1e3 * sums['seconds'] / sums['proposals']:.3f} ms each, {drafts} of {rows} rows "
            f"drafted ({100 * drafts / max(rows, 1):.1f}%), "
            f"{sums['tokens'] / max(drafts, 1):.2f} tokens per draft"
        )
        if tokens is None:
            return
        rows_by_source = {"index": rows_indexed, "scan": rows - rows_indexed}
        if self._has_neural:
            rows_by_source = {"ngram": drafts, _NEURAL_LABEL: rows - drafts}
        sources = ", ".join(f"{source}: {count}" for source, count in rows_by_source.items())
        logger.info(
            "ngram_npu acceptance: by match length "
            f"{_format_shares(tokens.sum(axis=2), first=_NEURAL_LABEL)}; "
            f"by position {_format_shares(tokens.sum(axis=1))}; rows from {sources}"
        )
        for source, count in rows_by_source.items():
            self._get_counter(*_SOURCE_ROWS, source=source).inc(count)
        for (name, text), table in zip(_MATCH_COUNTERS, tokens, strict=True):
            for match_len, position in np.argwhere(table):
                labels = {"match_len": str(match_len or _NEURAL_LABEL), "position": str(position)}
                self._get_counter(name, text, **labels).inc(int(table[match_len, position]))

    def _get_counter(self, name: str, text: str, **extra_labels: str) -> Any:
        return get_metric("Counter", name, text, {**self._labels, **extra_labels})


class DeviceStats(Stats):
    """Counts from tensors. Tensors of a GPU are copied asynchronously after the step. The first
    later step at which the copy is complete counts them."""

    def __init__(self, owner: Any, vllm_config: Any, options: Options, index: Any) -> None:
        import torch

        super().__init__(owner, vllm_config, options)
        self._index = index
        self._on_host = owner.device.type == "cpu"
        self._runtime: Any = torch.get_device_module(owner.device)
        self._copies: deque[tuple[Any, torch.Tensor, float, Rows]] = deque()

    def observe_tensors(self, started: float, rows: Rows, *values: torch.Tensor) -> None:
        """Counts a call that began at ``started``, a time of ``time.perf_counter()``. ``rows`` and
        ``values`` are those of :meth:`observe`."""
        import torch

        table = torch.stack(values)
        if self._on_host:
            self.observe(time.perf_counter() - started, rows, table.numpy(), self._index)
            return
        table = table.to("cpu", non_blocking=True)  # into pinned memory
        event = self._runtime.Event()
        event.record()
        self._copies.append((event, table, time.perf_counter() - started, rows))
        while self._copies and self._copies[0][0].query():
            _, table, seconds, rows = self._copies.popleft()
            self.observe(seconds, rows, table.numpy(), None)  # the index is in host memory


def _format_shares(tokens: npt.NDArray[np.int64], first: str = "0") -> str:
    """Returns ``3: 41% of 120`` for each column of the verified and accepted ``tokens`` [2, N].
    ``first`` is the name of column 0."""
    shares = (
        f"{i or first}: {100 * accepted / verified:.0f}% of {verified}"
        for i, (verified, accepted) in enumerate(tokens.T.tolist())
        if verified
    )
    return ", ".join(shares) or "none"
