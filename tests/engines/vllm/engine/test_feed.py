"""Tests servers that read each other's text (``store_feed``), with vLLM's own publisher.

The servers run on V1 and the ranks on V2. In both runners, the same code of the scheduler's process
reads the text; ``test_vllm_feed_delivery.py`` inserts it into the stores of both.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import RUNNER, encode_corpus
from feed_faults import FAULTS, lose_batches
from feed_publisher import Publisher, make_event
from processes import METHODS, RANK_ENVIRONMENT, EngineProcess, Server, make_requests

if TYPE_CHECKING:
    from conftest import Runs

ONLY_V1, ONLY_V2 = (
    pytest.mark.skipif(runner != RUNNER, reason=f"{runner} tests it, see the file's docstring")
    for runner in ("v1", "v2")
)
METHOD = METHODS[{"v1": "store_padded", "v2": "store"}[RUNNER]]
SCOPE = "ngram_npu_scope"
TIMEOUT_S = 120
MAX_TOKENS = 120
# Without the penalty, the tiny model repeats itself, and requests draft from their own text.
REPETITION_PENALTY = 1.3
FAULT_COUNTERS = "gaps", "orphans", "dropped", "rejected"


class Ports:
    """Free ports of a publisher: for events and for replays."""

    def __init__(self) -> None:
        with socket.socket() as first, socket.socket() as second:
            for probe in (first, second):
                probe.bind(("127.0.0.1", 0))
            self.events, self.replay = (probe.getsockname()[1] for probe in (first, second))

    def __str__(self) -> str:
        return f"tcp://127.0.0.1:{self.events}?replay={self.replay}"

    def make_config(self) -> dict[str, Any]:
        """Returns vLLM's option ``kv_events_config``."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }


