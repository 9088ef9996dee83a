"""A ``max_model_len`` that vLLM lowers to its KV cache, after it has made the speculator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import v2_runs
from ngram_npu.engines.vllm import plugin, v2
from ngram_npu.engines.vllm.options import Options, read_options
from vllm import SamplingParams


def _run(model: Path, method: str) -> tuple[v2_runs.Run, int, Any]:
    """What five requests say that only the model's length ends, that length, and the store."""
    result = v2_runs.Run()
    arguments = {**v2_runs.METHODS[method].arguments, "max_model_len": -1}
    if arguments["additional_config"]:
        plugin.install_v2()
    with v2_runs.engine(model, arguments, result) as (llm, runner):
        longest: int = runner.req_states.max_model_len
        endless = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
        prompts = [prompt for prompt, _ in v2_runs.requests(llm.get_tokenizer())[:5]]
        v2_runs.serve(llm, [(prompt, endless) for prompt in prompts], result)
        shared = getattr(runner.speculator, "shared_store", None)
        store = shared and shared.contents.statistics
        del llm, runner, shared
    assert [reason for _, reason in result.outputs] == ["length"] * 5
    return result, longest, store


def test_drafts_and_the_store_end_where_the_text_does(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Options] = []

    def read(*given: Any) -> Options:
        made.append(read_options(*given))
        return made[-1]

    monkeypatch.setattr(v2, "read_options", read)
    expected, longest, _ = _run(model, "none")
    run, same, store = _run(model, "store")
    assert same <= longest < 2000 < made[-1].max_model_len
    assert run.accepted > 0
    for (text, _), (whole, _) in zip(run.outputs, expected.outputs, strict=True):
        assert text == whole[: len(text)]
    said = sum(len(text) for text, _ in run.outputs)
    assert said / 2 < store.tokens_entered <= said
