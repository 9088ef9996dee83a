"""Counts tokens per step of vLLM's V1 engine on the CPU, whose model predicts recorded text.

    python -m tools.bench.vllm_end_to_end [--limit 20] [--data FOLDER] [--json FILE]

Needs an environment in which vLLM and ngram_npu are installed. The scheduler, the prefix cache, the
runner and the rejection sampler are vLLM's; only the forward pass is replaced, so a step takes no
time that would be comparable with a model's. Each setting has an engine in a process of its own,
which runs one request at a time. The text of every answer is compared with the recording.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu_cli.tokenization import TokenRequest

from tools.bench.measure import ROOT, make_parser, write_result
from tools.bench.recorded import find_data, load_sets
from tools.bench.suffix_decoding import build_package

K = 5
SETS = ("specbench-chat", "tau-bench-airline")
MAX_MODEL_LEN = 16_384
SITE = ROOT / "tests" / "engines" / "vllm" / "engine" / "site"
ENVIRONMENT = {
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
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": MAX_MODEL_LEN,
    "dtype": "float32",
}
NGRAMS = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
OURS = {"method": "custom_class", "model": "ngram_npu.engines.vllm.NgramProposer"}
SETTINGS: Mapping[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "no drafts": (None, {}),
    "vLLM, n-grams of 2 to 5": ({"method": "ngram", **NGRAMS}, {"NGRAM_NPU_VLLM": "0"}),
    "vLLM, n-grams of 1 to 16": (
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 16},
        {"NGRAM_NPU_VLLM": "0"},
    ),
    "vLLM, suffix decoding": ({"method": "suffix"}, {"NGRAM_NPU_VLLM": "0"}),
    "ngram_npu": (OURS, {}),
    "ngram_npu, store": (OURS, {"store": True, "scope": "shared"}),
}
"""By setting: vLLM's speculative configuration, and options of ngram_npu or, in capitals, variables
of the environment."""


class RecordedModel:
    """Replaces the forward pass of a V1 runner, and counts decoding steps."""

    def __init__(self, runner: Any) -> None:
        import torch

        self._torch, self._vocab_size = torch, MODEL["vocab_size"]
        self._tokens, self._prompt_length = torch.empty(0, dtype=torch.int64), 0
        self.num_steps = self.num_drafted = 0
        runner._model_forward = self._forward
        runner.model.compute_logits = self._compute_logits

    def begin(self, text: Any, prompt_length: int) -> None:
        self._tokens = self._torch.from_numpy(text.astype(np.int64))
        self._prompt_length = prompt_length

    def _forward(self, *, positions: Any, **inputs: Any) -> Any:
        """Returns the positions in place of hidden states."""
        if positions[0] >= self._prompt_length:
            self.num_steps += 1
            self.num_drafted += len(positions) - 1
        return positions.unsqueeze(1)

    def _compute_logits(self, positions: Any) -> Any:
        # After the text are the predictions for drafts beyond the last token, which are not used.
        following = (positions + 1).clamp(max=len(self._tokens) - 1)
        logits = self._torch.zeros(len(positions), self._vocab_size)
        return logits.scatter_(1, self._tokens[following], 1.0)


def run_engine(name: str, model: str, conversations: Sequence[TokenRequest]) -> dict[str, float]:
    """Generates the completions of the conversations with a new engine."""
    from vllm import LLM, SamplingParams

    speculative, options = SETTINGS[name]
    section = {key: value for key, value in options.items() if key.islower()}
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        "async_scheduling": False,
        "speculative_config": speculative and {**speculative, "num_speculative_tokens": K},
        "additional_config": {"ngram_npu": section} if section else {},
    }
    llm: Any = LLM(**arguments)
    core = llm.llm_engine.engine_core.engine_core
    recorded = RecordedModel(core.model_executor.driver_worker.worker.model_runner)
    num_generated, seconds = 0, 0.0
    for conversation in conversations:
        for turn in range(len(conversation.turns)):
            completion = conversation.turns[turn][1]
            if len(completion) < 2:
                continue
            text = TokenRequest(conversation.turns[: turn + 1]).tokens()
            prompt = text[: len(text) - len(completion)].tolist()
            recorded.begin(text, len(prompt))
            params = SamplingParams(temperature=0, max_tokens=len(completion), ignore_eos=True)
            start = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            seconds += time.perf_counter() - start
            assert list(output.outputs[0].token_ids) == completion.tolist(), "text differs"
            num_generated += len(completion) - 1
    steps = recorded.num_steps
    return {
        "tokens_per_step": round(num_generated / steps, 4),
        "drafted_per_step": round(recorded.num_drafted / steps, 4),
        "seconds": round(seconds, 2),
    }


def run_process(name: str, set_name: str, limit: int, data: Path) -> dict[str, float]:
    """Runs an engine in a new process, whose last line of output is the result."""
    variables = {key: value for key, value in SETTINGS[name][1].items() if key.isupper()}
    paths = [str(ROOT), str(SITE.parent), str(SITE), str(build_package())]
    paths.append(os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, **ENVIRONMENT, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        command = [sys.executable, "-m", "tools.bench.vllm_end_to_end", "--data", str(data)]
        command += ["--limit", str(limit), "--engine", name, set_name, model]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("vllm_end_to_end", __doc__)
    parser.add_argument("--limit", type=int, default=20, help="conversations per set")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)  # of run_process
    options = parser.parse_args(arguments)
    data = find_data(options.data)
    if data is None:
        parser.error("--data: expected a folder of recorded conversations")
    if options.engine:
        name, set_name, model = options.engine
        conversations = load_sets(data, f"replay/{set_name}.*")[set_name][: options.limit]
        print(json.dumps(run_engine(name, model, conversations)))
        return
    results = []
    for set_name in SETS:
        for name in SETTINGS:
            counts = run_process(name, set_name, options.limit, data)
            print(f"{set_name:20} {name:26} {counts}", flush=True)
            results.append({"set": set_name, "setting": name, **counts})
    write_result(options.json, arguments, k=K, results=results)


if __name__ == "__main__":
    main(sys.argv[1:])
