"""Implements ``"k": "auto"`` for vLLM's V2 runner: the scheduler's process chooses draft lengths.

vLLM reads the draft length of a step from a list by batch size (``Scheduler.dynamic_sd_lookup``),
which exists only if the configuration has ``num_speculative_tokens_per_batch_size``. The V2 runner
captures graphs only for the lengths of that table. So that table is set before the configuration is
validated, with all lengths that may be chosen. While the engine runs, the elements of the list
change in place. All ranks receive the length of a step with the scheduler's output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Any

from ngram_npu.draft_length import Change, DraftLengthController
from ngram_npu.engines.vllm.metrics import DraftLengthMetrics
from ngram_npu.engines.vllm.options import Options, read_k_option
from ngram_npu.engines.vllm.patching import (
    format_error,
    logger,
    run_after_import,
    wrap_function,
)

GRAPHS_MODULE = "vllm.v1.worker.gpu.cudagraph_utils"
MIN_SEQS_OF_HALF = 16
"""Minimum ``max_num_seqs`` for which half of ``num_speculative_tokens`` is a draft length: with
less, graphs for three lengths are more than twice those for one."""
MIN_DISTANCE, MIN_RELATIVE_DISTANCE = 8, 1 / 16
"""Minimum number of requests between two graphs of a draft length, also relative to the smaller."""
SMALL_BATCHES = (1, 2, 4)
"""Batch sizes for which there is a graph anyway."""
MAX_SAMPLED_REQUESTS = 32
"""Maximum number of requests per step whose accepted tokens are counted, to limit the time."""
REPORT_STEPS = 500
"""Number of steps after which a line states what was measured, if no tokens are drafted yet."""


def choose_lengths(k: int, max_num_seqs: int) -> tuple[int, ...]:
    """Returns the draft lengths, ascending: 0, half of `k`, and `k`."""
    return tuple(sorted({0, (k + 1) // 2, k} if max_num_seqs >= MIN_SEQS_OF_HALF else {0, k}))


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
        ValueError: An option is malformed, or the configuration has another table, or several
            engines or pipeline stages.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    name = "num_speculative_tokens_per_batch_size"
    if speculative is None or not hasattr(speculative, name) or not read_k_option(vllm_config):
        return
    for size in ("data_parallel_size", "pipeline_parallel_size"):
        if (actual := getattr(vllm_config.parallel_config, size)) > 1:
            raise ValueError(f"ngram_npu: k: expected {size} 1 with 'auto', got {actual}")
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    lengths = choose_lengths(speculative.num_speculative_tokens, max_num_seqs)
    table = make_table(lengths, max_num_seqs)
    current_table = getattr(speculative, name)
    if current_table is None:
        setattr(speculative, name, table)
    elif [tuple(entry) for entry in current_table] != table:
        raise ValueError(f"ngram_npu: {name}: expected none with k='auto', got {current_table!r}")


def choose_graph_sizes(length: int, max_num_seqs: int, capture_sizes: Sequence[int]) -> list[int]:
    """Returns the batch sizes for which the V2 runner captures a graph with drafts of `length`
    tokens, ascending.

    The runner rounds each capture size up to a multiple of 1 + K, and drops the size if it then
    exceeds the largest size or `max_num_seqs` requests. A batch runs with the next larger graph. Of
    these graphs, those for a few requests more or less than others are left out.

    Args:
        capture_sizes: Sizes of the graphs in tokens; none if graphs are off.
    """
    largest = min(max(capture_sizes, default=0) // (1 + length), max_num_seqs)
    chosen: list[int] = []
    for batch in sorted({-(-size // (1 + length)) for size in capture_sizes}, reverse=True):
        distance = max(MIN_DISTANCE, MIN_RELATIVE_DISTANCE * batch)
        is_needed = not chosen or batch in SMALL_BATCHES or chosen[-1] - batch >= distance
        if batch <= largest and is_needed:
            chosen.append(batch)
    return chosen[::-1]


def get_capture_sizes(vllm_config: Any) -> Sequence[int]:
    graphs = vllm_config.compilation_config
    return (graphs.cudagraph_capture_sizes or ()) if graphs.cudagraph_mode else ()


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
        self._clock = clock
        k, max_num_seqs = options.ngram.k, options.max_num_seqs
        lengths = choose_lengths(k, max_num_seqs)
        sizes = get_capture_sizes(scheduler.vllm_config)
        graphs = {n: choose_graph_sizes(n, max_num_seqs, sizes) for n in lengths}
        self.controller = DraftLengthController(
            lengths,
            max_num_seqs,
            table=scheduler.dynamic_sd_lookup,
            is_allowed=lambda batch, length: not sizes or batch <= max(graphs[length], default=0),
            on_change=self._report_change,
        )
        self._metrics = DraftLengthMetrics(
            scheduler.vllm_config, [_format_range(*bounds) for bounds in self.controller.ranges]
        )
        self._has_changed = False
        self._num_steps = self._num_prefills = 0
        """Number of steps with decoding requests, and of those without."""
        self._next_length = 0
        """Number of draft tokens that the next step will verify."""
        self._lengths: dict[int, int] = {}
        """By the identity of the scheduler's output, the draft lengths of the steps in flight."""
        self._last_length = -1
        self._last_time: float | None = None
        self._log_start(sum(map(len, graphs.values())))

    def _log_start(self, num_graphs: int) -> None:
        *shorter, longest = self.controller.lengths
        logger.info(
            f"ngram_npu: k='auto': each step drafts {', '.join(map(str, shorter))} or {longest} "
            "tokens per request, whichever generates most tokens per second as measured while the "
            f"engine runs, at first 0; vLLM captures {num_graphs} full graphs for decode steps"
        )

    def observe_schedule(self, output: Any) -> None:
        """Counts a step that has been scheduled."""
        batch = len(output.num_scheduled_tokens)
        if not batch:
            return
        self._lengths[id(output)] = self._next_length
        self._next_length = output.num_spec_tokens_to_schedule
        self.controller.observe_schedule(batch)

    def observe_update(self, output: Any, results: Any) -> None:
        """Counts a step whose results have reached the scheduler.

        Args:
            output: The scheduler's output for the step.
            results: The runner's output for the step.
        """
        length = self._lengths.pop(id(output), None)
        if length is None:
            return
        now, last_time, last_length = self._clock(), self._last_time, self._last_length
        batch, drafts = len(output.num_scheduled_tokens), output.scheduled_spec_decode_tokens
        length = length if drafts else 0  # drafting may have been switched off
        num_tokens = output.total_num_scheduled_tokens
        num_decodes = len(drafts)
        if length == 0:
            num_decodes = batch
            if num_tokens > batch:
                num_decodes = [*output.num_scheduled_tokens.values()].count(1)
        self._last_time, self._last_length = now, length
        if not num_decodes:  # the first step after the engine was idle is one of these
            self._num_prefills += 1
            return
        counts = self._count_accepted(drafts, length, batch, results) if length else ()
        self.controller.acceptance.observe(batch, counts)
        # Short prompts, and requests that decode without drafts yet, hardly change the time.
        num_prompt_tokens = max(0, num_tokens - num_decodes * (1 + length)) // 16
        kind: Hashable = output.has_structured_output_requests, num_prompt_tokens.bit_length()
        seconds = None
        if last_time is not None and length == last_length:
            seconds = now - last_time
        self.controller.observe_step(batch, length, seconds, num_decodes=num_decodes, kind=kind)
        self._num_steps += 1
        if self._num_steps == REPORT_STEPS and not self._has_changed:
            logger.info(
                f"ngram_npu: k='auto': still drafts no tokens after {REPORT_STEPS} steps; "
                f"{self.controller.describe_measurements()}; {self._num_prefills} steps in which "
                "no request generated tokens were ignored"
            )

    def _count_accepted(
        self, drafts: dict[str, Sequence[int]], length: int, batch: int, results: Any
    ) -> list[int]:
        """Returns by number of accepted tokens the number of requests, of a sample of requests. A
        draft that a grammar shortened counts as one whose next token is rejected."""
        sampled, rows = results.sampled_token_ids, results.req_id_to_index
        stride = -(-batch // MAX_SAMPLED_REQUESTS)
        start = self._num_steps % stride
        if len(drafts) == batch == len(sampled):
            numbers = [*map(len, sampled[start::stride])]
        else:
            names = islice(drafts, start, None, stride)
            numbers = [len(sampled[rows[name]]) for name in names if name in rows]
        return [numbers.count(1 + accepted) for accepted in range(1 + length)]

    def _report_change(self, change: Change) -> None:
        self._has_changed = True
        batches = _format_range(change.first, change.last)
        logger.info(
            f"ngram_npu: k='auto': batch sizes {batches}: draft length {change.before} -> "
            f"{change.after}: {change.gain:.2f} times as many tokens per second are expected"
        )
        self._metrics.observe_change(batches, change.after, change.goodput)


def _format_range(first: int, last: int) -> str:
    return f"{first}-{last}"


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
        remove_graphs(manager)
        graphs = [graph for mode in manager._capture_descs.values() for graph in mode]
        add_candidates(manager._candidates, graphs)
    except Exception as error:
        logger.warning(
            "ngram_npu: k='auto': some batch sizes run without a full graph, or more graphs are "
            "captured than the line above states: %s",
            format_error(error),
        )


def remove_graphs(manager: Any) -> None:
    """Removes the uniform graphs that :func:`choose_graph_sizes` does not choose."""
    sizes, max_num_seqs = get_capture_sizes(manager.vllm_config), manager.max_num_reqs
    chosen: dict[int, list[int]] = {}

    def is_chosen(graph: Any) -> bool:
        number = graph.uniform_token_count
        if number is None:
            return True
        if number not in chosen:
            chosen[number] = choose_graph_sizes(number - 1, max_num_seqs, sizes)
        return graph.num_reqs in chosen[number]

    for graphs in (*manager._capture_descs.values(), *manager._candidates.values()):
        graphs[:] = filter(is_chosen, graphs)


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
    if not getattr(scheduler, "dynamic_sd_lookup", None):
        logger.warning(
            "ngram_npu: k='auto' has no effect without vLLM's table of draft lengths; "
            "num_speculative_tokens applies"
        )
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
