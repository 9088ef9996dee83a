"""Drafting in host memory for sampled tokens on a device, in the order of the device's stream.

Each step is one job: a native host function that the driver calls when the stream reaches the job.
Later work in the stream receives the drafts. Python neither waits for a job nor is called by a job
(docs/design/host-drafting.md).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

import ngram_npu._C as _C
from ngram_npu import _library
from ngram_npu.config import NgramConfig
from ngram_npu.index import NgramIndex
from ngram_npu.store import NgramStore
from ngram_npu.tensors import Int32Array

if TYPE_CHECKING:
    import numpy.typing as npt

NO_LIMIT = 2**63 - 1


class Stop(NamedTuple):
    """Stop conditions that can be evaluated on a request's tokens.

    The text up to the first stop is stored even if the end of the request is announced before its
    last tokens reach the store.
    """

    tokens: tuple[int, ...] = ()
    """Tokens that end the text."""
    max_length: int = NO_LIMIT
    """Maximum length of the row, including the prompt."""
    prompt_length: int = 0
    min_output: int = 0
    """Minimum number of output tokens from which on a repetition ends the text."""
    min_pattern: int = 0
    max_pattern: int = 0
    """Maximum length of a repeated pattern that ends the text (default: no such stop)."""
    min_count: int = 0
    """Number of consecutive occurrences of the pattern that end the text."""


class DeviceDrafts(NamedTuple):
    """Drafts for the B requests of a step, on the device of the sampled tokens."""

    draft_token_ids: torch.Tensor
    """[B, k] int64; `fill` determines the content of unused positions."""
    num_draft_tokens: torch.Tensor
    """[B] int32"""
    match_len: torch.Tensor
    """[B] int32; 0: no draft was found."""
    draft_costs: torch.Tensor
    """[B, k] uint8; undefined if the configuration has no costs."""


class Stream(Protocol):
    """Runs copies and jobs in the order of the calls."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None: ...
    def run(self, job: int) -> None:
        """Enqueues a job.

        Args:
            job: The argument for ``_C.STREAM_CALLBACK``.

        Raises:
            RuntimeError: The job will not run.
        """

    def use_last_stream(self) -> AbstractContextManager[Any]:
        """Returns a context in which jobs of any thread go to the stream of the last job."""


class SynchronousStream:
    """Stream for sampled tokens in host memory: copies and jobs run within the call."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def run(self, job: int) -> None:
        _C.stream_run_job(job)

    def use_last_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()


class _DeviceStream:
    """The current stream of a device's runtime."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._last_stream: Any = None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def _check_capture(self) -> None:
        if self._runtime.is_current_stream_capturing():
            raise RuntimeError(
                "ngram_npu: drafting on the host: a host function cannot be captured in a graph; "
                "draft outside of the capture"
            )

    def use_last_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._runtime.stream(self._last_stream)
        return context


class CudaStream(_DeviceStream):
    """torch's current CUDA stream. Requires the driver, but no CUDA build of ngram_npu.

    Raises:
        RuntimeError: The driver is missing, or it rejects a host function.
    """

    def __init__(self) -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._launch = driver.cuLaunchHostFunc
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"ngram_npu: drafting on the host: {error}") from error
        self._launch.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        self._launch.restype = ctypes.c_int
        super().__init__(torch.cuda)
        self._driver = driver
        self._context = ctypes.c_void_p()

    def run(self, job: int) -> None:
        self._check_capture()
        self._last_stream = torch.cuda.current_stream()
        if not self._context:
            self._driver.cuCtxGetCurrent(ctypes.byref(self._context))
        if status := self._launch(self._last_stream.cuda_stream, _C.STREAM_CALLBACK, job):
            raise RuntimeError(f"ngram_npu: cuLaunchHostFunc returned status {status}, expected 0")

    def use_last_stream(self) -> AbstractContextManager[Any]:
        # The driver rejects a launch from a thread without a current context. torch's stream
        # context does not make one current if the number of the device is the thread's default.
        self._driver.cuCtxSetCurrent(self._context)
        return super().use_last_stream()


