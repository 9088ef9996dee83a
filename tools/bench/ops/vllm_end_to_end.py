"""Measures tokens per second of vLLM's engine on the CPU, with and without drafts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tools.bench import vllm_engine
from tools.bench.measure import compute_ratios, compute_spread
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import BenchError, Options, Size, UnavailableError

ROOT = Path(__file__).resolve().parents[3]
ENGINE_TESTS = ROOT / "tests" / "engines" / "vllm" / "engine"
OUTPUT_TOKENS = 96
OWN_TOKENS = 512
"""Number of tokens at the end of a prompt that differ between the requests of a batch."""
INTERMEDIATE_SIZE = 8192
MAX_MODEL_LEN = 16384
_BLOCK = 32
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    # Starting numba's threads also changes the number of torch's: both use the same OpenMP.
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "NGRAM_NPU_VLLM": "0",
}
_PLUGIN_VARIABLES = {"NGRAM_NPU_VLLM": "1"}
_SITE_VARIABLES = {"PYTHONPATH": os.pathsep.join([str(ENGINE_TESTS / "site"), str(ENGINE_TESTS)])}

ENGINES: Mapping[str, tuple[str | None, dict[str, str], str]] = {
    "ours": ("ngram", _PLUGIN_VARIABLES, "ngram_npu in place of vLLM's method ngram, synchronous"),
    "vllm-ngram": ("ngram", {}, "vLLM's method ngram (numba), synchronous"),
    "no-speculation": (None, {}, "vLLM without speculation, synchronous"),
    "ours-async": (
        "ngram_gpu",
        _PLUGIN_VARIABLES | _SITE_VARIABLES,
        "ngram_npu in place of vLLM's method ngram_gpu, asynchronous scheduling, padded drafts",
    ),
}
"""By engine, ours first: vLLM's method, the environment of the process, and a description."""


