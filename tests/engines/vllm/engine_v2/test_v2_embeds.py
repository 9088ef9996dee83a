"""Prompts given as embeddings (vLLM's ``enable_prompt_embeds``)."""

from __future__ import annotations

from pathlib import Path

import v2_runs
from ngram_npu.engines.vllm import plugin
from transformers import AutoModelForCausalLM
from vllm import SamplingParams


def say(model: Path, method: str) -> tuple[list[list[int]], int]:
    """What is said to prompts, half of them embedded, and how many draft tokens were accepted."""
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    made = v2_runs.METHODS[method]
    if made.ours is not None:
        plugin.install_v2()
    given = {**made.arguments, "enable_prompt_embeds": True}
    with v2_runs.engine(model, given, v2_runs.Run()) as (llm, runner):
        prompts = [prompt for prompt, _ in v2_runs.requests(llm.get_tokenizer())[:4]]
        asked = [
            {"prompt_embeds": table[prompt]} if number % 2 else {"prompt_token_ids": prompt}
            for number, prompt in enumerate(prompts)
        ]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(asked, params, use_tqdm=False)
        values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
        del llm, runner
    said = [list(output.outputs[0].token_ids) for output in outputs]
    return said, int(values.get("vllm:spec_decode_num_accepted_tokens", 0))


def test_prompt_embeds_say_the_same(model: Path) -> None:
    expected, _ = say(model, "none")
    for method in ("async-scan", "store"):
        said, accepted = say(model, method)
        assert said == expected
        assert accepted > 40
