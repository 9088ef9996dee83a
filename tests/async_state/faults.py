"""Deliberate faults of streams, events, waits and buffer lifetimes, all of which the scenarios must
detect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from ngram_npu import NgramStore
from ngram_npu.async_state import AsyncSpecState
from ngram_npu.async_state.device import Download
from ngram_npu.async_state.device_state import DeviceState
from ngram_npu.async_state.host_state import HostState
from ngram_npu.async_state.rope import RopeOffsets

from async_state.stages import Message

Fault = Callable[[], Any]
"""A function that returns a context manager. The fault exists within its block."""


def patch_call(owner: Any, name: str, replacement: Callable[..., Any]) -> Fault:
    """Replaces `owner.name`. The replacement receives the original as its first argument."""

    def patch() -> Any:
        original = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            return replacement(original, *arguments, **keywords)

        return mock.patch.object(owner, name, call)

    return patch


def _change_init(change: Callable[[AsyncSpecState], None]) -> Fault:
    def init(original: Any, self: AsyncSpecState, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        change(self)

    return patch_call(AsyncSpecState, "__init__", init)


# Downloads.


def _return_without_wait(download: Download) -> Any:
    return [
        buffer.array[: source.numel()].reshape(source.shape)
        for buffer, source in zip(download._buffers, download._sources, strict=True)
    ]


def _change_start(replace_methods: Callable[[Any], dict[str, Any]]) -> Fault:
    """Replaces methods of the device while Download.start() runs."""

    def start(original: Any, self: Download, sources: Any) -> None:
        with mock.patch.multiple(self._device, **replace_methods(self._device)):
            original(self, sources)

    return patch_call(Download, "start", start)


def _record_before_copies(device: Any) -> dict[str, Any]:
    copy, record, events = device.copy, device.record, []

    def copy_after_event(*arguments: Any) -> None:
        if not events:
            events.append(record("side"))
        copy(*arguments)

    return {
        "copy": copy_after_event,
        "record": lambda stream: events[0] if stream == "side" else record(stream),
    }


def _wait_for_previous_download(device: Any) -> dict[str, Any]:
    wait = device.wait

    def wait_for_previous(stream: str, event: Any) -> None:
        wait(stream, vars(device).setdefault("previous", event))
        device.previous = event

    return {"wait": wait_for_previous}


def _record_on_main(device: Any) -> dict[str, Any]:
    record = device.record
    return {"record": lambda stream: record("main")}


def _share_downloads(name: str, count: int) -> Fault:
    def change(state: AsyncSpecState) -> None:
        downloads = getattr(state, name)
        setattr(state, name, [downloads[i % count] for i in range(len(downloads))])

    return _change_init(change)


def _keep_main_from_waiting(state: AsyncSpecState) -> None:
    device: Any = state._device
    wait = device.wait
    device.wait = lambda stream, event: None if stream == "main" else wait(stream, event)


# Uploads, and the order of steps.


def _share_staging_buffer(state: AsyncSpecState) -> None:
    upload = state._device_state.upload
    upload._staging[1] = upload._staging[0]


def _use_new_address(original: Any, self: DeviceState, outputs: Any) -> Any:
    self._draft_token_ids = self._device.tensor(self._draft_token_ids.shape, torch.int32)
    return original(self, outputs)


def _receive_previous_step(original: Any, self: Message, device: Any) -> Any:
    messages = vars(device).setdefault("received_messages", {})
    previous = messages.get((self.shape, self.dtype), self)
    messages[self.shape, self.dtype] = self
    return original(previous, device)


def _shift_rope(original: Any, self: RopeOffsets, step: Any) -> Any:
    offsets = original(self, step)
    has_drafts = (step.num_scheduled_drafts > 0).repeat(step.num_scheduled_tokens)
    self._buffer[:, : step.num_step_tokens] += has_drafts
    return offsets


def _ignore_generations(
    original: Any, self: HostState, step: Any, counts: Any, sampled: Any
) -> Any:
    with mock.patch.object(self, "_generation", np.zeros_like(self._generation)):
        return original(self, replace(step, generation=0 * step.generation), counts, sampled)


def _write_to_batch(original: Any, self: AsyncSpecState, batch: Any, **options: Any) -> Any:
    inputs = original(self, batch, **options)
    batch.num_scheduled_drafts[:] = 0
    return inputs


def _forget_drafts(original: Any, self: AsyncSpecState, batch: Any, **options: Any) -> Any:
    inputs = original(self, batch, **options)
    return replace(inputs, upper_seq_lens=inputs.upper_seq_lens - batch.num_scheduled_drafts)


# The store.


def _change_store(**replacements: Callable[[Any], Any]) -> Fault:
    """Replaces arguments of the call that stores a step's text and drafts from the store."""

    def call(original: Any, self: NgramStore, *rows: Any, **arguments: Any) -> None:
        changed = {name: replace(arguments[name]) for name, replace in replacements.items()}
        original(self, *rows, **{**arguments, **changed})

    return patch_call(NgramStore, "append_and_propose", call)


