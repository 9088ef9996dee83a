"""Measures drafting on the host in stream order: the call that enqueues a step, the step's job, and
the round trip from a device's stream to the host, also while the host is busy."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from ngram_npu import _C, NgramConfig, NgramStore
from ngram_npu.host_drafting import HostDrafting
from ngram_npu.index import make_index

from tools.bench.data import Workload
from tools.bench.measure import Implementation
from tools.bench.ops.base import Maker, Op, Result, SkipReasons
from tools.bench.options import Options, Size
from tools.bench.vllm_peer import StoreSpeculator, make_config

MIN_DRAFT_PROBABILITY = 2 ** (-40 / 16)
STORE_TOKENS = 1_000_000
Visibility = Literal["live", "finish"]
CPU = torch.device("cpu")
ROUND_TRIP_US = 30
STEPS_MS = (10, 30)
JOB_TOKENS = 8192
"""Maximum number of tokens that a job indexes."""
NUM_PROCESSES = 8
CU_CTX_SCHED_SPIN = 1
"""CUDA's flag that makes a thread that waits for the device poll, so that it keeps its core."""


class DeferredStream:
    """A stream that copies immediately and does not run jobs; it stores the last job."""

    job = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def run(self, job: int) -> None:
        self.job = job


class Job(Implementation):
    """The job of a step, which a device's stream calls. A store contains the text of the rows."""

    def __init__(
        self,
        workload: Workload,
        options: Options,
        visibility: Visibility | None,
        device: torch.device = CPU,
    ) -> None:
        self._workload = workload
        rows, capacity = workload.token_ids.shape
        config = NgramConfig(
            sizes="ladder",
            k=options.k,
            min_draft_probability=MIN_DRAFT_PROBABILITY,
            store=visibility,
        )
        store = None
        if visibility:
            store = NgramStore(rows, STORE_TOKENS, visibility=visibility, kind="numpy")
            lengths = workload.lengths[0].tolist()
            store.warm(row[:n] for row, n in zip(workload.token_ids, lengths, strict=True))
        self._stream = DeferredStream() if device == CPU else None
        self._host = HostDrafting(
            config,
            num_rows=rows,
            capacity=capacity,
            max_sampled=workload.sampled.shape[2],
            device=device,
            lag=1,
            index=make_index(config, rows, rows * capacity, kind="numpy"),
            store=store,
            stream=self._stream,
        )
        self._rows = np.arange(rows, dtype=np.int32)
        counts = (workload.sampled >= 0).sum(axis=2, dtype=np.int32)
        counts_and_tokens = np.concatenate((counts[:, :, None], workload.sampled), axis=2)
        self._sampled = torch.from_numpy(np.ascontiguousarray(counts_and_tokens, np.int32))
        self.function = _C.stream_run_job
        self.detail = f"the native function of a job; ladder, store: {visibility}"

    def reset(self) -> None:
        lengths = self._workload.lengths[0].tolist()
        for row, length in enumerate(lengths):
            self._host.begin(row, self._workload.token_ids[row, :length])
        for _ in range(1 + sum(lengths) // JOB_TOKENS):
            self._host.propose(self._rows[:0], self._sampled[0, :0])
            if self._stream is not None:
                _C.stream_run_job(self._stream.job)

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        assert self._stream is not None
        self._host.propose(self._rows, self._sampled[step])
        return (self._stream.job,)


class EnqueueCall(Job):
    """The call that enqueues a step, without the preceding gathers of the runner's tensors."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options, "live")
        self.function = self._host.propose
        self.detail = "HostDrafting.propose, with a stream that only keeps the job"
        self._is_pending = False

    def reset(self) -> None:
        self._run_job()
        super().reset()

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        self._run_job()
        self._is_pending = True
        return self._rows, self._sampled[step]

    def _run_job(self) -> None:
        if self._is_pending and self._stream is not None:
            _C.stream_run_job(self._stream.job)
        self._is_pending = False


class ProposeCall(EnqueueCall):
    """The call that vLLM's V2 runner makes in a step, with the gather of the sampled tokens."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        rows, capacity = workload.token_ids.shape
        config = make_config(options, capacity, rows)
        config.speculative_config.method = "ngram_gpu"
        config.max_concurrent_batches = 2
        section = {
            "lookup": "ladder",
            "min_draft_probability": MIN_DRAFT_PROBABILITY,
            "store": "live",
        }
        config.additional_config = {"ngram_npu": section}
        self._num_sampled = self._sampled[:, :, 0].contiguous()
        self._lengths = torch.zeros(rows, dtype=torch.int32)
        state = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.from_numpy(workload.token_ids)),
            total_len=SimpleNamespace(gpu=self._lengths),
            add_request=lambda req_id: None,
            remove_request=lambda req_id: None,
        )
        speculator = StoreSpeculator(config, CPU, state)
        assert speculator._host is not None
        self._host, self._host._stream = speculator._host, self._stream
        self.function = speculator.propose
        self.detail = "the V2 runner's propose(), with a stream that only keeps the job"
        self._batch = SimpleNamespace(
            req_ids=["bench"] * rows,
            num_reqs=rows,
            idx_mapping=torch.arange(rows),
            idx_mapping_np=self._rows,
        )

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        self._run_job()
        self._is_pending = True
        self._lengths.copy_(torch.from_numpy(self._workload.lengths[step + 1]))
        return self._batch, None, None, None, None, self._num_sampled[step], None, None