class NpuStream(_DeviceStream):
    """torch_npu's current stream, through its task queue. Requires CANN 8.3 or later.

    Raises:
        RuntimeError: This build has no NPU backend, or the backend cannot be loaded.
    """

    def __init__(self) -> None:
        if reason := _library.open_npu().reason:
            raise RuntimeError(f"ngram_npu: drafting on the host: {reason}")
        super().__init__(torch.get_device_module("npu"))
        self._launch = _library.load_npu_launcher()

    def run(self, job: int) -> None:
        self._check_capture()
        self._last_stream = self._runtime.current_stream()
        if self._launch(_C.STREAM_CALLBACK, job):
            raise RuntimeError(
                "ngram_npu: drafting on the host: aclrtLaunchHostFunc is missing; install CANN 8.3 "
                "or later"
            )


_STREAMS: dict[str, Callable[[], Stream]] = {
    "cpu": SynchronousStream,
    "cuda": CudaStream,
    "npu": NpuStream,
}


def current_stream(device: torch.device) -> Stream:
    """Returns the current stream of a device.

    Raises:
        RuntimeError: The device cannot run jobs.
    """
    if device.type not in _STREAMS:
        raise RuntimeError(
            f"ngram_npu: drafting on the host: expected cpu, cuda or npu, got {device.type}"
        )
    return _STREAMS[device.type]()


