"""Tests requests with the key ``ngram_npu_k`` next to requests without this key. No text changes,
and the key limits the number of draft tokens of its request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import LADDER, RUNNER, Engine, K, Method, encode_corpus, make_params, start_engine
from ngram_npu.engines.vllm import request_limits, request_scopes
from ngram_npu.engines.vllm.options import K_ARGUMENT

ADAPTIVE = {"enable_adaptive_verification": True}
METHODS = {
    "v1": {
        "custom_class": Method("custom_class", {}),
        "plugin": Method("ngram", {}),
        "padded": Method("ngram_gpu", {"drafts": "padded"}, True),
        "trimmed": Method("ngram_gpu", {"drafts": "trimmed"}, True),
    },
    "v2": {
        "adaptive": Method("ngram_gpu", LADDER, True, ADAPTIVE),
        "adaptive-sync": Method("ngram", LADDER, speculative=ADAPTIVE),
    },
}[RUNNER]
REJECTED_LIMITS = {
    "v1": [(Method(), 1), (Method("ngram", {}), K + 1)],
    "v2": [(Method(), 1), (Method("ngram_gpu", {}, True), 0)],
}[RUNNER]
LIMITS = [None, 0, 2, "0", None, 0, 1, K]
# A request that begins with a prefix hit can begin with a step that vLLM pads to 1 + K tokens.
NO_PREFIX_HITS = {"enable_prefix_caching": False, "num_gpu_blocks_override": 100}


@pytest.fixture(autouse=True, scope="module")
def _install_hooks() -> None:
    request_scopes.install()
    request_limits.install()


def _generate(engine: Engine, model: Path, limits: list[Any]) -> list[list[int]]:
    ids = encode_corpus(model, 5_000)
    prompts = [{"prompt_token_ids": ids[start : start + 40]} for start in range(0, 800, 100)]
    extra_args = [None if limit is None else {K_ARGUMENT: limit} for limit in limits]
    return engine.generate(prompts, [make_params(60, arguments) for arguments in extra_args])


def _record_drafts(engine: Engine) -> dict[str, int]:
    """Returns a mapping that receives the largest number of scheduled draft tokens by request."""
    core: Any = engine.llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    stock_schedule, max_drafts = scheduler.schedule, dict[str, int]()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock_schedule(*args, **kwargs)
        for name in output.num_scheduled_tokens:
            num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            max_drafts[name] = max(max_drafts.get(name, 0), num_drafts)
        return output

    scheduler.schedule = schedule
    return max_drafts


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Texts without speculation."""
    with start_engine(model, Method(), **NO_PREFIX_HITS) as engine:
        return _generate(engine, model, [None] * len(LIMITS))


@pytest.mark.parametrize("name", METHODS)
def test_limits_reduce_drafts_without_change_of_text(
    model: Path, expected: list[list[int]], name: str
) -> None:
    with start_engine(model, METHODS[name], **NO_PREFIX_HITS) as engine:
        max_drafts = _record_drafts(engine)
        assert _generate(engine, model, LIMITS) == expected
        by_request = sorted(max_drafts.items(), key=lambda item: int(item[0].split("-")[0]))
        assert [num_drafts for _, num_drafts in by_request] == [K, 0, 2, 0, K, 0, 1, K]
        assert engine.read_counters()[1] > 20


@pytest.mark.parametrize(("method", "limit"), REJECTED_LIMITS)
def test_limit_without_effect_on_work_is_rejected_and_engine_continues(
    model: Path, method: Method, limit: int
) -> None:
    with start_engine(model, method, **NO_PREFIX_HITS) as engine:
        with pytest.raises(ValueError, match=r"ngram_npu_k in extra_args .*: expected .*, got "):
            _generate(engine, model, [limit] * len(LIMITS))
        assert all(_generate(engine, model, [None] * len(LIMITS)))
