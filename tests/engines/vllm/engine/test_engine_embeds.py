"""Prompts given as embeddings (vLLM's ``enable_prompt_embeds``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_runs import METHODS, engine
from tiny_model import corpus
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams


def say(model: Path, method: str) -> tuple[list[list[int]], int]:
    """What is said to prompts, half of them embedded, and how many draft tokens were accepted."""
    ids = AutoTokenizer.from_pretrained(model).encode(corpus()[1_000_000:1_005_000])
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    prompts = [ids[start : start + 60] for start in range(0, 600, 150)]
    asked = [
        {"prompt_embeds": table[prompt]} if number % 2 else {"prompt_token_ids": prompt}
        for number, prompt in enumerate(prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with engine(model, METHODS[method], enable_prompt_embeds=True) as running:
        outputs = running.llm.generate(asked, params, use_tqdm=False)
        accepted = running._counters()["accepted"]
        del running
    return [list(output.outputs[0].token_ids) for output in outputs], accepted


@pytest.mark.parametrize("method", ["padded", "trimmed"])
def test_prompt_embeds_with_ngram_gpu_raises(model: Path, method: str) -> None:
    with (
        pytest.raises(
            ValueError, match="ngram_npu: enable_prompt_embeds: expected false, got true"
        ),
        engine(model, METHODS[method], enable_prompt_embeds=True),
    ):
        pass


def test_prompt_embeds_with_host_drafts_say_the_same(model: Path) -> None:
    expected, _ = say(model, "none")
    for method in ("plugin", "custom_class"):
        said, accepted = say(model, method)
        assert said == expected
        assert accepted > 50
