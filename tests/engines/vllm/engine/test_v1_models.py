"""Tests a tiny model with a gated delta net, for which every step must draft.

The model's text is not compared. On vLLM 0.32.0's CPU platform, such a layer exists only
in bfloat16 and computes differently if speculation is configured. Rounding then decides between
two tokens, because the model is not trained.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_params, start_engine
from runs import METHODS, Run, record_drafts

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": None,
    "num_gpu_blocks_override": None,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def hybrid_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    hybrid = Qwen3NextForCausalLM(
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
    hybrid.save_pretrained(folder)
    for file in model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def test_hybrid_model_has_drafts_in_every_step(hybrid_model: Path) -> None:
    """If the lookup finds nothing, the draft is the newest token. vLLM calls the model hybrid."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 1024) for _ in range(20)] * 2 for _ in range(6)]
    method, run = METHODS["sync"], Run()
    with start_engine(hybrid_model, method, **OPTIONS) as engine:
        assert engine.llm.llm_engine.vllm_config.model_config.is_hybrid
        record_drafts(engine, method, run)
        engine.serve([(prompt, make_params(20)) for prompt in prompts], run)
    assert all(len(output.token_ids) == 20 for output in run.outputs)
    assert run.num_drafts >= 60
    assert run.num_drafts == run.num_sampled, "expected a draft of every row that sampled a token"
    assert all(text.endswith(" instead of []") for text in run.mismatches)
    assert len(run.mismatches) >= 50
