"""A step of drafting on the host in stream order: enqueueing it, and its job."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from ngram_npu import _C, NgramConfig, NgramStore
from ngram_npu.host_drafting import HostDrafting
from ngram_npu.index import make_index

from tools.bench.data import Workload
from tools.bench.measure import Contestant
from tools.bench.ops.base import Make, Op, Result
from tools.bench.ops.store import LEAST_PROBABILITY, STORE_TOKENS
from tools.bench.options import Options
from tools.bench.vllm_peer import Speculator, proposer_config

CPU = torch.device("cpu")
Visibility = Literal["live", "finish"]
ROUND_TRIP_US = 30
STEPS_MS = (10, 30)


class _Late:
    """Keeps the last job; copies are made at once."""

    job = 0

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def run(self, job: int) -> None:
        self.job = job


class Job(Contestant):
    """The callback of a step. A store holds the rows' tokens."""

    def __init__(
        self,
        workload: Workload,
        options: Options,
        store: Visibility | None,
        device: torch.device = CPU,
    ) -> None:
        self._workload = workload
        rows, capacity = workload.token_ids.shape
        config = NgramConfig(
            sizes="ladder", k=options.k, min_draft_probability=LEAST_PROBABILITY, store=store
        )
        self._width = workload.sampled.shape[2]
        held = NgramStore(rows, STORE_TOKENS, visibility=store, kind="numpy") if store else None
        if held is not None:
            lengths = workload.lengths[0].tolist()
            held.warm(row[:n] for row, n in zip(workload.token_ids, lengths, strict=True))
        self._stream = _Late() if device == CPU else None
        self._host = HostDrafting(
            config,
            num_rows=rows,
            capacity=capacity,
            max_sampled=self._width,
            device=device,
            lag=1,
            index=make_index(config, rows, rows * capacity, kind="numpy"),
            store=held,
            stream=self._stream,
        )
        self._rows = np.arange(rows, dtype=np.int32)
        counts = (workload.sampled >= 0).sum(axis=2, dtype=np.int32)
        both = np.concatenate((counts[:, :, None], workload.sampled), axis=2)
        self._sampled = torch.from_numpy(np.ascontiguousarray(both, np.int32))
        self.function = _C.stream_run
        self.detail = f"the native function of a job; ladder, store: {store}"

    def reset(self) -> None:
        lengths = self._workload.lengths[0].tolist()
        for row, length in enumerate(lengths):
            self._host.begin(row, self._workload.token_ids[row, :length])
        for _ in range(1 + sum(lengths) // 8192):  # each job indexes so many tokens
            self._host.propose(self._rows[:0], self._sampled[0, :0])
            if self._stream is not None:
                _C.stream_run(self._stream.job)

    def arguments(self, step: int) -> tuple[Any, ...]:
        assert self._stream is not None
        self._host.propose(self._rows, self._sampled[step])
        return (self._stream.job,)


class Enqueue(Job):
    """What Python does in a step, without the runner's tensors that are gathered before it."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options, "live")
        self.function = self._host.propose
        self.detail = "HostDrafting.propose, with a stream that only takes the job"
        self._pending = False

    def reset(self) -> None:
        self._run()
        super().reset()

    def arguments(self, step: int) -> tuple[Any, ...]:
        self._run()
        self._pending = True
        return self._rows, self._sampled[step]

    def _run(self) -> None:
        if self._pending and self._stream is not None:
            _C.stream_run(self._stream.job)
        self._pending = False


class Propose(Enqueue):
    """What vLLM's V2 runner calls in a step: with the gathers of the sampled tokens before it."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        rows, capacity = workload.token_ids.shape
        config = proposer_config(options, capacity, rows)
        config.speculative_config.method = "ngram_gpu"
        config.max_concurrent_batches = 2
        ours = {"sizes": "ladder", "min_draft_probability": LEAST_PROBABILITY, "store": "live"}
        config.additional_config = {"ngram_npu": ours}
        self._lengths = torch.zeros(rows, dtype=torch.int32)
        state = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.from_numpy(workload.token_ids)),
            total_len=SimpleNamespace(gpu=self._lengths),
            add_request=lambda req_id: None,
            remove_request=lambda req_id: None,
        )
        speculator = Speculator(config, CPU, state)
        assert speculator._host is not None
        self._host, self._host._stream = speculator._host, self._stream
        self.function = speculator.propose
        self.detail = "the V2 runner's propose(), with a stream that only takes the job"
        self._batch = SimpleNamespace(
            req_ids=["bench"] * rows,
            num_reqs=rows,
            idx_mapping=torch.arange(rows),
            idx_mapping_np=self._rows,
        )

    def arguments(self, step: int) -> tuple[Any, ...]:
        self._run()
        self._pending = True
        self._lengths.copy_(torch.from_numpy(self._workload.lengths[step + 1]))
        return self._batch, None, None, None, None, self._sampled[step, :, 0], None, None


class DeviceStep(Job):
    """A step in the order of a GPU's stream: copies, the callback, and the wait for it."""

    captured = False

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options, "live", torch.device(options.device))
        self._sampled = self._sampled.to(options.device)
        self.function = self._host.propose
        self.detail = "HostDrafting.propose, from the first copy to the last, on the device"

    def reset(self) -> None:
        super().reset()
        torch.cuda.synchronize()

    def arguments(self, step: int) -> tuple[Any, ...]:
        return self._rows, self._sampled[step]


class RoundTrip(DeviceStep):
    """A step without requests."""

    def arguments(self, step: int) -> tuple[Any, ...]:
        return self._rows[:0], self._sampled[step][:0]


class HostDraftingStep(Op):
    name = "host-drafting"
    help = "a job of drafting on the host with a store; its parts; enqueueing it"
    sizes = ("1x1k", "128x1k", "256x1k", "1x32k", "128x32k", "256x32k")
    peers = ("finish", "no-store", "enqueue", "v2")
    device_peers = ("round-trip",)
    unused_settings = frozenset({"config", "match_policy", "engine", "threads"})
    peer_makers: ClassVar[Mapping[str, Make]] = {
        "finish": lambda workload, options: Job(workload, options, "finish"),
        "no-store": lambda workload, options: Job(workload, options, None),
        "enqueue": Enqueue,
        "v2": Propose,
        "round-trip": RoundTrip,
    }
    assumptions: Mapping[str, Any] = {
        "finish": "a store that makes text findable at the end of requests: what a job of the live "
        "one takes longer is its intake, which comes after the drafts",
        "enqueue": "copies within the host; no driver is called",
        "v2": "as enqueue; the tensors are the host's, so that torch does the work that it would "
        "only launch on a GPU",
        "computed_share": "of a step of so many milliseconds: a job, and for the way from "
        f"the stream to the host and back {ROUND_TRIP_US} us, as others measured it",
        "store": f"{STORE_TOKENS} tokens, warm with what the rows hold",
    }

    def make(self, workload: Workload, options: Options) -> Contestant:
        return (
            Job(workload, options, "live")
            if options.device == "cpu"
            else DeviceStep(workload, options)
        )

    def compare(self, contestants: list[Any], workload: Workload, options: Options) -> Result:
        result = super().compare(contestants, workload, options)
        if options.device == "cpu":
            taken_us = result["ours"]["median_us"] + ROUND_TRIP_US
            result["computed_share"] = {
                f"{ms} ms": round(taken_us / (1000 * ms), 4) for ms in STEPS_MS
            }
        return result