class DeviceStep(Job):
    """A step in the order of a GPU's stream: copies to the host, the job, and copies back."""

    is_captured = False

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options, "live", torch.device(options.device))
        self._sampled = self._sampled.to(options.device)
        self.function = self._host.propose
        self.detail = "HostDrafting.propose, from the first copy to the last, on the device"

    def reset(self) -> None:
        super().reset()
        torch.cuda.synchronize()

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return self._rows, self._sampled[step]


class RoundTrip(DeviceStep):
    """A step without requests, whose time is that of the round trip to the host."""

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return self._rows[:0], self._sampled[step][:0]


class HostDraftingStep(Op):
    name = "host-drafting"
    help = "a job of drafting on the host with a store, and the call that enqueues the job"
    sizes = ("1x1k", "128x1k", "256x1k", "1x32k", "128x32k", "256x32k")
    peers = ("finish", "no-store", "enqueue", "v2")
    device_peers = ("round-trip",)
    peer_makers: ClassVar[Mapping[str, Maker]] = {
        "finish": lambda workload, options: Job(workload, options, "finish"),
        "no-store": lambda workload, options: Job(workload, options, None),
        "enqueue": EnqueueCall,
        "v2": ProposeCall,
        "round-trip": RoundTrip,
    }
    assumptions: Mapping[str, Any] = {
        "finish": "a store that inserts text when requests end: a job with a live store takes "
        "longer, because it also inserts text after drafting",
        "enqueue": "copies within host memory; no driver is called",
        "v2": "as enqueue; the tensors are in host memory, so torch computes the gathers instead "
        "of only launching them on a GPU",
        "computed_share": "share of a step of this duration that a job and the round trip from the "
        f"stream to the host take; the round trip is {ROUND_TRIP_US} us, as published by others",
        "store": f"{STORE_TOKENS} tokens, warmed with the rows' text",
    }

    def make(self, workload: Workload, options: Options) -> Implementation:
        if options.device == "cpu":
            return Job(workload, options, "live")
        return DeviceStep(workload, options)

    def compare(self, implementations: list[Any], workload: Workload, options: Options) -> Result:
        result = super().compare(implementations, workload, options)
        if options.device == "cpu":
            us = result["ours"]["median_us"] + ROUND_TRIP_US
            result["computed_share"] = {f"{ms} ms": round(us / (1000 * ms), 4) for ms in STEPS_MS}
        return result


class HostLatency(Op):
    """Measures the time from the call that enqueues a step until the device has the drafts. The job
    runs in a thread of the driver, so it may be late if cores are busy or if other processes also
    draft. Each request samples one token per step; drafts are from a ladder, without a store."""

    name = "host-latency"
    help = "round trips of drafting on the host: idle, spinning, with busy cores, with 8 processes"
    sizes = ("1x1k", "128x32k", "256x32k")
    device_peers = ()

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        for size in self.select_sizes(options):
            arguments = {"size": str(size), "k": options.k, "device": options.device}
            arguments["steps"] = 100 * options.rounds
            (idle,) = _run_processes(arguments, 1)
            result: Result = {"size": str(size), "idle": idle}
            if options.device != "cpu":
                (result["spinning"],) = _run_processes(arguments | {"spin": True}, 1)
            with _occupy_cores():
                (result["busy cores"],) = _run_processes(arguments, 1)
            concurrent = _run_processes(arguments, NUM_PROCESSES)
            result[f"{NUM_PROCESSES} processes"] = max(concurrent, key=lambda r: r["p99_us"])
            yield result


def _run_processes(arguments: dict[str, Any], count: int) -> list[dict[str, float]]:
    """Calls `measure_latency` in several processes at the same time."""
    code = "import json, sys; from tools.bench.ops.host_drafting import measure_latency; "
    code += "print(json.dumps(measure_latency(**json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("host-latency: a process that measures failed; see its error above")
    return [json.loads(output) for output in outputs]


@contextmanager
def _occupy_cores() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_latency(
    size: str, k: int, device: str, steps: int, spin: bool = False
) -> dict[str, float]:
    """Returns the microseconds of round trips and of launches in this process."""
    if spin:  # before a CUDA context exists; an existing context would ignore the flag
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDevicePrimaryCtxSetFlags(0, CU_CTX_SCHED_SPIN)
    batch, context = Size.parse(size).batch, Size.parse(size).context
    rows = np.arange(batch, dtype=np.int32)
    capacity = context + 3 * steps + 64
    config = NgramConfig(sizes="ladder", k=k, min_draft_probability=MIN_DRAFT_PROBABILITY)
    drafting = HostDrafting(
        config,
        num_rows=batch,
        capacity=capacity,
        max_sampled=1,
        device=torch.device(device),
        index=make_index(config, batch, batch * capacity, kind="numpy"),
    )
    rng = np.random.default_rng(0)
    for row in rows:
        drafting.begin(int(row), rng.integers(0, 1000, context))
    sampled = torch.ones(batch, 2, dtype=torch.int32, device=device)
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for _ in range(16 + batch * context // JOB_TOKENS):  # until the prompts are indexed
        drafting.propose(rows[:0], sampled[:0])
    synchronize()
    round_trips, launches = [], []
    for _ in range(steps):
        drafting.propose(rows, sampled)
        start = time.perf_counter_ns()
        drafting.propose(rows, sampled)
        launches.append(time.perf_counter_ns() - start)
        synchronize()
        start = time.perf_counter_ns()
        drafting.propose(rows, sampled)
        synchronize()
        round_trips.append(time.perf_counter_ns() - start)
    median, p99 = np.percentile(round_trips, [50, 99])
    times = {"median_us": median, "p99_us": p99, "launch_median_us": np.median(launches)}
    return {name: round(float(ns) / 1e3, 1) for name, ns in times.items()}