class EngineProcess:
    """Runs an engine in a separate process, which waits while another engine is measured. The
    engine's own output goes to stderr."""

    def __init__(
        self, model: Path, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        command = [sys.executable, "-m", vllm_engine.__name__, str(model), json.dumps(arguments)]
        paths = [str(ROOT), environment.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, **_ENVIRONMENT, **environment}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables)
        self._read_answer()

    def run(self, prompts: list[list[int]], max_tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
        """Generates ``max_tokens`` tokens per prompt; returns vllm_engine.py's answer."""
        assert self._process.stdin is not None
        batch = {"prompts": prompts, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(batch) + "\n")
        self._process.stdin.flush()
        run = self._read_answer()
        if run["torch_threads"] != 1:
            raise BenchError(f"torch's threads: expected 1, got {run['torch_threads']}")
        return run

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the engine's process ended: see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class VllmEndToEnd(Op):
    name = "vllm-end-to-end"
    help = "tokens per second of vLLM's engine on the CPU, with and without drafts"
    sizes = ("1x1k", "16x1k", "1x8k", "16x8k")
    peers = tuple(name for name in ENGINES if name != "ours")

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        names = ["ours", *(self.peers if options.peers is None else options.peers)]
        if unknown := set(names) - ENGINES.keys():
            known = ", ".join(ENGINES)
            raise BenchError(f"{self.name}: peers: expected {known}, got {', '.join(unknown)}")
        sizes = self.select_sizes(options)
        _find_openmp()
        model, corpus = prepare_model()
        with ExitStack() as stack:
            engines: dict[str, EngineProcess] = {}
            for name in names:
                engine = start_engine(name, model, sizes, options)
                engines[name] = stack.enter_context(closing(engine))
            for size in sizes:
                yield self._compare_engines(engines, size, corpus, options.rounds)

    def _compare_engines(
        self, engines: dict[str, EngineProcess], size: Size, corpus: list[int], rounds: int
    ) -> Result:
        prompts = make_prompts(size, corpus)
        # This run fills the prefix caches with the prompts, and triggers compilation.
        texts = {name: engine.run(prompts)["token_ids"] for name, engine in engines.items()}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        names = list(engines)
        for i in range(rounds):  # ours and vllm-ngram always run one after the other
            for name in names if i % 2 == 0 else reversed(names):
                runs[name].append(engines[name].run(prompts))

        def list_values(name: str, key: str) -> list[float]:
            return [run[key] for run in runs[name]]

        seconds = {name: list_values(name, "seconds") for name in names}
        drafting = {name: list_values(name, "drafting_seconds") for name in names}
        speeds = {n: [size.batch * OUTPUT_TOKENS / s for s in seconds[n]] for n in names}
        drafters = [name for name in names if drafting[name][0]]
        result: Result = {
            "size": str(size),
            "batch": size.batch,
            "context": size.context,
            "tokens_per_second": {name: compute_spread(speeds[name]) for name in names},
            "cpu_seconds": {
                name: compute_spread(list_values(name, "cpu_seconds")) for name in names
            },
            "drafting_ms": {n: compute_spread([1e3 * s for s in drafting[n]]) for n in drafters},
            "ratio": {},
            "drafting_ratio": {},
            "requests_with_other_text": {},
            "data": describe_data(),
        }
        for name in names if "no-speculation" in texts else ():
            pairs = zip(texts[name], texts["no-speculation"], strict=True)
            result["requests_with_other_text"][name] = sum(a != b for a, b in pairs)
        for name in (name for name in names if name.startswith("ours")):
            for peer in ("no-speculation", "vllm-ngram"):
                if peer in names:
                    key = f"{name} over {peer}"
                    result["ratio"][key] = compute_ratios(seconds[peer], seconds[name])
            if "vllm-ngram" in names:
                ratio = compute_ratios(drafting["vllm-ngram"], drafting[name])
                result["drafting_ratio"][name] = ratio
        return result


def prepare_model() -> tuple[Path, list[int]]:
    """Returns the model, and the source text of the prompts."""
    from transformers import AutoTokenizer

    from tests.support import tiny_model

    folder = ROOT / "build" / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model.get_model_folder(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return widen_model(model), tokenizer.encode(tiny_model.read_corpus()[1_000_000:1_400_000])


def start_engine(
    name: str, model: Path, sizes: tuple[Size, ...], options: Options
) -> EngineProcess:
    method, environment, _ = ENGINES[name]
    speculative = {
        "method": method,
        "num_speculative_tokens": options.k,
        "prompt_lookup_min": options.min_n,
        "prompt_lookup_max": options.max_n,
    }
    max_model_len = max(size.context for size in sizes) + OUTPUT_TOKENS + _BLOCK
    # Enough blocks for all prompts of all sizes, so that they stay in the prefix cache.
    blocks = 64 + sum(size.batch * (max_model_len // _BLOCK + 1) for size in sizes)
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "max_num_seqs": max(size.batch for size in sizes),
        "max_num_batched_tokens": 2048,
        "block_size": _BLOCK,
        "num_gpu_blocks_override": blocks,
        "disable_log_stats": False,
        "seed": 0,
        "speculative_config": speculative if method else None,
        "async_scheduling": name == "ours-async",
    }
    return EngineProcess(model, arguments, environment | {"LD_PRELOAD": _find_openmp()})


def make_prompts(size: Size, corpus: list[int]) -> list[list[int]]:
    """Returns a document that the requests share, followed by a different passage per request."""
    num_own_tokens = min(OWN_TOKENS, size.context)
    shared_tokens = (corpus * (size.context // len(corpus) + 1))[: size.context - num_own_tokens]
    repeated_corpus = corpus + corpus
    starts = [number * 1777 % len(corpus) for number in range(1, size.batch + 1)]
    return [shared_tokens + repeated_corpus[start : start + num_own_tokens] for start in starts]


def widen_model(model: Path) -> Path:
    """Returns the tests' model with additional neurons whose output weights are zero: it
    generates the same text, and a forward pass costs as much as in a real model of that size."""
    wide_model = model.with_name(f"{model.name}-{INTERMEDIATE_SIZE}")
    if wide_model.exists():
        return wide_model
    import torch
    from safetensors.torch import load_file, save_file

    unfinished_model = wide_model.with_suffix(".unfinished")
    shutil.rmtree(unfinished_model, ignore_errors=True)
    shutil.copytree(model, unfinished_model)
    config = json.loads((model / "config.json").read_text())
    num_added = INTERMEDIATE_SIZE - config["intermediate_size"]
    config.update(intermediate_size=INTERMEDIATE_SIZE, max_position_embeddings=MAX_MODEL_LEN)
    (unfinished_model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if "gate_proj" in name or "up_proj" in name:
            rows = torch.randn(num_added, weight.shape[1], generator=noise).mul_(0.05)
            weights[name] = torch.cat([weight, rows])
        elif "down_proj" in name:
            weights[name] = torch.cat([weight, torch.zeros(weight.shape[0], num_added)], 1)
    save_file(weights, unfinished_model / "model.safetensors", {"format": "pt"})
    unfinished_model.rename(wide_model)
    return wide_model


def describe_data() -> dict[str, Any]:
    return {
        "model": "the engine tests' Llama (2 layers, hidden size 128, trained here on the sources "
        f"of Python's standard library), its MLPs widened to {INTERMEDIATE_SIZE} neurons; the "
        "added ones have output weights of zero: same text, a forward pass of 6.5 million weights",
        "prompts": f"from these sources; all but the last {OWN_TOKENS} tokens are the same for all "
        "requests of a batch; in the prefix cache, except the last block",
        "drafting_ms": "time in propose(), asynchronously also update_token_ids_ngram(), per batch",
        "output": f"{OUTPUT_TOKENS} tokens per request, greedy",
        "engine": "V1 runner, scheduler and client in one process and one thread, Intel OpenMP, "
        "float32, eager; one process per engine, of which one at a time works",
        "vllm": importlib.metadata.version("vllm-cpu"),
        "contestants": {name: detail for name, (_, _, detail) in ENGINES.items()},
    }


def _find_openmp() -> str:
    """Returns the path of Intel's OpenMP, which vLLM requires for speculation on a CPU: with
    another OpenMP, numba's threads disturb torch's."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if not library.exists():
        raise UnavailableError("intel-openmp is not installed here: run it in .venv-vllm")
    return str(library)
