"""Measures what fed text costs on the way to a store: in the scheduler, in its message to the
ranks, and in the insertion. The op `feed` measures a scheduler with a reader."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.engines.vllm.feed import delivery
from ngram_npu.engines.vllm.feed.delivery import ATTRIBUTE, TextDelivery, TextStep
from ngram_npu.engines.vllm.feed.insertion import (
    TextInserter,
    make_device_inserter,
    make_host_inserter,
    make_job_inserter,
)
from ngram_npu.engines.vllm.feed.texts import FedText, FeedCounters
from ngram_npu.host_drafting import HostDrafting
from ngram_npu.store.device_store import DeviceStore

from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import Options

CAPACITY = 1 << 20
TEXT_ROWS = 256
VOCAB_SIZE = 32_000
TEXTS = {"1 text of 1024 tokens": (1, 1024), "64 texts of 16 tokens": (64, 16)}
"""Texts of a step, as a reader returns them: their number and their length."""
STEPS = 200


class FeedDelivery(Op):
    name = "feed-delivery"
    help = "the cost of fed text in the scheduler, in its message to the ranks, and in a store"
    sizes = ()
    assumptions: Mapping[str, Any] = {
        "store": f"{CAPACITY} tokens, {TEXT_ROWS} text rows, random text of {VOCAB_SIZE} token ids",
        "schedule_us": "time of TextDelivery.add_texts, without a reader",
        "pickle_us, unpickle_us": "time of the message to ranks in other processes: once, and on "
        "every rank",
        "v1_us, job_us, device_store_us": "time to insert a step's text, on the CPU: in V1's "
        "runner; in a job of the V2 runner, which contains nothing else; in a store on the device",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        for name, (count, length) in TEXTS.items():
            yield {"texts": name, **measure_steps(count, length, options.steps or STEPS)}


class Source:
    """A reader without a thread."""

    def __init__(self) -> None:
        self.ready: list[FedText] = []

    def take_texts(self, max_tokens: int) -> list[FedText]:
        texts = [*self.ready]
        self.ready.clear()
        return texts

    def get_counters(self) -> FeedCounters:
        return FeedCounters()

    def close(self) -> None:
        pass


def measure_steps(count: int, length: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Returns quantiles of the times per step, in which each text is continued."""
    rng, source = np.random.default_rng(1), Source()
    text_delivery, inserters = TextDelivery(source, TEXT_ROWS), make_inserters()
    times: dict[str, list[float]] = {}

    def measure(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        times.setdefault(name, []).append((time.perf_counter() - started) * 1e6)
        return result

    for _ in range(num_steps):
        tokens = rng.integers(0, VOCAB_SIZE, (count, length), dtype=np.int32)
        source.ready += [FedText(i, 0, row) for i, row in enumerate(tokens)]
        output = SimpleNamespace(total_num_scheduled_tokens=1)
        measure("schedule_us", lambda output=output: text_delivery.add_texts(output))
        step: TextStep = getattr(output, ATTRIBUTE)
        message = measure("pickle_us", lambda step=step: pickle.dumps(step))
        received = measure("unpickle_us", lambda message=message: pickle.loads(message))
        for name, insert in inserters.items():
            measure(name, lambda insert=insert, step=received: insert(step))
    return {
        name: dict(
            zip(("p10", "median"), np.quantile(values, (0.1, 0.5)).round(1).tolist(), strict=True)
        )
        for name, values in times.items()
    }


def make_inserters() -> dict[str, Callable[[TextStep], None]]:
    """Returns the functions that insert a step's text into an own store each."""
    config = NgramConfig(k=5, sizes="ladder", min_draft_probability=0.177)

    def make_store(slots: int) -> Any:
        return SimpleNamespace(
            host_contents=NgramStore(slots + TEXT_ROWS, CAPACITY),
            device_contents=DeviceStore(slots + TEXT_ROWS, CAPACITY, max_batch=TEXT_ROWS),
            first_text_slot=slots,
            num_text_rows=TEXT_ROWS,
        )

    job_store = make_store(1)
    drafting = HostDrafting(
        config,
        num_rows=1,
        capacity=64,
        max_sampled=6,
        device=torch.device("cpu"),
        store=job_store.host_contents,
        num_text_rows=TEXT_ROWS,
        text_capacity=delivery.ROW_TOKENS,
    )
    no_rows, no_tokens = np.empty(0, np.int32), torch.empty(0, 7, dtype=torch.int32)
    drafting.update(no_rows, no_tokens)

    def run(inserter: TextInserter | None) -> Callable[[TextStep], None]:
        assert inserter is not None
        return inserter.run_step

    insert_job = run(make_job_inserter(job_store, drafting))

    def insert_and_run_job(step: TextStep) -> None:
        insert_job(step)
        drafting.update(no_rows, no_tokens)

    return {
        "v1_us": run(make_host_inserter(make_store(1))),
        "job_us": insert_and_run_job,
        "device_store_us": run(make_device_inserter(make_store(1))),
    }
