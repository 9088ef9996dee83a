"""Tests a server that reads the KV events of vLLM's own block pool and publisher (``store_feed``).

On V2, the server has two ranks, each of which embeds its own drafts: if they inserted different
text, the server's text would be wrong.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kv_events as stand_ins
import msgspec
import pytest
from engines import RUNNER, K, encode_corpus
from processes import METHODS, RANK_ENVIRONMENT, Server, find_free_port
from vllm.distributed import kv_events
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

METHOD = METHODS[{"v1": "store_padded", "v2": "store"}[RUNNER]]
BLOCK, PROMPT_TOKENS = 16, 40
TEXT_TOKENS = 256
"""Length of a text, which is delivered at once."""
HANG_S = 300.0
# Without the penalty, the tiny model repeats itself, and requests draft from their own text.
REPETITION_PENALTY = 1.3


class Replica:
    """The block pool of a scheduler, and its publisher. A test generates the requests' text."""

    def __init__(self, port: int) -> None:
        self._port, self._num_requests = port, 0
        self.start()

    def start(self) -> None:
        kv_cache_utils.init_none_hash(sha256_cbor)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor)
        self._pool = BlockPool(200, True, BLOCK, enable_kv_cache_events=True)
        self._publisher = ZmqEventPublisher(0, f"tcp://*:{self._port}")

    def close(self) -> None:
        self._publisher.shutdown()

    def generate(self, prompt: list[int], answer: list[int], salt: str) -> None:
        """Publishes the full blocks of a request step by step, as the scheduler does."""
        self._num_requests += 1
        request = Request(
            f"request {self._num_requests}",
            prompt,
            SamplingParams(max_tokens=1000),
            None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        blocks: list[Any] = []
        for step in range(0, len(answer) + 5, 5):
            num_full = request.num_tokens // BLOCK
            if num_full > len(blocks):
                num_cached = len(blocks)
                blocks += self._pool.get_new_blocks(num_full - num_cached)
                self._pool.cache_full_blocks(request, blocks, num_cached, num_full, BLOCK, 0)
                events = self._pool.take_events()
                self._publisher.publish(KVEventBatch(ts=time.time(), events=events))
            request.append_output_token_ids(answer[step : step + 5])


@pytest.fixture
def ports() -> tuple[int, int]:
    """The port of a replica, and that of the server."""
    return find_free_port(), find_free_port()


@pytest.fixture
def replica(ports: tuple[int, int]) -> Iterator[Replica]:
    replica = Replica(ports[0])
    yield replica
    replica.close()


@pytest.fixture
def server(model: Path, tmp_path: Path, ports: tuple[int, int]) -> Iterator[Server]:
    """A server that reads the replica, and publishes text that it does not read itself."""
    arguments = METHOD.make_arguments(model)
    feed = [f"tcp://127.0.0.1:{port}" for port in ports]
    options = {**arguments["additional_config"]["ngram_npu"], "store_feed": feed}
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{ports[1]}"}
    arguments |= {
        "additional_config": {"ngram_npu": options},
        "kv_events_config": {**events, "publisher": "zmq"},
        "tensor_parallel_size": 2 if RUNNER == "v2" else 1,
    }
    environment = {**RANK_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = Server(model, tmp_path, arguments, **environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def serve(server: Server, prompts: Sequence[list[int]], salt: str) -> tuple[list[list[int]], float]:
    """Serves prompts one after the other. Returns the answers, and the tokens per step of each
    request."""
    extra_args = {"repetition_penalty": REPETITION_PENALTY, "cache_salt": salt}
    names = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"
    before = server.read_metrics()
    answers = [
        server.complete(prompt, TEXT_TOKENS - len(prompt), extra_args).choices[0].token_ids
        for prompt in prompts
    ]
    after = server.read_metrics()
    accepted, steps = (after[name] - before.get(name, 0.0) for name in names)
    return answers, 1 + accepted / steps


def wait_for_metric(server: Server, name: str, value: float) -> None:
    deadline = time.monotonic() + HANG_S
    while server.read_metrics().get(name) != value:
        assert time.monotonic() < deadline, (name, value, server.log.read_text()[-4000:])
        time.sleep(0.2)


def test_stand_ins_of_events_equal_vllms_classes() -> None:
    for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"):
        ours, theirs = (
            [
                (field.name, field.encode_name, field.required)
                for field in msgspec.structs.fields(getattr(module, name))
            ]
            for module in (stand_ins, kv_events)
        )
        assert ours == theirs
    blocks = [1], None, [2], 1, None, "GPU", None
    batches = (
        module.KVEventBatch(1.0, [module.BlockStored(*blocks), module.AllBlocksCleared()])
        for module in (stand_ins, kv_events)
    )
    assert len({*map(msgspec.msgpack.encode, batches)}) == 1


def test_server_drafts_text_of_publisher_that_restarts(
    model: Path, replica: Replica, server: Server
) -> None:
    ids = encode_corpus(model, 10_000)
    prompts = [ids[577 * i : 577 * i + PROMPT_TOKENS] for i in range(4)]
    wait_for_metric(server, "ngram_npu_feed_publishers", 1)
    for run, half in enumerate((prompts[:2], prompts[2:])):
        if run == 1:
            replica.close()
            wait_for_metric(server, "ngram_npu_feed_publishers", 0)
            replica.start()
            wait_for_metric(server, "ngram_npu_feed_publishers", 1)
        expected, cold = serve(server, half, "cold")
        for prompt, answer in zip(half, expected, strict=True):
            replica.generate(prompt, answer, "fed")
        wait_for_metric(server, "ngram_npu_feed_tokens_total", 2 * (run + 1) * TEXT_TOKENS)
        answers, fed = serve(server, half, "fed")
        assert answers == expected
        # A step has K + 1 tokens at most. The answers are long, and also repeat themselves.
        assert K + 1 - fed < (K + 1 - cold) / 2, (fed, cold)
    metrics = server.read_metrics()
    for name in ("gaps", "orphans", "dropped", "rejected"):
        assert metrics[f"ngram_npu_feed_{name}_total"] == 0
    os.killpg(server.process.pid, signal.SIGTERM)
    server.process.wait(HANG_S)
    log = server.log.read_text()
    assert "store_feed is off" not in log
    assert "Traceback" not in log.partition("Shutting down")[0]
