"""A tiny model with a gated delta net, of random weights: requests that draft in every step.

Its text is not compared: on vLLM 0.32.0's CPU platform such a layer exists only in bfloat16 and
computes differently if speculation is configured. Rounding then decides between two tokens, since
the model is not trained.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import custom_class, engine
from vllm import SamplingParams

ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": None,
    "num_gpu_blocks_override": None,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def hybrid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    made = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=1024,
            hidden_size=128,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.05,
        )
    ).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("hybrid")
    made.save_pretrained(folder)
    for file in model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize(("options", "always"), [({}, True), ({"keep_drafting": False}, False)])
def test_a_request_that_sampled_drafts(hybrid: Path, options: dict[str, Any], always: bool) -> None:
    """By default the newest token, where nothing is found; vLLM says that the layer is there."""
    chooser = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [([chooser.randrange(3, 1024) for _ in range(20)] * 2, params) for _ in range(6)]
    method = custom_class("ngram_npu.engines.vllm.NgramProposer", **options)
    with engine(hybrid, method, **ENGINE) as running:
        assert running.llm.llm_engine.vllm_config.model_config.is_hybrid
        run = running.run(requests)
    assert all(len(output.token_ids) == 20 for outputs in run.outputs for output in outputs)
    drafts = [draft for steps in run.drafts.values() for draft in steps.values()]
    empty = sum(not draft for draft in drafts)
    assert len(drafts) >= 60
    assert empty == 0 if always else empty >= 50
    assert all(text.endswith(" instead of []") for text in run.mismatches)
    assert len(run.mismatches) >= 50 if always else not run.mismatches
