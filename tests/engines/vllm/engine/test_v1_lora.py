"""Tests LoRA adapters: each adapter has its own text and its own scope in a store. Runners that do
not know the keys of requests reject them, and need the option `scope` for a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    Engine,
    K,
    Method,
    contains_up_to,
    encode_corpus,
    make_params,
    start_engine,
)
from ngram_npu.engines.vllm.options import STORE_ARGUMENT
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.store import scope_of_request
from safetensors.torch import save_file
from v1_runs import METHODS
from vllm.lora.request import LoRARequest

RANK = 4  # of an adapter's matrices
LORA_OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Two adapters with random weights."""
    model_config = json.loads((model / "config.json").read_text())
    hidden_size = model_config["hidden_size"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    adapters = []
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("adapter")
        torch.manual_seed(number)
        weights = {}
        for layer in range(model_config["num_hidden_layers"]):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden_size) / 4
            weights[f"{name}.lora_B.weight"] = torch.randn(hidden_size, RANK) / 4
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        adapters.append(LoRARequest(f"adapter {number}", number, str(folder)))
    return adapters


def _generate(
    engine: Engine, prompts: list[list[int]], adapters: list[LoRARequest]
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the outputs for the prompts with the first and with the second adapter."""
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for _ in adapters for prompt in prompts],
        make_params(),
        lora_request=[adapter for adapter in adapters for _ in prompts],
    )
    return outputs[: len(prompts)], outputs[len(prompts) :]


def test_stored_text_of_adapters_is_separate(model: Path, adapters: list[LoRARequest]) -> None:
    ids = encode_corpus(model, 10_000)
    prompts = [ids[start : start + 60] for start in range(0, 600, 150)]
    with start_engine(model, Method(), **LORA_OPTIONS) as engine:
        expected = _generate(engine, prompts, adapters)
    assert expected[0] != expected[1], "expected different texts of the adapters"
    method = METHODS["store_padded"].with_options(scope="private")
    with start_engine(model, method, **LORA_OPTIONS) as engine:
        assert _generate(engine, prompts, adapters) == expected
        store = engine.store
    scopes = [scope_of_request(None, adapter.lora_name) for adapter in adapters]
    assert set(store.scopes) == set(scopes)
    outputs = dict(zip(scopes, expected, strict=True))
    for scope, stored in store.texts():
        # A row that moves begins a new text. The last step may verify tokens after the stop.
        assert any(contains_up_to(output, stored.tolist(), K) for output in outputs[scope])


def test_request_with_a_key_in_a_runner_that_knows_no_keys_raises(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(caplog.handler)
    prompt = {"prompt_token_ids": encode_corpus(model, 2_000)[:60]}
    adapter = LoRARequest("adapter", 1, "/none")
    with start_engine(model, METHODS["store"], enable_lora=True, max_lora_rank=8) as engine:
        engine.generate([prompt], make_params())
        for name, salt, extra_args, options in (
            ("cache_salt", {"cache_salt": "a"}, {}, {}),
            ("LoRA adapter", {}, {}, {"lora_request": adapter}),
            (STORE_ARGUMENT, {}, {STORE_ARGUMENT: False}, {}),
        ):
            message = f"ngram_npu: {name}: expected none, got one: this"
            with pytest.raises(ValueError, match=message):
                engine.generate([{**prompt, **salt}], make_params(40, extra_args), **options)
        engine.generate([prompt], make_params())
    logger.removeHandler(caplog.handler)
    assert "one tenant; a cache_salt or a LoRA adapter is rejected" in caplog.text
