"""Tests prompts that are embeddings, and requests of several tenants in an engine with a store: by
salt and, in V1, by LoRA adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    RUNNER,
    Engine,
    K,
    Method,
    StoreDraftCounter,
    contains_up_to,
    encode_corpus,
    make_params,
    start_engine,
)
from ngram_npu.engines.vllm.options import STORE_ARGUMENT
from ngram_npu.store import scope_of_request
from runs import METHODS
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest

RANK = 4  # of an adapter's matrices
LORA_OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_requests_draft_only_from_text_of_the_same_salt(model: Path) -> None:
    """Requests without a salt, and those that keep their text out of the store, share with none."""
    keep_out = {STORE_ARGUMENT: False}
    tenants: list[tuple[dict[str, str], dict[str, Any]]] = [
        *(({"cache_salt": "a"}, {}), ({"cache_salt": "b"}, {})),
        *(({}, {}), ({"cache_salt": "a"}, keep_out), ({}, keep_out)),
    ]
    prompt = encode_corpus(model, 2_000)[:60]
    draft_counts: list[int] = []
    with start_engine(model, METHODS["store"]) as engine:
        store, counter = engine.store, StoreDraftCounter(engine)
        for salt, extra_args in [*tenants, *tenants]:
            old_count = counter.count
            engine.generate([{"prompt_token_ids": prompt, **salt}], make_params(24, extra_args))
            draft_counts.append(counter.count - old_count)
    assert draft_counts[: len(tenants)] == [0] * len(tenants)
    assert [count > 0 for count in draft_counts[len(tenants) :]] == [True] * 2 + [False] * 3
    assert store.scopes.keys() == {scope_of_request("a"), scope_of_request("b")}


def test_text_of_prompt_embeddings_equals_text_of_tokens(model: Path) -> None:
    """V1's asynchronous runner accepts no prompt embeddings."""
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    ids = encode_corpus(model, 5_000)
    prompts = [ids[start : start + 60] for start in range(0, 600, 150)]
    tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
    mixed = [{"prompt_embeds": table[prompt]} for prompt in prompts[:2]] + tokens[2:]

    method = METHODS[{"v1": "sync", "v2": "store"}[RUNNER]]
    with start_engine(model, method, enable_prompt_embeds=True) as engine:
        expected, old_count = engine.generate(tokens, make_params(60)), engine.read_counters()[1]
        assert engine.generate(mixed, make_params(60)) == expected
        assert engine.read_counters()[1] > old_count + 40


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


@pytest.mark.skipif(RUNNER == "v2", reason="V1 tests it: the same code computes the scopes")
def test_stored_text_of_adapters_is_separate(model: Path, adapters: list[LoRARequest]) -> None:
    ids = encode_corpus(model, 10_000)
    prompts = [ids[start : start + 60] for start in range(0, 600, 150)]

    def generate(engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the outputs for the prompts with the first and with the second adapter."""
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for _ in adapters for prompt in prompts],
            make_params(),
            lora_request=[adapter for adapter in adapters for _ in prompts],
        )
        return outputs[: len(prompts)], outputs[len(prompts) :]

    with start_engine(model, Method(), **LORA_OPTIONS) as engine:
        expected = generate(engine)
    assert expected[0] != expected[1], "expected different texts of the adapters"
    with start_engine(model, METHODS["store"], **LORA_OPTIONS) as engine:
        assert generate(engine) == expected
        store = engine.store
    outputs = {
        scope_of_request(None, a.lora_name): t for a, t in zip(adapters, expected, strict=True)
    }
    assert store.scopes.keys() == outputs.keys()
    for scope, stored in store.texts():
        # A row that moves begins a new text. The last step may verify tokens after the stop.
        assert any(contains_up_to(output, stored.tolist(), K) for output in outputs[scope])
