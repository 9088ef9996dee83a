"""Measures what fed text costs a scheduler: the call in each step, and the time that the reader's
thread takes from the Python code of a step."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
from ngram_npu.engines.vllm.feed.delivery import ATTRIBUTE, TOKENS_PER_STEP, TextDelivery, attach
from ngram_npu.engines.vllm.feed.events import TextJoiner, decode_event, split_batch
from ngram_npu.engines.vllm.feed.reader import FeedReader

from tests.support.feed_publisher import BLOCK, VOCAB_SIZE, Publisher, encode_batch
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import Options

NUM_PUBLISHERS = 4
RATES = {"idle": 0, "busy": 20_000, "flooded": None}
"""Published tokens per second of all publishers; None: as many as the reader reads."""
NO_READER, WITHOUT_WAITS = "no reader", " without waits"
EVENTS_PER_BATCH = 64
BATCHES = 400
"""Number of different batches of a publisher, which repeats them after clearing its cache."""
STEPS, STEP_S = 40, 0.01
NUM_REQUESTS = 3_000
"""Requests in the Python code of a step, which takes about a millisecond."""
NUM_ROWS = 256
"""Rows to which texts are assigned, on each rank."""
SETTLE_S = 0.2
IDLE_CALLS = 20_000


class FeedOp(Op):
    name = "feed"
    help = "the cost of an idle and of a busy feed for a scheduler's step"
    sizes = ()
    assumptions: Mapping[str, Any] = {
        "step": f"a Python loop over {NUM_REQUESTS} requests, a call of schedule that adds at most "
        f"{TOKENS_PER_STEP} fed tokens, and a wait without the interpreter lock until "
        f"{STEP_S * 1000:g} ms have passed",
        "publishers": f"{NUM_PUBLISHERS} in another process on this machine; events of one block "
        f"of {BLOCK} tokens, {EVENTS_PER_BATCH} events per batch",
        "busy": f"{RATES['busy']} published tokens per second",
        "flooded": "the other process sends whenever the reader reads",
        "work_us": "time of the Python loop",
        "schedule_us": "time of a schedule that itself only returns an object, with two reads of "
        "the clock. After a wait, caches are cold and the core is slow",
        WITHOUT_WAITS: "a step begins when the one before has ended",
        "idle_call_ns": f"what the feed adds to schedule without texts, mean of {IDLE_CALLS} calls",
        "join": "decoding and joining events in one thread, without sockets",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        context = multiprocessing.get_context("spawn")
        pipe, child_pipe = context.Pipe()
        child = context.Process(target=publish, args=(child_pipe,), daemon=True)
        child.start()
        addresses = pipe.recv()
        steps: dict[str, list[tuple[float, float, int]]] = {}
        idle_calls_ns = []
        num_steps = options.steps or STEPS

        def run(name: str, scheduler: Scheduler, step_s: float = STEP_S) -> None:
            steps.setdefault(name, []).extend(run_steps(scheduler, num_steps, step_s))

        for _ in range(options.rounds):
            stock_scheduler = Scheduler(None)
            run(NO_READER, stock_scheduler)
            run(NO_READER + WITHOUT_WAITS, stock_scheduler, 0.0)
            reader = FeedReader(addresses, vocab_size=VOCAB_SIZE)
            delivery = TextDelivery(reader, NUM_ROWS)
            scheduler = Scheduler(delivery)
            while reader.get_counters().publishers < NUM_PUBLISHERS:
                time.sleep(0.01)
            for name, rate in RATES.items():
                pipe.send(rate)
                time.sleep(SETTLE_S)
                run(name, scheduler)
                if name == "idle":
                    run(name + WITHOUT_WAITS, scheduler, 0.0)
                    stock_ns = time_schedule(stock_scheduler)
                    idle_calls_ns.append(time_schedule(scheduler) - stock_ns)
            delivery.close()
            pipe.send(0)
        child.terminate()
        for name, values in steps.items():
            yield {"reader": name, **summarize(values)}
        yield {"idle_call_ns": round(float(np.median(idle_calls_ns)), 1)}
        yield {"join": {"tokens_per_second": round(time_joiner())}}


def publish(pipe: Connection) -> None:
    """Publishes at the rates that it receives, until the process is ended."""
    publishers = [Publisher(has_replay=False, max_messages=100) for _ in range(NUM_PUBLISHERS)]
    pipe.send([publisher.address for publisher in publishers])
    batches, number, first, due, rate = make_batches(), 0, 0, 0.0, 0
    while True:
        if pipe.poll(0 if rate != 0 else None):
            # A reader knows only texts whose beginning it received.
            rate, due, first = pipe.recv(), time.monotonic(), number
            continue
        for publisher in publishers:
            publisher.send(number, batches[(number - first) % len(batches)])
        number += 1
        if rate:
            due += NUM_PUBLISHERS * EVENTS_PER_BATCH * BLOCK / rate
            time.sleep(max(0.0, due - time.monotonic()))


def make_batches() -> list[bytes]:
    """Returns batches of the next blocks of texts that grow at the same time."""
    rng = random.Random(1)
    batches = [encode_batch({"type": "AllBlocksCleared"})]
    for i in range(BATCHES):
        events = []
        for text in range(EVENTS_PER_BATCH):
            event = {
                "type": "BlockStored",
                "block_hashes": [hash_block(text, i)],
                "parent_block_hash": hash_block(text, i - 1) if i else None,
                "token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(BLOCK)],
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None],
                "group_idx": 0,
            }
            events.append(event)
        batches.append(encode_batch(*events))
    return batches


def hash_block(text: int, block: int) -> int:
    return random.Random(text << 32 | block).getrandbits(64)


class Request:
    """A request of a scheduler, as far as it takes time."""

    def __init__(self, name: str) -> None:
        self.name, self.num_tokens = name, 0

    def schedule(self, num_tokens: int) -> int:
        self.num_tokens += num_tokens
        return self.num_tokens


class Scheduler:
    """A scheduler whose ``schedule`` takes no time itself."""

    output: Any = None

    def __init__(self, delivery: TextDelivery | None) -> None:
        if delivery is not None:
            attach(self, delivery)

    def schedule(self) -> Any:
        return self.output

    def shutdown(self) -> None: ...


def run_steps(
    scheduler: Scheduler, num_steps: int, step_s: float
) -> list[tuple[float, float, int]]:
    """Returns the seconds of the work and of ``schedule``, and the number of tokens, per step."""
    steps = []
    requests = [Request(str(i)) for i in range(NUM_REQUESTS)]
    for _ in range(num_steps):
        scheduler.output = SimpleNamespace(total_num_scheduled_tokens=1)
        started = time.perf_counter()
        scheduled = {request.name: request.schedule(1) for request in requests}
        worked = time.perf_counter()
        scheduler.schedule()
        scheduled_at = time.perf_counter()
        text_step = getattr(scheduler.output, ATTRIBUTE, None)
        assert len(scheduled) == NUM_REQUESTS
        num_tokens = 0 if text_step is None else len(text_step.tokens)
        steps.append((worked - started, scheduled_at - worked, num_tokens))
        if step_s:
            time.sleep(max(0.0, started + step_s - time.perf_counter()))
    return steps


def time_schedule(scheduler: Scheduler) -> float:
    """Returns the mean time of a call, in nanoseconds."""
    started = time.perf_counter_ns()
    for _ in range(IDLE_CALLS):
        scheduler.schedule()
    return (time.perf_counter_ns() - started) / IDLE_CALLS


def time_joiner() -> float:
    """Returns the tokens per second that one thread decodes and joins."""
    batches, joiner = make_batches(), TextJoiner(VOCAB_SIZE)
    joiner.set_capacity(1 << 17)
    started = time.perf_counter()
    for batch in batches:
        for raw in split_batch(batch):
            joiner.add_event(decode_event(raw), 0.0)
        while joiner.waiting:
            joiner.take(TOKENS_PER_STEP)
    return joiner.num_tokens / (time.perf_counter() - started)


def summarize(steps: list[tuple[float, float, int]]) -> dict[str, Any]:
    work, schedule, tokens = np.array(steps).T
    figures: dict[str, Any] = {"tokens_per_step": round(float(tokens.mean()), 1)}
    for name, seconds in (("work_us", work), ("schedule_us", schedule)):
        quantiles = np.quantile(seconds * 1e6, (0.5, 0.9, 0.99)).round(2).tolist()
        figures[name] = dict(zip(("median", "p90", "p99"), quantiles, strict=True))
    return figures
