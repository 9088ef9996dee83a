"""Drafting on the host for rows that a device writes, in the order of the device's stream.

A step is one job. It runs in a callback of the driver once the stream has come to it, and what is
behind it in the stream gets its drafts. Python waits for nothing, and is not called from the job
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

if TYPE_CHECKING:
    import numpy.typing as npt

NO_LIMIT = 2**63 - 1


class Stop(NamedTuple):
    """How a request may end that can be told from its tokens. Its text up to there is stored even
    if its end is announced early."""

    tokens: tuple[int, ...] = ()
    """Any of them ends the text."""
    max_length: int = NO_LIMIT
    """Of the row, the prompt included."""
    prompt_length: int = 0
    min_output: int = 0
    """Tokens of output before repetition ends the text."""
    min_pattern: int = 0
    max_pattern: int = 0
    """Tokens of a pattern that ends the text by repetition; 0: none does."""
    min_count: int = 0
    """How often the pattern must occur in sequence."""


class HostDrafts(NamedTuple):
    """On the rows' device, for the B requests of a step."""

    draft_token_ids: torch.Tensor
    """[B, k] int64; unused places as `fill` says."""
    num_draft_tokens: torch.Tensor
    """[B] int32"""
    match_len: torch.Tensor
    """[B] int32; 0: no draft was found."""
    draft_costs: torch.Tensor
    """[B, k] uint8; undefined unless the configuration has costs."""


class Stream(Protocol):
    """What runs copies and jobs in the order in which they are given."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None: ...
    def run(self, job: int) -> None:
        """``job``: the address that ``_C.STREAM_CALLBACK`` is called with.

        Raises:
            RuntimeError: the job will not run.
        """

    def again(self) -> AbstractContextManager[Any]:
        """Within it, whatever the thread, jobs go where the last one went."""


class CallingThread:
    """For rows in host memory: everything runs at once."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def run(self, job: int) -> None:
        _C.stream_run(job)

    def again(self) -> AbstractContextManager[Any]:
        return nullcontext()


