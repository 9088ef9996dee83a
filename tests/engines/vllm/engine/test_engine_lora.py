"""Two LoRA adapters of random weights on one engine: each has its own text and its own scope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import METHODS, K, Method, engine
from ngram_npu.engines.vllm.sharing import scope_of_request
from safetensors.torch import save_file
from tiny_model import corpus
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

RANK = 4
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    described = json.loads((model / "config.json").read_text())
    wide = described["hidden_size"]
    made = []
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("adapter")
        torch.manual_seed(number)
        weights = {}
        for layer in range(described["num_hidden_layers"]):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, wide) / 4
            weights[f"{name}.lora_B.weight"] = torch.randn(wide, RANK) / 4
        save_file(weights, folder / "adapter_model.safetensors")
        given = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(given))
        made.append(LoRARequest(f"adapter {number}", number, str(folder)))
    return made


def _texts(running: Any, prompts: list[list[int]], adapters: list[LoRARequest]) -> Any:
    """What is said by each adapter, [2][prompts]."""
    outputs = running.llm.generate(
        [{"prompt_token_ids": prompt} for _ in adapters for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        lora_request=[adapter for adapter in adapters for _ in prompts],
        use_tqdm=False,
    )
    said = [output.outputs[0].token_ids for output in outputs]
    return said[: len(prompts)], said[len(prompts) :]


def test_adapters_share_no_text(model: Path, adapters: list[LoRARequest]) -> None:
    ids = AutoTokenizer.from_pretrained(model).encode(corpus()[1_000_000:1_010_000])
    prompts = [ids[start : start + 60] for start in range(0, 600, 150)]
    with engine(model, Method(), **LORA) as running:
        expected = _texts(running, prompts, adapters)
    assert expected[0] != expected[1], "the adapters matter"
    with engine(model, METHODS["store_padded"], **LORA) as running:
        assert _texts(running, prompts, adapters) == expected
        held = running.drafter.shared_store.contents
        del running
    scopes = [scope_of_request(adapter, None, None) for adapter in adapters]
    assert set(held.scopes) == set(scopes)
    for scope, said in zip(scopes, expected, strict=True):
        kept = [list(text)[: -(2 * K + 1)] for whose, text in held._texts() if whose == scope]
        assert len(kept) == len(prompts)
        assert all(any(list(text)[: len(part)] == part for text in said) for part in kept)
