"""Implements ``"k": "auto"`` for vLLM's V2 runner: the scheduler's process chooses draft lengths.

vLLM reads the draft length of a step from a list by batch size (``Scheduler.dynamic_sd_lookup``),
which exists only if the configuration has ``num_speculative_tokens_per_batch_size``. The V2 runner
captures graphs only for the lengths of that table. So that table is set before the configuration is
validated, with all lengths that may be chosen. While the engine runs, the elements of the list
change in place. All ranks receive the length of a step with the scheduler's output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ngram_npu.draft_acceptance import AcceptanceSampler
from ngram_npu.draft_length import MAX_BATCH_DIFFERENCE, Change, DraftLengthController
from ngram_npu.engines.vllm.metrics import DraftLengthMetrics
from ngram_npu.engines.vllm.options import Options, read_k_option
from ngram_npu.engines.vllm.patching import (
    format_error,
    logger,
    run_after_import,
    wrap_function,
)

GRAPHS_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
SAMPLE_STEPS = 8
"""Number of steps between two samples of the requests' text."""


def choose_lengths(k: int, max_num_seqs: int) -> tuple[int, ...]:
    """Returns at most four draft lengths, ascending: 0, 1, half of `k`, and `k`.

    There are at most `max_num_seqs` lengths, because a table has one length per batch size.
    """
    lengths = sorted({0, 1, (k + 1) // 2, k})
    return tuple(lengths) if max_num_seqs >= len(lengths) else (0, k)


def make_table(lengths: Sequence[int], max_num_seqs: int) -> list[tuple[int, int, int]]:
    """Returns the table, with entries (first batch size, last batch size, draft length), for which
    vLLM captures graphs of all lengths up to the largest batch sizes.

    vLLM captures graphs for a length up to the largest batch size that the table maps to the
    length. So the largest batch sizes get one of the shorter lengths each, and all other batch
    sizes get the longest length.
    """
    *shorter, longest = lengths
    shorter = shorter[: max_num_seqs - 1]
    first = max_num_seqs - len(shorter) + 1
    single_entries = [(first + i, first + i, k) for i, k in enumerate(reversed(shorter))]
    return [(1, first - 1, longest), *single_entries]


def set_table(vllm_config: Any) -> None:
    """Sets the table of a configuration with ``"k": "auto"``, before vLLM validates it.

    Raises:
        ValueError: An option is malformed, or the configuration has another table.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    name = "num_speculative_tokens_per_batch_size"
    if speculative is None or not hasattr(speculative, name) or not read_k_option(vllm_config):
        return
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    lengths = choose_lengths(speculative.num_speculative_tokens, max_num_seqs)
    table = make_table(lengths, max_num_seqs)
    current_table = getattr(speculative, name)
    if current_table is None:
        setattr(speculative, name, table)
    elif [tuple(entry) for entry in current_table] != table:
        raise ValueError(f"ngram_npu: {name}: expected none with k='auto', got {current_table!r}")


def make_graph_check(
    lengths: Sequence[int], max_num_seqs: int, capture_sizes: Sequence[int]
) -> Callable[[int, int], bool]:
    """Returns a function of a batch size and a draft length: whether the V2 runner has a graph.

    The runner rounds each capture size up to a multiple of 1 + K, and drops the size if it then
    exceeds the largest size or `max_num_seqs` requests. A batch runs with the next larger graph.

    Args:
        lengths: Draft lengths.
        max_num_seqs: The largest batch size.
        capture_sizes: Sizes of the graphs in tokens. Without sizes, graphs are off, and the
            function returns true for all pairs.
    """
    max_batches = dict.fromkeys(lengths, 0)
    for length in lengths:
        for size in capture_sizes:
            batch = -(-size // (1 + length))
            if batch <= max_num_seqs and batch * (1 + length) <= max(capture_sizes):
                max_batches[length] = max(max_batches[length], batch)
    if not capture_sizes:
        return lambda batch, length: True
    return lambda batch, length: length == 0 or batch <= max_batches.get(length, 0)


class StepObserver:
    """Passes a scheduler's steps to its controller.

    Args:
        scheduler: vLLM's scheduler.
        options: The options of the drafter in this engine.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        scheduler: Any,
        options: Options,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._metrics = DraftLengthMetrics(scheduler.vllm_config)
        k, max_num_seqs = options.ngram.k, options.max_num_seqs
        lengths = choose_lengths(k, max_num_seqs)
        graphs = scheduler.vllm_config.compilation_config
        sizes = graphs.cudagraph_capture_sizes if graphs.cudagraph_mode else None
        self.controller = DraftLengthController(
            lengths,
            max_num_seqs,
            table=scheduler.dynamic_sd_lookup,
            is_allowed=make_graph_check(lengths, max_num_seqs, sizes or ()),
            on_change=self._report_change,
        )
        self._sampler: AcceptanceSampler | None = None
        if not (options.store or options.beside):
            self._sampler = AcceptanceSampler(
                options.ngram, lengths, options.max_model_len, self.controller.acceptance
            )
        self._runs_ahead = scheduler.vllm_config.scheduler_config.async_scheduling
        self._newest_output: Any = None
        """The newest scheduled step."""
        self._last_update_time: float | None = None
        """Time at which the last step was completed; None if the next step time is not usable."""
        self._last_length = -1
        self._num_steps = 0

    def observe_schedule(self, output: Any) -> None:
        """Counts a step that has been scheduled."""
        self._newest_output = output
        batch = len(output.num_scheduled_tokens)
        if batch:
            self.controller.observe_schedule(batch, output.num_spec_tokens_to_schedule)

    def observe_update(self, output: Any, sampled_token_ids: Sequence[Sequence[int]]) -> None:
        """Counts a step whose results have reached the scheduler.

        Args:
            output: The scheduler's output for the step.
            sampled_token_ids: [B], the tokens that each request generated.
        """
        now = self._clock()
        batch = len(output.num_scheduled_tokens)
        if not batch:
            self._last_update_time = None  # the engine may have waited for requests
            return
        length = self._find_uniform_length(output)
        seconds = None
        is_comparable = length is not None and length == self._last_length
        if (
            is_comparable
            and self._last_update_time is not None
            and self._is_followed_by_similar_step(output)
        ):
            seconds = now - self._last_update_time
        self._last_length = -1 if length is None else length
        self._last_update_time = now if self._scheduler.running else None
        if length is None:
            return
        self.controller.observe_step(batch, length, seconds)
        self._observe_acceptance(length, [len(tokens) for tokens in sampled_token_ids])
        self._num_steps += 1
        if self._sampler is not None and self._num_steps % SAMPLE_STEPS == 0:
            self._sampler.sample(self._scheduler.running)

    def _report_change(self, change: Change) -> None:
        batches = f"{change.first}-{change.last}"
        logger.info(
            f"ngram_npu: k='auto': batch sizes {batches}: draft length {change.before} -> "
            f"{change.after}: {change.reason}"
        )
        self._metrics.observe_change(batches, change.after, change.goodput)

    def _observe_acceptance(self, length: int, num_sampled: Sequence[int]) -> None:
        """Counts the tokens of a step for its draft length. Without a sampler, also counts them for
        shorter lengths, as if the drafts had been truncated."""
        steps = [number for number in num_sampled if number]
        if self._sampler is not None:
            self.controller.acceptance.observe_verified(length, sum(steps), len(steps))
            return
        for shorter in self.controller.lengths[1:]:
            if shorter <= length:
                tokens = sum(min(number, 1 + shorter) for number in steps)
                self.controller.acceptance.observe(shorter, tokens, len(steps))

    def _is_followed_by_similar_step(self, output: Any) -> bool:
        """Returns whether the time until the results of a step is that of a decode step of about
        its batch size.

        With asynchronous scheduling, the next step is scheduled already. A CPU also executes the
        next step before the results are read, so the time is that of the next step. That step may
        be much smaller, because the scheduler leaves out requests that end if all of their drafts
        are accepted.
        """
        if not self._runs_ahead:
            return True
        next_output = self._newest_output
        if next_output is output or self._find_uniform_length(next_output) is None:
            return False
        batch = len(output.num_scheduled_tokens)
        difference = abs(len(next_output.num_scheduled_tokens) - batch)
        return difference <= MAX_BATCH_DIFFERENCE * batch

    def _find_uniform_length(self, output: Any) -> int | None:
        """Returns the number of draft tokens that every request has in a step; None if the numbers
        differ, as in steps with a prefill, or if the step may wait for a grammar."""
        if output.scheduled_new_reqs or output.has_structured_output_requests:
            return None
        drafts = output.scheduled_spec_decode_tokens
        lengths = {
            (number, len(drafts.get(request_id, ())))
            for request_id, number in output.num_scheduled_tokens.items()
        }
        if len(lengths) != 1:
            return None
        number, length = lengths.pop()
        return length if number == 1 + length else None


def install() -> None:
    """Wraps vLLM's choice of graphs, now or when vLLM imports it. May be called again."""
    run_after_import(GRAPHS_MODULE, _wrap_graph_manager)


def _wrap_graph_manager(module: Any) -> None:
    manager = getattr(module, "CudaGraphManager", None)
    wrap_function(manager, "_init_candidates", _init_candidates)


def _init_candidates(stock: Any, manager: Any) -> None:
    stock(manager)
    if not read_k_option(manager.vllm_config):
        return
    try:
        graphs = [graph for mode in manager._capture_descs.values() for graph in mode]
        add_candidates(manager._candidates, graphs)
    except Exception as error:
        logger.warning(
            "ngram_npu: k='auto': some batch sizes run without a full graph: %s",
            format_error(error),
        )


def add_candidates(candidates: dict[tuple[int, int], list[Any]], graphs: Sequence[Any]) -> None:
    """Adds each draft length's smallest sufficient graph to the candidates of a number of tokens.

    vLLM's candidates for a number of tokens are only the graphs of the next captured size. With
    several draft lengths, all of these graphs may be of other lengths. A step would then run
    without a full graph although there is a graph for its batch size (vLLM's pull request 56136).

    Args:
        candidates: By number of tokens and number of active LoRAs, the graphs of which the runner
            uses the first that fits.
        graphs: All captured graphs.
    """
    uniform = [graph for graph in graphs if graph.uniform_token_count is not None]
    uniform.sort(key=lambda graph: graph.num_tokens, reverse=True)
    for (num_tokens, num_active_loras), usable_graphs in candidates.items():
        smallest_graphs = {}
        for graph in uniform:
            if graph.num_tokens >= num_tokens and graph.num_active_loras == num_active_loras:
                smallest_graphs[graph.uniform_token_count, graph.num_ubatches] = graph
        usable_graphs[:0] = [g for g in smallest_graphs.values() if g not in usable_graphs]


def make_observer(scheduler: Any, options: Options) -> StepObserver | None:
    """Returns the observer of a scheduler; None without ``k="auto"``, or if it has no effect."""
    if options.k != "auto":
        return None
    vllm_config = scheduler.vllm_config
    table = getattr(scheduler, "dynamic_sd_lookup", None)
    parallel = vllm_config.parallel_config
    reason = "" if table else "without vLLM's table of draft lengths"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        reason = "with pipeline or data parallelism"
    if reason:
        logger.warning(
            f"ngram_npu: k='auto' has no effect {reason}; num_speculative_tokens applies"
        )
        if table:
            table[1:] = [vllm_config.speculative_config.num_speculative_tokens] * (len(table) - 1)
        return None
    try:
        return StepObserver(scheduler, options)
    except Exception as error:
        turn_off(scheduler, error)
        return None


def turn_off(scheduler: Any, error: Exception) -> None:
    """Makes a scheduler draft nothing, because its observer failed."""
    table = scheduler.dynamic_sd_lookup
    table[:] = [0] * len(table)
    logger.error("ngram_npu: k='auto' is off, no tokens are drafted: %s", format_error(error))