class CudaStream:
    """torch's current stream of the device. Needs the driver only, not a CUDA build of ngram_npu.

    Raises:
        RuntimeError: the driver is not there, or it refuses.
    """

    def __init__(self) -> None:
        try:
            launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"ngram_npu: drafting on the host: {error}") from error
        launch.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        launch.restype = ctypes.c_int
        self._launch = launch
        self._used: Any = None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def run(self, job: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("ngram_npu: drafting on the host: not while a graph is captured")
        self._used = torch.cuda.current_stream()
        if status := self._launch(self._used.cuda_stream, _C.STREAM_CALLBACK, job):
            raise RuntimeError(f"ngram_npu: cuLaunchHostFunc returned status {status}, expected 0")

    def again(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._used)


class NpuStream:
    """torch_npu's current stream, through its queue. Needs CANN 8.3 or later.

    Raises:
        RuntimeError: this build has no NPU backend, or it does not load.
    """

    def __init__(self) -> None:
        if reason := _library.open_npu().reason:
            raise RuntimeError(f"ngram_npu: drafting on the host: {reason}")
        self._launch = _library.npu_launch_host_func()
        self._runtime: Any = torch.get_device_module("npu")
        self._used: Any = None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def run(self, job: int) -> None:
        self._used = self._runtime.current_stream()
        if self._launch(_C.STREAM_CALLBACK, job):
            raise RuntimeError("ngram_npu: drafting on the host: expected CANN 8.3 or later")

    def again(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._runtime.stream(self._used)
        return found


_STREAMS: dict[str, Callable[[], Stream]] = {
    "cpu": CallingThread,
    "cuda": CudaStream,
    "npu": NpuStream,
}


def current_stream(device: torch.device) -> Stream:
    """
    Raises:
        RuntimeError: jobs cannot run on that device.
    """
    if device.type not in _STREAMS:
        raise RuntimeError(f"ngram_npu: drafting on the host: not for {device.type}")
    return _STREAMS[device.type]()


class HostDrafting:
    """Drafts with an index and a store in host memory for rows on any device.

    The rows' text is kept here a second time, so that nothing depends on when the device overwrites
    its own: prompts come from the caller, sampled tokens from the device.

    Letters: B requests of a step, R rows, S tokens of a row, M sampled tokens of a request at most.
    """

    def __init__(
        self,
        config: NgramConfig,
        *,
        num_rows: int,
        capacity: int,
        most_sampled: int,
        device: torch.device,
        lag: int = 0,
        index: NgramIndex | None = None,
        store: NgramStore | None = None,
        stream: Stream | None = None,
        fill: bool = True,
    ) -> None:
        """
        Args:
            config: lookup and draft settings.
            num_rows, capacity, most_sampled: R, S and M.
            device: of the sampled tokens and of the drafts.
            lag: the store takes in what was sampled so many steps ago: in a scheduler that runs
                ahead, a request may have ended before without anyone having said so. A step without
                a request in any of its rows does not count.
            index, store: in host memory, with R slots; they are changed in jobs only.
            stream: what runs the jobs; None: the device's current stream.
            fill: unused places of a draft continue it, then hold the newest token; otherwise -1.

        Raises:
            ValueError: an argument is out of range; one line.
            RuntimeError: jobs cannot run on that device.
        """
        if stream is None:
            stream = current_stream(device)
        self.k = config.k
        self._has_run = False
        self._stream = stream
        pinned = device.type != "cpu"
        self._sampled = torch.zeros(
            num_rows, 1 + most_sampled, dtype=torch.int32, device="cpu", pin_memory=pinned
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
            most_sampled=most_sampled,
            lag=lag,
            sampled=self._sampled.numpy(),
            drafts=self._drafts.numpy(),
            index=None if index is None else np.asarray(index.tensor),
            fill=fill,
            **lookup,
        )

    def begin(
        self, row: int, token_ids: npt.ArrayLike, *, scope: int = 0, stop: Stop | None = None
    ) -> None:
        """A request begins in a row, with a prompt; before the step that reads the row."""
        tokens, *rest = Stop() if stop is None else stop
        limits = (min(max(number, 0), NO_LIMIT) for number in rest)
        self._drafter.begin(
            row, np.asarray(token_ids, np.int32), scope, np.asarray(tokens, np.int32), *limits
        )

    def end(self, row: int) -> None:
        """The request of a row has ended, or is preempted."""
        self._drafter.end(row)

    def propose(self, rows: npt.NDArray[np.int32], sampled: torch.Tensor) -> HostDrafts:
        """Enqueues a step, and returns its drafts as the stream will have them.

        Args:
            rows: [B], all different; of the host. A row that is not one of the R, or has no
                request, gets no draft, and its tokens are dropped.
            sampled: [B, 1 + M] int32: the number of sampled tokens, then the tokens. A request
                without any gets no draft.

        Raises:
            ValueError: more rows than R, or ``sampled`` of another shape or dtype.
            RuntimeError: the step cannot be enqueued; nothing has changed then.
        """
        batch = len(rows)
        if batch > len(self._sampled):
            most = len(self._sampled)
            raise ValueError(f"HostDrafting: propose: rows: expected at most {most}, got {batch}")
        expected = batch, self._sampled.shape[1]
        if tuple(sampled.shape) != expected or sampled.dtype != torch.int32:
            # A copy would repeat a single row, and so give its tokens to all requests.
            got = f"{str(sampled.dtype).rpartition('.')[2]} {list(sampled.shape)}"
            raise ValueError(
                f"HostDrafting: propose: sampled: expected int32 {list(expected)}, got {got}"
            )
        counts, lengths, costs, end = self._drafter.results(batch)
        found = sampled.new_empty(end, dtype=torch.uint8)
        self._stream.copy(self._sampled[:batch], sampled)
        self._run(rows)
        self._stream.copy(found, self._drafts[:end])
        return HostDrafts(
            found[:counts].view(torch.int64).view(batch, self.k),
            found[counts:lengths].view(torch.int32),
            found[lengths:costs].view(torch.int32),
            found[costs:end].view(batch, self.k),
        )

    def _run(self, rows: npt.NDArray[np.int32]) -> None:
        job = self._drafter.step(rows)
        try:
            self._stream.run(job)
        except BaseException:
            self._drafter.take_back()
            raise
        self._has_run = True

    def flush(self) -> bool:
        """Enqueues what was announced, without a step. False: the stream does not take it, so it
        remains for the next step."""
        if not self._has_run:
            return True
        try:
            with self._stream.again():
                self._run(np.empty(0, np.int32))
        except RuntimeError:
            return False
        return True

    def settle(self, seconds: float) -> bool:
        """Enqueues what was announced, and waits until all jobs have run. False: they have not
        after ``seconds``; after an error of the device they never will."""
        if not self.flush():
            return False
        until = time.monotonic() + seconds
        while self._drafter.pending:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True
