"""Inserts fed texts into the store of a rank (:mod:`~ngram_npu.engines.vllm.feed.delivery`).

The text becomes part of the steps' order: it is inserted by launches in the stream of the steps.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.engines.vllm.feed.delivery import ATTRIBUTE, ROW_TOKENS, TextDigest, TextStep
from ngram_npu.engines.vllm.patching import (
    RUNNER,
    find_argument,
    format_error,
    is_wrapped,
    logger,
    parameter_names,
    wrap_function,
)
from ngram_npu.engines.vllm.ranks import exit_worker_on_error
from ngram_npu.store import NgramStore


class TextInserter:
    """Inserts the text of steps into a store, and compares it with what the scheduler sent.

    Args:
        store: The store. Text row r uses its slot ``first_slot + r``.
        num_rows: How many texts may be continued at the same time.
        device: Device of the store; None: the host. Nothing waits for it.
    """

    def __init__(
        self, store: NgramStore, num_rows: int, *, first_slot: int, device: torch.device | None
    ) -> None:
        self._store, self._first_slot = store, first_slot
        self._rows = _Rows(num_rows)
        self._device = torch.device("cpu") if device is None else device
        shape = num_rows, ROW_TOKENS
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._lengths = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        self._inserted = TextDigest()
        self._sent_digest = self._inserted.digest

    def insert(self, step: TextStep) -> None:
        """Inserts text, and adds it to the digest of all inserted text."""
        for part, positions in self._rows.append(step):
            self._insert_part(part, positions)
        self._inserted.add(step)

    def run_step(self, step: TextStep | None) -> None:
        """Inserts the text that the scheduler sent for a step; None: it sent none.

        Raises:
            RuntimeError: Other text was inserted up to this step than the scheduler sent.
        """
        if step is not None:
            self.insert(step)
            self._sent_digest = step.digest
        if self._inserted.digest != self._sent_digest:
            raise RuntimeError(
                f"ngram_npu: store_feed: expected text with digest {self._sent_digest.hex()}, as "
                f"the scheduler sent it, got {self._inserted.digest.hex()}"
            )

    def _insert_part(self, part: TextStep, positions: npt.NDArray[np.int64]) -> None:
        """Inserts pieces of which no two are for one row."""
        columns = (
            *(part.tokens, positions, part.rows, self._rows.lengths[part.rows], part.counts),
            *(part.scopes, part.rows[part.begins_text] + self._first_slot),
        )
        packed = torch.from_numpy(np.concatenate(columns, dtype=np.int64))
        if self._device.type != "cpu":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        sizes = [len(column) for column in columns]
        tokens, places, row_ids, lengths, counts, scopes, new_slots = torch.split(packed, sizes)
        self._tokens.view(-1).index_copy_(0, places, tokens.int())
        self._lengths.index_copy_(0, row_ids, lengths.int())
        max_new = int(part.counts.max())
        self._store.begin_step(len(part.rows), max_new)
        self._store.begin_requests(new_slots)
        self._store.append(
            self._tokens,
            self._lengths,
            counts.int(),
            row_indices=row_ids,
            slot_indices=row_ids + self._first_slot,
            scopes=scopes,
            max_new=max_new,
            hold_back=False,
        )


def insert_texts(drafter: Any, scheduler_output: Any) -> None:
    """Inserts the text that the scheduler added to its output, if any, into a drafter's store.
    Called in every step."""
    inserter = getattr(drafter, "text_inserter", None)
    if inserter is not None:
        _run_step(drafter, inserter, getattr(scheduler_output, ATTRIBUTE, None))


@exit_worker_on_error
def _run_step(drafter: Any, inserter: TextInserter, step: TextStep | None) -> None:
    try:
        inserter.run_step(step)
    except Exception as error:
        if drafter.has_other_ranks:
            raise
        drafter.text_inserter = None
        logger.error("ngram_npu: store_feed is off: %s", format_error(error))


def init_v1(stock: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps the constructor of V1's ``GPUModelRunner``. Replaces ``execute_model`` of the instance,
    because a subclass may override the function without a call of the one that it overrides."""
    stock(runner, *args, **kwargs)
    execute_model = runner.execute_model

    def insert_and_execute(*args: Any, **kwargs: Any) -> Any:
        output = find_argument(args, kwargs, 0, "scheduler_output")
        insert_texts(getattr(getattr(runner, "drafter", None), "ngram_npu", None), output)
        return execute_model(*args, **kwargs)

    runner.execute_model = insert_and_execute


def install_v1(module: Any) -> None:
    """Makes the V1 runner in ``module`` insert fed texts before each step."""
    runner = getattr(module, "GPUModelRunner", None)
    stock = getattr(runner, "execute_model", None)
    if inspect.isfunction(stock) and parameter_names(stock)[:2] == ["self", "scheduler_output"]:
        wrap_function(runner, "__init__", init_v1)


class _Rows:
    """The lengths of the text rows, and where the tokens of a step go."""

    def __init__(self, num_rows: int) -> None:
        self.lengths = np.zeros(num_rows, np.int32)

    def append(self, step: TextStep) -> Iterator[tuple[TextStep, npt.NDArray[np.int64]]]:
        """Yields the pieces of a step in parts without two pieces for one row, and the positions of
        their tokens in the rows, which are consecutive in memory. ``lengths`` includes the parts
        that were yielded."""
        for part in _split_by_row(step):
            self.lengths[part.rows[part.begins_text]] = 0
            begins = part.rows.astype(np.int64) * ROW_TOKENS + self.lengths[part.rows]
            ends_in_step = np.cumsum(part.counts)
            shifts = begins - (ends_in_step - part.counts)
            self.lengths[part.rows] += part.counts
            yield part, np.arange(ends_in_step[-1]) + np.repeat(shifts, part.counts)


def _split_by_row(step: TextStep) -> Iterator[TextStep]:
    """Yields the pieces in order, in as few parts as possible in which all rows differ."""
    first, first_token, rows_of_part = 0, 0, set[int]()
    bounds = np.cumsum(step.counts).tolist()
    rows = step.rows.tolist()
    for end in range(1, len(rows) + 1):
        rows_of_part.add(rows[end - 1])
        if end < len(rows) and rows[end] not in rows_of_part:
            continue
        yield TextStep(
            step.rows[first:end],
            step.begins_text[first:end],
            step.scopes[first:end],
            step.counts[first:end],
            step.tokens[first_token : bounds[end - 1]],
            step.digest,
        )
        first, first_token = end, bounds[end - 1]
        rows_of_part.clear()


def require_wrapped_runner() -> None:
    """Raises ValueError if the plugin has not wrapped the V1 runner of this process."""
    runner = getattr(sys.modules.get(RUNNER), "GPUModelRunner", None)
    if runner is not None and not is_wrapped(runner.__init__, init_v1):
        raise ValueError(
            "ngram_npu: store_feed: expected NGRAM_NPU_VLLM=1 and a V1 runner whose "
            "execute_model ngram_npu can wrap; this one is not wrapped"
        )
