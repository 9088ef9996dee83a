"""Deliberate faults, each of which a pipeline like this one had or might have. The tests must
notice all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from ngram_npu.async_state import AsyncSpecState
from ngram_npu.async_state.device_state import (
    ACCEPTED,
    COMPUTED,
    CU_DRAFTS,
    DRAFTS,
    FREED,
    NUM_PACKED,
    PREVIOUS,
    PREVIOUS_DRAFTS,
    QUERY_START,
    SLOTS,
    DeviceTruth,
)
from ngram_npu.async_state.host_state import Mirrors
from ngram_npu.async_state.staging import Download
from ngram_npu.async_state.upload import NO_CELLS, NO_ROWS, PackedUpload, Upload

Mutant = Callable[[], Any]
"""Makes a context in which the fault exists."""

MUTANTS: dict[str, Mutant] = {}


def around(owner: Any, name: str, call: Callable[..., Any]) -> Mutant:
    """`owner.name` replaced by `call`, whose first argument is what it was."""

    def patched() -> Any:
        original = getattr(owner, name)
        return mock.patch.object(
            owner, name, lambda *given, **named: call(original, *given, **named)
        )

    return patched


def _after_init(change: Callable[[AsyncSpecState], None]) -> Mutant:
    def init(original: Any, self: AsyncSpecState, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        change(self)

    return around(AsyncSpecState, "__init__", init)


def _uploaded(change: Callable[[Any, Any], None]) -> Mutant:
    """Changes the packed upload of a step: change(packed [P,R+1], step)."""

    def inputs(original: Any, self: AsyncSpecState, changes: Any, step: Any) -> Any:
        packed, *known = original(self, changes, step)
        packed = packed.copy()
        change(packed.reshape(NUM_PACKED, -1), step)
        return [packed, *known]

    return around(AsyncSpecState, "_inputs", inputs)


def _operator(name: str, change: Callable[..., None]) -> Mutant:
    """Changes the results of an operator: change(arguments by name, results)."""

    def distort(state: AsyncSpecState) -> None:
        device: Any = state._device
        device.distort[name] = change

    return _after_init(distort)


def _without(name: str) -> Mutant:
    def remove(state: AsyncSpecState) -> None:
        device: Any = state._device
        device.without.add(name)

    return _after_init(remove)


def _step_changed(**make: Callable[[Any], Any]) -> Mutant:
    """Changes fields of the planned step."""

    def plan(original: Any, self: Mirrors, *arguments: Any) -> Any:
        step = original(self, *arguments)
        return replace(step, **{name: change(step) for name, change in make.items()})

    return around(Mirrors, "plan_step", plan)


def _turned(values: Any) -> Any:
    return np.roll(values, 1)


# Removed operators.

OPERATORS = (
    "correct_spec_state_",
    "compute_slot_mapping_",
    "prepare_input_ids_",
    "prepare_next_token_ids",
    "prepare_inputs_padded",
    "prepare_inputs",
    "ngram_step_",
    "ngram_index_step_",
    "ngram_index_reset_",
    "merge_drafts_",
)
for _name in OPERATORS:
    MUTANTS[f"without {_name}"] = _without(_name)


# Operators that are slightly wrong.


def _add(tensor: Any, number: int) -> None:
    tensor += number


MUTANTS |= {
    "sampled counts one too many": _operator("prepare_next_token_ids", lambda a, r: _add(r[1], 1)),
    "sampled counts one too few": _operator(
        "prepare_next_token_ids", lambda a, r: r[1].sub_(1).clamp_(min=0)
    ),
    "next tokens one too high": _operator("prepare_next_token_ids", lambda a, r: _add(r[0], 1)),
    "drafts of the neighbour": _operator("ngram_step_", lambda a, r: r[2].copy_(r[2].roll(1, 0))),
    "drafts of the neighbour, indexed": _operator(
        "ngram_index_step_", lambda a, r: r[2].copy_(r[2].roll(1, 0))
    ),
    "draft counts one too few": _operator("ngram_step_", lambda a, r: r[3].sub_(1).clamp_(min=0)),
    "lengths not advanced": _operator(
        "ngram_step_", lambda a, r: a["num_tokens"].sub_(1).clamp_(min=1)
    ),
    "drafts of the neighbour, merged": _operator(
        "merge_drafts_", lambda a, r: r[0].copy_(r[0].roll(1, 0))
    ),
    "sources one too high": _operator("merge_drafts_", lambda a, r: _add(r[2], 1)),
    "acceptance forgotten": _operator("merge_drafts_", lambda a, r: a["neural_acceptance"].zero_()),
    "rejected one too many": _operator("prepare_inputs_padded", lambda a, r: _add(r[1], 1)),
    "index one too far": _operator("prepare_inputs_padded", lambda a, r: _add(r[0], 1)),
    "kept tokens one off": _operator("prepare_inputs", lambda a, r: _add(r[2], 1)),
    "kept lengths one off": _operator("prepare_inputs", lambda a, r: _add(r[1], 1)),
    "positions one off": _operator("correct_spec_state_", lambda a, r: _add(a["positions"], 1)),
    "sequence lengths one off": _operator(
        "correct_spec_state_", lambda a, r: _add(a["seq_lens"], 1)
    ),
    "slots one off": _operator("correct_spec_state_", lambda a, r: _add(a["slot_mapping"], 1)),
    "slots of the second group one off": _operator(
        "compute_slot_mapping_", lambda a, r: _add(a["slot_mapping"], 1)
    ),
    "everything discarded": _operator("correct_spec_state_", lambda a, r: a["discard"].fill_(True)),
    "nothing discarded": _operator("correct_spec_state_", lambda a, r: a["discard"].fill_(False)),
    "input ids one off": _operator("prepare_input_ids_", lambda a, r: _add(a["input_ids"], 1)),
}


# Wrong uploads.


def _set(packed: Any, index: int, values: Any) -> None:
    packed[index, : len(values)] = values


MUTANTS |= {
    "rows swapped": _uploaded(lambda p, s: _set(p, SLOTS, _turned(s.slots))),
    "previous positions swapped": _uploaded(
        lambda p, s: _set(p, PREVIOUS, _turned(s.prev_positions))
    ),
    "previous positions taken for equal": _uploaded(
        lambda p, s: _set(p, PREVIOUS, np.where(s.prev_positions >= 0, np.arange(len(s.rows)), -1))
    ),
    "optimistic value taken for truth": _uploaded(lambda p, s: p[PREVIOUS_DRAFTS].fill(0)),
    "previous drafts of this step": _uploaded(
        lambda p, s: _set(p, PREVIOUS_DRAFTS, s.num_scheduled_drafts)
    ),
    "accepted counts left over": _uploaded(lambda p, s: p[ACCEPTED].fill(2)),
    "host count one off": _uploaded(lambda p, s: _set(p, COMPUTED, s.host_num_computed + 1)),
    "draft counts one too few in the upload": _uploaded(
        lambda p, s: _set(p, DRAFTS, np.maximum(s.num_scheduled_drafts - 1, 0))
    ),
    "draft counts not cumulated": _uploaded(
        lambda p, s: _set(p, CU_DRAFTS, s.num_scheduled_drafts)
    ),
    "graph padding of query starts missing": _uploaded(
        lambda p, s: p[QUERY_START, len(s.rows) + 1 :].fill(0)
    ),
    "another index slot emptied": _uploaded(lambda p, s: p[FREED].__iadd__(1)),
    "discarded taken for sampled": _step_changed(
        sampled_up_to=lambda s: s.num_scheduled_drafts + 1
    ),
    "step keeps the runner's arrays": lambda: mock.patch(
        "ngram_npu.async_state.host_state._int32",
        lambda values, field: np.asarray(values, np.int32),
    ),
}


# The host's bookkeeping.


def _reconcile_with(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Mutant:
    return around(
        Mirrors,
        "reconcile",
        lambda original, self, step, *of: original(self, step, *change(step, *of)),
    )


def _forgetting_generations(
    original: Any, self: Mirrors, step: Any, counts: Any, sampled: Any
) -> Any:
    with mock.patch.object(self, "_generation", np.zeros_like(self._generation)):
        return original(self, replace(step, generation=0 * step.generation), counts, sampled)


def _without_moves(original: Any, self: Mirrors, batch: Any) -> Any:
    return original(self, replace(batch, moves=np.zeros((0, 2), np.int32)))


def _moves_one_by_one(original: Any, self: Mirrors, batch: Any) -> Any:
    kept = self.slot_of
    self.slot_of = kept.copy()
    for source, target in batch.moves:
        self.slot_of[target] = self.slot_of[source]
        self.slot_of[source] = -1
    try:
        return _without_moves(original, self, batch)
    finally:
        self.slot_of = kept


def _writing_to_the_batch(original: Any, self: AsyncSpecState, batch: Any) -> Any:
    """As a runner that trims the scheduled drafts where it was told of them."""
    inputs = original(self, batch)
    batch.num_scheduled_drafts[:] = 0
    return inputs


def _last_positions_kept(original: Any, self: Mirrors, changes: Any, step: Any, rows: Any) -> None:
    original(self, changes, step, rows)
    self._last_position[step.slots] = np.arange(len(step.slots))


MUTANTS |= {
    "host counts one too few": _reconcile_with(lambda s, c, t: (np.maximum(c - 1, 0), t)),
    "host counts one too many": _reconcile_with(lambda s, c, t: (c + 1, t)),
    "host counts of the neighbour": _reconcile_with(lambda s, c, t: (_turned(c), t)),
    "host tokens of the neighbour": _reconcile_with(lambda s, c, t: (c, np.roll(t, 1, 0))),
    "rejections never reach the host": _reconcile_with(
        lambda s, c, t: (np.where(s.num_scheduled_drafts > 0, s.num_scheduled_drafts + 1, c), t)
    ),
    "results of a former request": around(Mirrors, "reconcile", _forgetting_generations),
    "bad rows of the sampler not named": lambda: mock.patch.object(
        Mirrors, "_new_faults", return_value={}
    ),
    "moves forgotten": around(Mirrors, "plan_rows", _without_moves),
    "moves one by one": around(Mirrors, "plan_rows", _moves_one_by_one),
    "argument written to": around(AsyncSpecState, "begin_step", _writing_to_the_batch),
    "position in a step that sampled nothing": around(Mirrors, "commit", _last_positions_kept),
    "known input ids not uploaded": lambda: mock.patch.object(
        Mirrors, "known_input_ids", return_value=None
    ),
    "exact mirrors readable too soon": lambda: mock.patch.object(AsyncSpecState, "is_exact", True),
}


# Waits, events, buffers.


def _no_wait(download: Download) -> Any:
    return [
        buffer.array[: source.numel()].reshape(source.shape)
        for buffer, source in zip(download._buffers, download._sources, strict=True)
    ]


def _patched_start(change: Callable[[Any], Any]) -> Mutant:
    """Download.start with another device between it and the real one."""

    def start(original: Any, self: Download, sources: Any) -> None:
        with mock.patch.object(self, "_device", change(self._device)):
            original(self, sources)

    return around(Download, "start", start)


class _Between:
    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class _SideDoesNotWait(_Between):
    def wait(self, stream: str, event: Any) -> None:
        pass


class _EventTooEarly(_Between):
    """The event that tells of the copies is recorded before them."""

    def copy(self, target: Any, source: Any, stream: str) -> None:
        if not hasattr(self, "early"):
            self.early = self._device.record("side")
        self._device.copy(target, source, stream)

    def record(self, stream: str) -> Any:
        return self.early if stream == "side" else self._device.record(stream)


class _EventOnTheOtherStream(_Between):
    def record(self, stream: str) -> Any:
        return self._device.record("main")


class _ReadyTooEarly(_Between):
    """The side stream waits for the event of the last download."""

    def wait(self, stream: str, event: Any) -> None:
        last = vars(self._device).setdefault("last", event)
        self._device.wait(stream, last)
        self._device.last = event


def _one_staging_buffer(state: AsyncSpecState) -> None:
    upload = state._truth.upload
    if isinstance(upload, PackedUpload):
        upload._staging[1] = upload._staging[0]


def _sent(change: Callable[..., tuple[Any, Any]]) -> Mutant:
    """Changes what is scattered: change(rows, cells)."""

    def send(original: Any, self: Any, number: int, rows: Any, cells: Any, fixed: Any) -> None:
        original(self, number, *change(rows, cells), fixed)

    return around(PackedUpload, "send", send)


def _fewer_downloads(name: str, count: int) -> Mutant:
    def change(state: AsyncSpecState) -> None:
        downloads = getattr(state, name)
        setattr(state, name, [downloads[i % count] for i in range(len(downloads))])

    return _after_init(change)


def _host_waits(original: Any, self: AsyncSpecState, batch: Any) -> Any:
    if self._last is not None:
        self._counts[self._last.number % 2].finish()
    return original(self, batch)


def _slots_by_previous_position(
    original: Any, self: DeviceTruth, sampled: Any, views: Any, *arguments: Any
) -> Any:
    operators = self._drafting._ops

    class Operators:
        def __getattr__(self, name: str) -> Any:
            found = getattr(operators, name)
            if name != "ngram_index_step_":
                return found
            return lambda *given, **named: found(*given, **named | {"slot_indices": views.previous})

    with mock.patch.object(self._drafting, "_ops", Operators()):
        return original(self, sampled, views, *arguments)


def _reading_end(original: Any, self: AsyncSpecState, sampled: Any, *draft: Any) -> Any:
    if len(sampled.shape) and sampled.shape[0]:
        int(sampled[0, 0])
    return original(self, sampled, *draft)


def _lengths_only(original: Any, self: Upload, slots: Any, lengths: Any) -> Any:
    return original(self, slots, lengths)[:1]


def _main_does_not_wait(state: AsyncSpecState) -> None:
    device: Any = state._device
    wait = device.wait
    device.wait = lambda stream, event: None if stream == "main" else wait(stream, event)


def _drafts_of_the_step_before(original: Any, self: DeviceTruth, *arguments: Any) -> Any:
    kept = self._draft_token_ids
    outputs = original(self, *arguments)
    if kept.shape == self._draft_token_ids.shape:
        self._draft_token_ids = kept
    return outputs


MUTANTS |= {
    "wait for the counts missing": lambda: mock.patch.object(Download, "finish", _no_wait),
    "side stream does not wait for main": _patched_start(_SideDoesNotWait),
    "side stream waits for an old event": _patched_start(_ReadyTooEarly),
    "event recorded too early": _patched_start(_EventTooEarly),
    "event of the other stream": _patched_start(_EventOnTheOtherStream),
    "main overwrites what is being downloaded": _after_init(_main_does_not_wait),
    "one staging buffer for uploads": _after_init(_one_staging_buffer),
    "no cells written": _sent(lambda rows, cells: (rows, [NO_CELLS])),
    "cells one too far": _sent(lambda rows, cells: (rows, [(at + 1, of) for at, of in cells])),
    "no rows written": _sent(lambda rows, cells: (NO_ROWS, cells)),
    "rows of the neighbour": _sent(
        lambda rows, cells: (rows._replace(chunks=np.roll(rows.chunks, 1, 0)), cells)
    ),
    "counts download reused": _fewer_downloads("_counts", 1),
    "drafts download reused": _fewer_downloads("_drafts", 2),
    "drafts of the step before": around(DeviceTruth, "propose", _drafts_of_the_step_before),
    "index slots by previous position": around(DeviceTruth, "propose", _slots_by_previous_position),
    "rebuilt without waiting": lambda: mock.patch.object(AsyncSpecState, "_wait_for_device"),
    "rebuilt without emptying the index": lambda: mock.patch.object(DeviceTruth, "clear"),
    "acceptance of whoever was there before": around(Upload, "lengths", _lengths_only),
    "host waits in begin_step": around(AsyncSpecState, "begin_step", _host_waits),
    "host reads in end_step": around(AsyncSpecState, "end_step", _reading_end),
}