class HostDrafting:
    """Drafts with an index and a store in host memory for requests on any device.

    It keeps its own copy of each request's text, because the device may overwrite its rows while
    jobs are pending. The caller passes prompts, and sampled tokens are copied from the device.

    Dimensions: B requests of a step, R rows, S tokens per row, M sampled tokens per request.
    """

    def __init__(
        self,
        config: NgramConfig,
        *,
        num_rows: int,
        capacity: int,
        max_sampled: int,
        device: torch.device,
        lag: int = 0,
        index: NgramIndex | None = None,
        store: NgramStore | None = None,
        stream: Stream | None = None,
        fill: bool = True,
        num_text_rows: int = 0,
        text_capacity: int = 0,
    ) -> None:
        """
        Args:
            config: Lookup and draft settings.
            num_rows, capacity, max_sampled: R, S and M.
            device: Device of the sampled tokens and of the drafts.
            lag: Number of steps until sampled tokens enter the store: the delay with which a
                scheduler that runs ahead learns that a request has ended. Steps in which no row has
                a request do not count.
            index, store: Index and store in host memory, with R slots; a store with prompt scopes
                has twice as many, those of the text rows included. Only jobs change them.
            stream: Runs the jobs (default: the device's current stream).
            fill: Whether unused positions of a draft continue the draft and then repeat the newest
                token. Otherwise they are -1.
            num_text_rows, text_capacity: Number and capacity of the rows for :meth:`append_text`.
                They use the store's slots from R on.

        Raises:
            ValueError: An argument is out of range.
            RuntimeError: The device cannot run jobs.
        """
        if stream is None:
            stream = current_stream(device)
        self.k = config.k
        self._has_run = False
        self._num_slots = 0 if store is None else store.num_slots
        self._num_prompt_slots = 2 * (num_rows + num_text_rows)
        self._stream = stream
        pinned = device.type != "cpu"
        self._sampled = torch.zeros(
            num_rows, 1 + max_sampled, dtype=torch.int32, device="cpu", pin_memory=pinned
        )
        size = _C.stream_results_bytes(num_rows, config.k)
        self._drafts = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        lookup = config.lookup_arguments
        if index is None:
            lookup["match_costs"] = config.match_cost_table
        elif config.cost_table is not None:
            lookup |= {"costs": config.cost_table, "token_logits": config.token_logits}
        if store is not None:
            lookup |= {"store": np.asarray(store.tensor), "store_costs": config.store_cost_table}
        self._drafter = _C.StreamDrafter(
            num_rows=num_rows,
            capacity=capacity,
            max_sampled=max_sampled,
            lag=lag,
            sampled=self._sampled.numpy(),
            drafts=self._drafts.numpy(),
            index=None if index is None else np.asarray(index.tensor),
            fill=fill,
            num_text_rows=num_text_rows,
            text_capacity=text_capacity,
            **lookup,
        )

    def begin(
        self,
        row: int,
        token_ids: npt.ArrayLike,
        *,
        scope: int = 0,
        prompt_scope: int | None = None,
        stop: Stop | None = None,
    ) -> None:
        """Announces a request with its prompt in a row, before the first step with this row.

        Args:
            scope: The scope of the request's text in the store.
            prompt_scope: A second scope, such as one per prompt. The request drafts from the scope
                of which more accepted tokens are expected, and its text is stored in both.

        Raises:
            ValueError: The store has too few slots for a prompt scope.
        """
        if prompt_scope is not None and self._num_slots < self._num_prompt_slots:
            raise ValueError(
                "HostDrafting: begin: prompt_scope: expected a store with at least "
                f"{self._num_prompt_slots} slots, got {self._num_slots}"
            )
        tokens, *other_conditions = Stop() if stop is None else stop
        limits = (min(max(number, 0), NO_LIMIT) for number in other_conditions)
        self._drafter.add_request(
            row,
            np.asarray(token_ids, np.int32),
            scope,
            np.asarray(tokens, np.int32),
            *limits,
            prompt_scope=prompt_scope,
        )

    def end(self, row: int) -> None:
        """Announces that the request of a row has ended or is preempted."""
        self._drafter.remove_request(row)

    def append_text(
        self, row: int, token_ids: Int32Array, *, scope: int, begins_text: bool
    ) -> None:
        """Adds text that no request of this drafter generates to the store, in the next step.

        Args:
            row: A text row, which holds one text at a time. Tokens beyond its capacity are dropped.
            scope: The scope of the text, which is read where the text begins.
            begins_text: Whether another text begins, or the one in the row continues.
        """
        self._drafter.append_text(row, token_ids, scope, begins_text)

    def propose(self, rows: npt.NDArray[np.int32], sampled: torch.Tensor) -> DeviceDrafts:
        """Enqueues a step and returns its drafts, which are valid in stream order.

        Args:
            rows: [B] distinct rows, in host memory. A row that is out of range or has no request
                gets no draft, and its tokens are dropped.
            sampled: [B, 1 + M] int32: for each request the number of sampled tokens, then the
                tokens. A request without sampled tokens gets no draft.

        Raises:
            ValueError: There are more than R rows, or ``sampled`` has another shape or dtype.
            RuntimeError: The step cannot be enqueued; nothing has changed.
        """
        batch = len(rows)
        self._check_step("propose", batch, sampled)
        counts, lengths, costs, end = self._drafter.draft_offsets(batch)
        results = sampled.new_empty(end, dtype=torch.uint8)
        self._stream.copy(self._sampled[:batch], sampled)
        self._run(rows)
        self._stream.copy(results, self._drafts[:end])
        return DeviceDrafts(
            results[:counts].view(torch.int64).view(batch, self.k),
            results[counts:lengths].view(torch.int32),
            results[lengths:costs].view(torch.int32),
            results[costs:end].view(batch, self.k),
        )

    def update(self, rows: npt.NDArray[np.int32], sampled: torch.Tensor) -> None:
        """Enqueues a step that drafts nothing. The index and the store get the sampled tokens; the
        stream copies no drafts. Arguments and errors are those of :meth:`propose`."""
        self._check_step("update", len(rows), sampled)
        self._stream.copy(self._sampled[: len(rows)], sampled)
        self._run(rows, drafts=False)

    def _check_step(self, name: str, batch: int, sampled: torch.Tensor) -> None:
        if batch > len(self._sampled):
            limit = len(self._sampled)
            raise ValueError(f"HostDrafting: {name}: rows: expected at most {limit}, got {batch}")
        expected = batch, self._sampled.shape[1]
        if tuple(sampled.shape) != expected or sampled.dtype != torch.int32:
            # A copy would broadcast a single row, and give its tokens to all requests.
            got = f"{str(sampled.dtype).rpartition('.')[2]} {list(sampled.shape)}"
            raise ValueError(
                f"HostDrafting: {name}: sampled: expected int32 {list(expected)}, got {got}"
            )

    def _run(self, rows: npt.NDArray[np.int32], *, drafts: bool = True) -> None:
        job = self._drafter.create_job(rows, drafts)
        try:
            self._stream.run(job)
        except BaseException:
            self._drafter.cancel_job()
            raise
        self._has_run = True

    def flush(self) -> bool:
        """Enqueues the announced begins and ends of requests, and appended texts, without a step.

        Returns:
            False if the stream rejects the job; the next step then includes the begins and ends.
        """
        if not self._has_run:
            return True
        try:
            with self._stream.use_last_stream():
                self._run(np.empty(0, np.int32))
        except RuntimeError:
            return False
        return True

    def settle(self, seconds: float) -> bool:
        """Does what :meth:`flush` does, and waits until all jobs have run.

        Returns:
            False if jobs are still pending after ``seconds``. After a device error, jobs never run.
        """
        if not self.flush():
            return False
        deadline = time.monotonic() + seconds
        while self._drafter.count_pending_jobs() > 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