# Waits of the host.


def _wait_in_begin_step(original: Any, self: AsyncSpecState, batch: Any, **options: Any) -> Any:
    if self._last_step is not None:
        self._count_downloads[self._last_step.number % 2].finish()
    return original(self, batch, **options)


def _read_in_end_step(original: Any, self: AsyncSpecState, sampled: Any, *draft: Any) -> Any:
    if len(sampled.shape) and sampled.shape[0]:
        int(sampled[0, 0])
    return original(self, sampled, *draft)


FAULTS: dict[str, Fault] = {
    "the host does not wait for the counts": lambda: mock.patch.object(
        Download, "finish", _return_without_wait
    ),
    "the side stream does not wait for the main stream": _change_start(
        lambda device: {"wait": lambda stream, event: None}
    ),
    "the side stream waits for an old event": _change_start(_wait_for_previous_download),
    "the event is recorded before the copies": _change_start(_record_before_copies),
    "the event is recorded on the main stream": _change_start(_record_on_main),
    "the main stream overwrites the source of a download": _change_init(_keep_main_from_waiting),
    "counts of two steps share a buffer": _share_downloads("_count_downloads", 1),
    "drafts of three steps share two buffers": _share_downloads("_draft_downloads", 2),
    "uploads of two steps share a staging buffer": _change_init(_share_staging_buffer),
    "drafts of the step before": lambda: mock.patch.object(
        DeviceState, "store_drafts", lambda self, outputs: outputs
    ),
    "a pipeline stage is one step late": patch_call(Message, "receive", _receive_previous_step),
    "rotary positions drift by one": patch_call(RopeOffsets, "collect", _shift_rope),
    "drafts at a new address": patch_call(DeviceState, "store_drafts", _use_new_address),
    "results of the slot's previous request": patch_call(
        HostState, "reconcile", _ignore_generations
    ),
    "the step keeps the runner's arrays": lambda: mock.patch(
        "ngram_npu.async_state.host_state._copy_int32",
        lambda values, field: np.asarray(values, np.int32),
    ),
    "begin_step writes to its argument": patch_call(AsyncSpecState, "begin_step", _write_to_batch),
    "exact counts are available too early": lambda: mock.patch.object(
        AsyncSpecState, "is_exact", True
    ),
    "rebuild does not wait": lambda: mock.patch.object(AsyncSpecState, "_wait_for_device"),
    "all requests share text": _change_store(scopes=torch.zeros_like),
    "scopes of other requests": _change_store(scopes=lambda scopes: scopes + 1),
    "text is not held back": _change_store(hold_back=lambda hold_back: False),
    "upper bounds without drafts": patch_call(AsyncSpecState, "begin_step", _forget_drafts),
    "the host waits in begin_step": patch_call(AsyncSpecState, "begin_step", _wait_in_begin_step),
    "the host reads a tensor in end_step": patch_call(
        AsyncSpecState, "end_step", _read_in_end_step
    ),
}