@contextmanager
def start_server(
    model: Path,
    folder: Path,
    *,
    ports: Ports | None = None,
    plugin: bool = True,
    feed: str = "",
    store_tokens: int | None = None,
) -> Iterator[Server]:
    """Starts a server. Without the plugin, it is vLLM without speculation."""
    arguments = (METHOD if plugin else METHODS["none"]).make_arguments(model)
    if store_tokens is not None:
        options = {**arguments["additional_config"]["ngram_npu"], "store_tokens": store_tokens}
        arguments["additional_config"] = {"ngram_npu": options}
    environment = {"NGRAM_NPU_VLLM": "1" if plugin else "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    metrics = folder / "metrics"
    metrics.mkdir(parents=True)
    environment["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    if feed:
        environment["NGRAM_NPU_VLLM_STORE_FEED"] = feed
    if ports is not None:
        arguments["kv_events_config"] = ports.make_config()
    server = Server(model, folder, arguments, **environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def serve(
    server: Server, prompts: Sequence[list[int]], scope: str = "", salt: str = ""
) -> list[list[int]]:
    extra_args: dict[str, Any] = {"repetition_penalty": REPETITION_PENALTY}
    extra_args |= {"vllm_xargs": {SCOPE: scope}} if scope else {}
    extra_args |= {"cache_salt": salt} if salt else {}

    def complete(prompt: list[int]) -> list[int]:
        tokens: list[int] = server.complete(prompt, MAX_TOKENS, extra_args).choices[0].token_ids
        return tokens

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(complete, prompts))


def read_tokens_per_step(server: Server, prompts: Sequence[list[int]], **owner: str) -> float:
    """Serves prompts one after the other and returns the tokens per step of each request."""
    names = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"
    before = server.read_metrics()
    for prompt in prompts:
        serve(server, [prompt], **owner)
    after = server.read_metrics()
    accepted, steps = (after[name] - before.get(name, 0.0) for name in names)
    return 1 + accepted / steps


def wait_for_tokens(server: Server, count: float) -> None:
    """Waits until the server has read this number of tokens from the feed. A server inserts them in
    its next steps."""
    deadline = time.monotonic() + TIMEOUT_S
    while server.read_metrics().get("ngram_npu_feed_tokens_total", 0.0) < count:
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        time.sleep(0.2)


def make_prompts(model: Path, count: int) -> list[list[int]]:
    ids = encode_corpus(model, 60_000)
    return [ids[577 * i : 577 * i + 40] for i in range(count)]


@ONLY_V1
def test_server_drafts_text_of_another_server(model: Path, tmp_path: Path) -> None:
    prompts, ports, own_ports = make_prompts(model, 12), Ports(), Ports()
    first, second, third = prompts[:4], prompts[4:8], prompts[8:]
    feed = f"{ports},{own_ports}"
    with (
        start_server(model, tmp_path / "b", ports=own_ports, feed=feed) as receiver,
        ThreadPoolExecutor() as pool,
    ):
        with start_server(model, tmp_path / "a", ports=ports) as publisher:
            expected = serve(publisher, first, scope="fed")
            wait_for_tokens(receiver, 4 * MAX_TOKENS)
            serve(receiver, prompts[:1])  # its steps insert the text
            cold = read_tokens_per_step(receiver, first, scope="cold")
            fed = read_tokens_per_step(receiver, first, scope="fed")
            assert serve(receiver, first, scope="fed") == expected
            assert fed > 1.3 * cold, (fed, cold)
            # The publisher is killed while the receiver serves.
            served = pool.submit(serve, receiver, second)
            os.killpg(publisher.process.pid, signal.SIGKILL)
        assert served.result() == serve(receiver, second, scope="cold")
        # Another publisher takes the ports: vLLM without the plugin, which knows no scopes.
        with start_server(model, tmp_path / "c", ports=ports, plugin=False) as publisher:
            count = receiver.read_metrics()["ngram_npu_feed_tokens_total"]
            served = pool.submit(serve, receiver, second * 3)
            expected = serve(publisher, third, salt="tenant")
            served.result()
            wait_for_tokens(receiver, count + 3 * MAX_TOKENS)
            serve(receiver, prompts[:1])
            cold = read_tokens_per_step(receiver, third, salt="other tenant")
            fed = read_tokens_per_step(receiver, third, salt="tenant")
            assert serve(receiver, third, salt="tenant") == expected
            assert fed > 1.3 * cold, (fed, cold)
            metrics = receiver.read_metrics()
        assert metrics["ngram_npu_feed_publishers"] == 1
        assert metrics["ngram_npu_feed_rejected_total"] == 0
        log = receiver.log.read_text()
    assert f"127.0.0.1:{own_ports.events} is this engine's own publisher" in log
    assert "store_feed is off" not in log
    assert "Traceback" not in log.partition("Shutting down")[0]


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    """A publisher without faults, and then one for each of ``FAULTS``."""
    publishers = [Publisher()]
    for fault in FAULTS.values():
        publishers.append(Publisher(answers=fault.cause is not lose_batches))
    yield publishers
    for publisher in publishers:
        publisher.close()


def has_handled_faults(server: Server, faulty: Sequence[Publisher]) -> bool:
    """Returns whether the server has counted and logged all faults, and taken all text."""
    metrics, log = server.read_metrics(), server.log.read_text()
    if "ngram_npu_feed_age_seconds" not in metrics:  # before the end of the first update
        return False
    counters = [metrics[f"ngram_npu_feed_{name}_total"] for name in FAULT_COUNTERS]
    states = [
        f"feed: {publisher.address} {fault.state}" in log
        for publisher, fault in zip(faulty, FAULTS.values(), strict=True)
    ]
    # One of the faulty publishers has disappeared, but there is one without faults.
    is_connected = metrics["ngram_npu_feed_publishers"] == len(faulty)
    return all(counters + states) and is_connected and not metrics["ngram_npu_feed_age_seconds"]


@ONLY_V1
def test_server_with_faulty_publishers_serves_equal_text(
    model: Path, runs: Runs, tmp_path: Path, publishers: list[Publisher]
) -> None:
    healthy, *faulty = publishers
    requests = make_requests(model)
    penalties = [params.repetition_penalty for _, params in requests]
    indices = [i for i, penalty in enumerate(penalties) if penalty == REPETITION_PENALTY][:4]
    prompts = [requests[i][0] for i in indices]
    listed = (publisher.address for publisher in publishers)
    feed = ",".join(f"{address}?replay={address.replay_port}" for address in listed)
    pool = ThreadPoolExecutor(len(faulty))
    # The faulty publishers send more than 10,000 texts, each of which takes a block of the store.
    with start_server(model, tmp_path, feed=feed, store_tokens=1 << 23) as server, pool:
        for publisher in publishers:
            publisher.wait_for_subscription()
        texts = serve(server, prompts, salt="first")
        causes = (fault.cause for fault in FAULTS.values())
        caused = [pool.submit(*pair) for pair in zip(causes, faulty, strict=True)]
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            healthy.publish(make_event(prompt + text, name=f"{i}", keys=["fed"]))
        deadline = time.monotonic() + TIMEOUT_S
        while not has_handled_faults(server, faulty):
            assert time.monotonic() < deadline, server.log.read_text()[-4000:]
            assert serve(server, prompts) == texts
        for future in caused:
            future.result()
        cold = read_tokens_per_step(server, prompts, salt="cold")
        fed = read_tokens_per_step(server, prompts, salt="fed")
        assert serve(server, prompts, salt="fed") == texts
        assert fed > 1.3 * cold, (fed, cold)
        assert server.process.poll() is None
        log = server.log.read_text()
    assert "store_feed is off" not in log
    assert "Traceback" not in log
    # Without drafts, the same requests end earlier.
    for text, expected in zip(texts, runs("none").get_token_ids(indices), strict=True):
        assert text[: len(expected)] == expected


@pytest.fixture(scope="module")
def ports(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """The ports of a server that has published text."""
    ports, folder = Ports(), tmp_path_factory.mktemp("publisher")
    with start_server(model, folder, ports=ports, plugin=False) as server:
        serve(server, make_prompts(model, 4))
        yield ports


@ONLY_V2
@pytest.mark.parametrize("worker", ["FeedReadingWorker", "ReportingWorker"])
def test_rank_that_reads_the_feed_itself_ends_its_worker(
    model: Path, runs: Runs, tmp_path: Path, ports: Ports, worker: str
) -> None:
    request_indices = 2 * [0, 5, 6]
    process = EngineProcess(
        model,
        tmp_path / "log",
        "none",
        request_indices,
        ["report_drafts"],
        ["ngram_npu_store_statistics"],
        overrides={
            **METHOD.make_arguments(model),
            "tensor_parallel_size": 2,
            "worker_cls": f"workers.{worker}",
            "worker_extension_cls": "ngram_npu.engines.vllm.extension.StoreExtension",
        },
        **RANK_ENVIRONMENT,
        NGRAM_NPU_VLLM_STORE_FEED=str(ports),
    )
    if worker == "FeedReadingWorker":
        status, log = process.wait()
        assert status != 0
        assert "expected text with digest" in log
        assert "RESULT " not in log
        return
    result, _ = process.read_result()
    assert all(first == second for first, second in result["rpc_results"])
    assert result["token_ids"] == runs("none").get_token_ids(request_indices)
    statistics = result["rpc_results"][1][0]
    assert statistics["tokens_held"] > sum(map(len, result["token_ids"])) + MAX_TOKENS
