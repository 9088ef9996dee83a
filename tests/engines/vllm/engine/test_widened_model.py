"""The model of `python -m tools.bench vllm-end-to-end` generates the tests' model's text."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tools.bench.ops.vllm_end_to_end import INTERMEDIATE_SIZE, widened


def test_widened_model_says_the_same(model: Path) -> None:
    tokens = torch.arange(3, 300)[None]
    wide = AutoModelForCausalLM.from_pretrained(widened(model))
    assert wide.config.intermediate_size == INTERMEDIATE_SIZE
    assert round(sum(p.numel() for p in wide.parameters()) / 1e6, 1) == 6.5
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model)(tokens).logits
        torch.testing.assert_close(wide(tokens).logits, expected, atol=1e-4, rtol=1e-4)
