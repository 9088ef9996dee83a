"""Tests `vllm serve` with the plugin and a store, called by OpenAI's client: text, streams, aborts,
error 400, metrics, a switch of drafting, and text of the KV events of vLLM's own block pool and
publisher (``store_feed``). The tests share a server and run in the order of the file.

On V2, the server has two ranks, of which the second is delayed, and ``k="auto"`` with random draft
lengths. Each rank drafts and embeds its own drafts: if they stored different text, or in another
order, the server's text would be wrong.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kv_events as stand_ins
import msgspec
import pytest
from engines import MAX_MODEL_LEN, RUNNER, STORE_EXTENSION, K, Request, encode_corpus
from monitoring import find_metric_names
from ngram_npu import NgramStore
from ngram_npu.store import scope_of_request
from openai import BadRequestError
from random_lengths import VERIFIED_LINE
from runs import METHODS, PRIVATE_STORE, make_requests
from server import Server, find_free_port, find_start_lines
from vllm.distributed import kv_events
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request as EngineRequest

if TYPE_CHECKING:
    from conftest import Runs

BLOCK = 16
TEXT_TOKENS = 256
"""Length of a text of which the feed delivers all tokens at once."""
HANG_S = 300.0
NUM_RANKS = {"v1": 1, "v2": 2}[RUNNER]
AUTO_K: dict[str, Any] = {"v1": {}, "v2": {"k": "auto"}}[RUNNER]
SALT = {"cache_salt": "salt"}


class Replica:
    """The block pool of a scheduler, and its publisher. A test generates the requests' text."""

    def __init__(self) -> None:
        self.port, self._num_requests = find_free_port(), 0
        self.start()

    def start(self) -> None:
        kv_cache_utils.init_none_hash(sha256_cbor)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor)
        self._pool = BlockPool(200, True, BLOCK, enable_kv_cache_events=True)
        self._publisher = ZmqEventPublisher(0, f"tcp://*:{self.port}")

    def close(self) -> None:
        self._publisher.shutdown()

    def generate(self, prompt: list[int], answer: list[int], salt: str) -> None:
        """Publishes the full blocks of a request step by step, as the scheduler does."""
        self._num_requests += 1
        request = EngineRequest(
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


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    replica = Replica()
    yield replica
    replica.close()


@pytest.fixture(scope="module")
def store_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "store"


@pytest.fixture(scope="module")
def server(model: Path, replica: Replica, store_file: Path) -> Iterator[Server]:
    """A server that reads the replica, and publishes text that it does not read itself."""
    arguments, port = METHODS["store"].make_arguments(model), find_free_port()
    addresses = [f"tcp://127.0.0.1:{port}" for port in (replica.port, port)]
    options = {**PRIVATE_STORE, **AUTO_K, "metrics": True, "store_feed": addresses}
    arguments |= {
        "additional_config": {"ngram_npu": {**options, "store_file": str(store_file)}},
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{port}",
            "publisher": "zmq",
        },
        "tensor_parallel_size": NUM_RANKS,
        "worker_cls": "workers.DelayedWorker",
        "worker_extension_cls": STORE_EXTENSION,
        **({"scheduler_cls": "random_lengths.RandomLengthScheduler"} if AUTO_K else {}),
    }
    server = Server(
        model,
        store_file.parent / "server",
        arguments,
        VLLM_SERVER_DEV_MODE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_LOG_STATS_INTERVAL="1",
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def requests(model: Path) -> dict[int, Request]:
    """Greedy requests by index, except those that OpenAI's API cannot express."""
    requests = enumerate(make_requests(model))
    return {i: request for i, request in requests if request[1].structured_outputs is None}


@pytest.fixture(scope="module")
def expected(runs: Runs, requests: dict[int, Request]) -> dict[int, list[int]]:
    """Tokens of an engine without speculation."""
    outputs = runs("none").outputs
    return {i: outputs[i].token_ids for i in requests}


def _start_completion(server: Server, request: Request, *, stream: bool) -> Any:
    prompt, params = request
    extra_args = {
        name: getattr(params, name)
        for name in ("ignore_eos", "repetition_penalty", "stop_token_ids")
    }
    return server.complete(
        prompt,
        params.max_tokens,
        {**extra_args, **(params.extra_args or {})},
        stop=params.stop or None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stream=stream,
    )


def _complete(server: Server, request: Request) -> list[int]:
    (choice,) = _start_completion(server, request, stream=False).choices
    token_ids: list[int] = choice.token_ids
    return token_ids


def _complete_as_stream(server: Server, request: Request) -> list[int]:
    chunks = _start_completion(server, request, stream=True)
    return [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]


def _abort_stream(server: Server, request: Request) -> None:
    """Closes a stream after its first chunk."""
    stream = _start_completion(server, request, stream=True)
    next(iter(stream))
    stream.close()


def _wait_for_metrics(server: Server, condition: Callable[[dict[str, float]], bool]) -> Any:
    """Returns the metrics once they satisfy the condition. The engine writes them periodically."""
    deadline = time.monotonic() + HANG_S
    while not condition(metrics := server.read_metrics()):
        assert time.monotonic() < deadline, (metrics, server.log.read_text()[-4000:])
        time.sleep(0.2)
    return metrics


def test_completions_and_streams_equal_those_without_speculation_while_others_are_aborted(
    server: Server, requests: dict[int, Request], expected: dict[int, list[int]]
) -> None:
    long_params = requests[0][1].clone()
    long_params.max_tokens = MAX_MODEL_LEN - 20
    aborted_requests = [(requests[i][0][:20], long_params) for i in (0, 3, 6)]
    with ThreadPoolExecutor(len(requests) + 3) as pool:
        futures = {
            i: pool.submit(_complete_as_stream if i % 2 else _complete, server, request)
            for i, request in requests.items()
        }
        aborts = [pool.submit(_abort_stream, server, request) for request in aborted_requests]
    assert {i: future.result() for i, future in futures.items()} == expected
    for abort in aborts:
        abort.result()
    # The gauges are those of the engine's last step, so a further request updates the gauges.
    assert _complete(server, requests[0]) == expected[0]
    names = "vllm:num_requests_running", "vllm:num_requests_waiting"
    _wait_for_metrics(server, lambda metrics: not any(metrics[name] for name in names))


def test_metrics_count_drafts_without_folder_for_several_processes(server: Server) -> None:
    metrics = _wait_for_metrics(server, lambda m: m.get("ngram_npu_draft_tokens_total", 0) > 100)
    num_draft_tokens = metrics["vllm:spec_decode_num_draft_tokens_total"]
    assert num_draft_tokens > metrics["vllm:spec_decode_num_accepted_tokens_total"] >= 50
    assert metrics["ngram_npu_rows_total"] > metrics["ngram_npu_drafts_total"] > 0
    for file in ("grafana-dashboard.json", "alerts.yaml"):
        assert metrics.keys() >= find_metric_names(file, "vllm:") != set()
    (line,) = find_start_lines(server.log.read_text())
    assert "(method ngram_gpu" in line
    assert "lookup=auto (n-grams of 1 to 16 tokens, latest match" in line
    assert "MainProcess" not in line  # the engine's or rank's own process loaded the plugin


def test_drafting_is_switched_off_and_on_over_http(
    server: Server, requests: dict[int, Request], expected: dict[int, list[int]]
) -> None:
    def count_drafts() -> float:
        return server.read_metrics()["vllm:spec_decode_num_draft_tokens_total"]

    for enabled in (False, True):
        assert server.call_workers("ngram_npu_set_drafting", enabled) == [{"drafting": enabled}]
        before = count_drafts()
        assert _complete(server, requests[0]) == expected[0]
        assert (count_drafts() > before) == enabled
        _wait_for_metrics(server, lambda m, value=enabled: m["ngram_npu_drafting"] == value)


@pytest.mark.parametrize("stream", [False, True])
def test_rejected_request_gets_error_400(server: Server, stream: bool) -> None:
    """A stream that the API's process accepts would otherwise end after the status 200."""
    for extra_args, message in (
        ({"vllm_xargs": {"ngram_npu_stor": False}, **SALT}, "unknown key 'ngram_npu_stor'"),
        ({"vllm_xargs": {"ngram_npu_store": "no"}}, "ngram_npu_store in extra_args"),
        # The engine publishes events, with which other engines store the text.
        ({"vllm_xargs": {"ngram_npu_store": False}}, "ngram_npu_store"),
    ):
        with pytest.raises(BadRequestError, match=f"ngram_npu: {message}"):
            server.complete([5, 6, 7], 4, extra_args, stream=stream)
    assert server.complete([5, 6, 7], 4, SALT).usage.completion_tokens == 4
    log = server.log.read_text()
    assert "the text of requests without both is not stored" in log
    assert "Traceback" not in log


def test_store_calls_change_one_scope(server: Server, requests: dict[int, Request]) -> None:
    def count_tokens() -> int:
        (first, *others) = server.call_workers("ngram_npu_store_statistics")
        assert others == [first] * (NUM_RANKS - 1)
        tokens: int = first["tokens_held"]
        return tokens

    before = count_tokens()
    assert before > 0
    server.call_workers("ngram_npu_store_warm", [[5, 8, 13] * 9], "warm")
    assert count_tokens() == before + 27
    server.call_workers("ngram_npu_store_clear", "tenant")
    assert 27 <= count_tokens() < before
    server.call_workers("ngram_npu_store_clear", "warm")
    assert count_tokens() < before


def test_stand_ins_of_events_equal_vllms_classes() -> None:
    """A newer vLLM may have further fields after these."""
    for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"):
        ours, theirs = (
            [
                (field.name, field.encode_name, field.required)
                for field in msgspec.structs.fields(getattr(module, name))
            ]
            for module in (stand_ins, kv_events)
        )
        assert ours == theirs[: len(ours)]
    blocks = [1], None, [2], 1, None, "GPU", None
    ours, theirs = (
        msgspec.msgpack.encode(
            module.KVEventBatch(1.0, [module.BlockStored(*blocks), module.AllBlocksCleared()])
        )
        for module in (stand_ins, kv_events)
    )
    assert msgspec.msgpack.decode(ours) == msgspec.msgpack.decode(theirs)


def _serve(server: Server, prompt: list[int], salt: str) -> tuple[list[int], float]:
    """Returns the answer, which fills the last block, and its number of tokens per step."""
    extra_args = {"repetition_penalty": 1.3, "cache_salt": salt}
    names = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"
    before = server.read_metrics()
    answer = server.complete(prompt, 7 * BLOCK - len(prompt), extra_args).choices[0].token_ids
    after = server.read_metrics()
    accepted, steps = (after[name] - before.get(name, 0.0) for name in names)
    return answer, 1 + accepted / steps


def _find_answer_without_repetitions(
    server: Server, ids: list[int], starts: Iterator[int]
) -> tuple[list[int], list[int], float]:
    """Returns a prompt, its answer, and the answer's number of tokens per step. If the tiny model
    repeats itself, requests draft from their own text as well as from that of others."""
    for start in starts:
        prompt = ids[start : start + 40]
        answer, tokens_per_step = _serve(server, prompt, f"cold {start}")
        if tokens_per_step < 3:
            return prompt, answer, tokens_per_step
    raise AssertionError("expected an answer without repetitions, got none")


def test_server_drafts_text_of_publisher_that_restarts(
    model: Path, replica: Replica, server: Server
) -> None:
    ids = encode_corpus(model, 10_000)
    _wait_for_metrics(server, lambda m: m.get("ngram_npu_feed_publishers") == 1)
    starts = iter(range(0, 9000, 577))
    num_tokens = 0
    for run in range(2):
        if run == 1:
            replica.close()
            _wait_for_metrics(server, lambda m: m["ngram_npu_feed_publishers"] == 0)
            replica.start()
            _wait_for_metrics(server, lambda m: m["ngram_npu_feed_publishers"] == 1)
        prompt, expected, cold = _find_answer_without_repetitions(server, ids, starts)
        filler = ids[-TEXT_TOKENS:][: TEXT_TOKENS - len(prompt) - len(expected)]
        replica.generate(filler + prompt, expected, "fed")
        num_tokens += TEXT_TOKENS
        _wait_for_metrics(server, lambda m, n=num_tokens: m["ngram_npu_feed_tokens_total"] == n)
        answer, fed = _serve(server, prompt, "fed")
        assert answer == expected
        # Without the text, the second answer would take as many steps as the first.
        assert fed > 1.25 * cold
    metrics = server.read_metrics()
    for name in ("gaps", "orphans", "dropped", "rejected"):
        assert metrics[f"ngram_npu_feed_{name}_total"] == 0


@pytest.mark.skipif(RUNNER == "v1", reason="this server of V1 has one rank")
def test_ranks_have_equal_drafts_of_changing_lengths(server: Server) -> None:
    first, second = server.call_workers("report_drafts")
    assert first == second
    assert first[1] > 100
    log = server.log.read_text()
    assert VERIFIED_LINE in log
    assert "k='auto' is off" not in log


def test_store_file_of_stopped_server_contains_its_text(server: Server, store_file: Path) -> None:
    """vLLM kills the workers when the server stops, so the store must be saved before."""
    token_ids = server.complete("import os\nimport sys\n", 40, SALT).choices[0].token_ids

    def find_stored() -> list[list[int]]:
        scope = scope_of_request("salt")
        texts = NgramStore.load(store_file).texts() if store_file.exists() else ()
        return [text.tolist() for owner, text in texts if owner == scope]

    def is_saved(metrics: Any) -> bool:  # the store holds back the tokens of the last step
        return any(text[: len(token_ids) - K - 1] == token_ids[: -K - 1] for text in find_stored())

    _wait_for_metrics(server, is_saved)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(HANG_S)
    assert is_saved(None)
    log = server.log.read_text()
    assert f"store_file={store_file} is written when no request runs" in log
    assert "with shutdown_timeout=0 vLLM kills its workers" in log
    assert "store_feed is off" not in log
    # Of a busy server, vLLM may log that the engine is gone while it shuts down.
    assert "Traceback" not in log.partition("[shutdown]")[0]
