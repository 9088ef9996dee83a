"""Models of several families with random weights: the text equals transformers' own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from ngram_npu import NgramConfig

from examples.runner import Runner, RunnerConfig, paged

VOCAB = 40
NEW_TOKENS = 24
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Mistral": {"sliding_window": 9},
    "Gemma3": {"head_dim": 16, "sliding_window": 8},
}
REFUSED = {"Gemma2": "softcap", "GptOss": "s_aux"}


def _model(family: str, **more: Any) -> Any:
    torch.manual_seed(1)
    names = {"Gemma3": "Gemma3TextConfig"}
    config = getattr(transformers, names.get(family, f"{family}Config"))(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **more,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_text(family: str) -> None:
    model = _model(family, **FAMILIES[family])
    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    plain = [
        model.generate(torch.tensor([p]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(p) :]
        for p in prompts
    ]
    config = RunnerConfig(
        ngram=NgramConfig(min_n=1, k=3), max_rows=4, row_capacity=64, block_size=4
    )
    with paged(model):
        texts = Runner(model, config).generate(prompts, NEW_TOKENS)
    assert texts == [text.tolist() for text in plain]


@pytest.mark.parametrize("family", REFUSED)
def test_an_attention_that_is_more_is_refused(family: str) -> None:
    more = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "GptOss" else {}
    model = _model(family, head_dim=16, **more)
    with paged(model), pytest.raises(NotImplementedError, match=REFUSED[family]):
        Runner(model, RunnerConfig(row_capacity=64)).generate([[3]], 2)
