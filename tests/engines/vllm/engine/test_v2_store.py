"""Tests the store of a running V2 engine across an update of the model's weights, as in RL, and
after what vLLM does at the start: it warms up kernels and reduces max_model_len."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from engines import (
    STORE,
    STORE_EXTENSION,
    BatchResult,
    Engine,
    K,
    Method,
    make_params,
    start_engine,
)
from runs import make_requests
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.v1.worker.gpu import warmup

if TYPE_CHECKING:
    from conftest import Runs

METHOD = Method("ngram_gpu", STORE, asynchronous=True)
NOISE = 0.05
"""Standard deviation of the change of a weight, relative to that of the weights of its tensor."""


def call_store(engine: Engine, name: str, *arguments: Any) -> Any:
    """Calls a method of the store in the worker and returns its result."""
    (result,) = engine.llm.collective_rpc(f"ngram_npu_store_{name}", args=arguments)
    return result


def _change_weights(model: Path, folder: Path) -> Path:
    """Writes the model with other weights."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for weight in weights.values():
            noise = torch.randn(weight.shape, generator=generator)
            weight += (NOISE * weight.std() * noise).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_weight_update_keeps_text_equal_and_removes_old_text(model: Path, tmp_path: Path) -> None:
    folders = [model, _change_weights(model, tmp_path)]
    prompts = [{"prompt_token_ids": make_requests(model)[i][0]} for i in (0, 0, 2, 2)]
    expected = []
    for folder in folders:
        with start_engine(folder, Method()) as engine:
            expected.append(engine.generate(prompts, make_params(24)))
    assert expected[0] != expected[1], "the weights have changed"
    with start_engine(model, METHOD, worker_extension_cls=STORE_EXTENSION) as engine:
        assert engine.generate(prompts, make_params(24)) == expected[0]
        engine.llm.sleep(level=2)
        engine.llm.wake_up(tags=["weights"])
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
        engine.llm.wake_up(tags=["kv_cache"])
        assert engine.llm.reset_prefix_cache()
        num_tokens = call_store(engine, "statistics")["tokens_held"]
        assert num_tokens > 0, "the store survived"
        call_store(engine, "mark_update", 1)
        old_count = engine.read_counters()[1]
        assert engine.generate(prompts, make_params(24)) == expected[1]
        assert engine.read_counters()[1] > old_count
        # The store may contain the tokens that a step verified after the stop.
        texts = [text.tolist() for _, text in engine.store.texts()]
        assert 0 < sum(map(len, texts)) <= sum(len(tokens) + K for tokens in expected[1])


def test_warm_up_and_fitted_max_model_len_change_neither_text_nor_store(
    model: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's worker makes up requests to warm up its kernels, which later requests must not see.
    vLLM reduces max_model_len to fit its KV cache only after it has created the speculator."""
    indices, result = [1, 9], BatchResult()  # whose text ends at max_model_len without speculation
    with start_engine(model, METHOD, max_model_len=-1) as engine:
        max_model_len: int = engine.runner.req_states.max_model_len
        assert max_model_len < 2000
        engine.drafter.propose = propose = Mock(wraps=engine.drafter.propose)
        warmup_args = engine.runner, engine.worker.execute_model, engine.worker.sample_tokens
        monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)  # needs a GPU
        # Triton's interpreter cannot run the kernel for top_k and top_p.
        monkeypatch.setattr(
            SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0)
        )
        warmup.warmup_kernels(*warmup_args)
        assert warmup.run_mixed_prefill_decode_warmup(*warmup_args, 8)
        assert sum(not call.kwargs.get("dummy_run") for call in propose.call_args_list) > 5
        num_warmed = engine.store.statistics.tokens_held
        prompts = [make_requests(model)[i][0] for i in indices]
        engine.serve([(prompt, make_params(2000)) for prompt in prompts], result)
        num_stored = engine.store.statistics.tokens_held - num_warmed
        del propose, warmup_args
    assert result.num_accepted > 0
    for i, prompt, output in zip(indices, prompts, result.outputs, strict=True):
        assert output.finish_reason == "length"
        assert len(prompt) + len(output.token_ids) == max_model_len
        expected = runs("none").outputs[i].token_ids
        assert output.token_ids[: len(expected)] == expected
    num_generated = sum(len(output.token_ids) for output in result.outputs)
    assert num_generated / 2 < num_stored <= num_generated
