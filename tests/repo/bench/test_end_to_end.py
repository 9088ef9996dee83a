"""Tokens per second of vLLM's engine, with stand-ins for the engines: texts that differ are
counted."""

from __future__ import annotations

from typing import Any

from tools.bench.ops.vllm_end_to_end import VllmEndToEnd
from tools.bench.options import Size


class Engine:
    def __init__(self, seconds: float, first: int) -> None:
        self._seconds, self._first = seconds, first

    def run(self, prompts: list[list[int]]) -> dict[str, Any]:
        texts = [[self._first, prompt[-1]] for prompt in prompts]
        counts = dict.fromkeys(map("vllm:spec_decode_num_{}".format, COUNTED), 10)
        seconds = dict.fromkeys(("seconds", "cpu_seconds", "drafting_seconds"), self._seconds)
        return {**seconds, **counts, "token_ids": texts}


COUNTED = ("drafts", "draft_tokens", "accepted_tokens")


def test_another_text_of_an_engine_is_counted() -> None:
    engines: Any = {
        "ours": Engine(1, 7),
        "no-speculation": Engine(4, 7),
        "vllm-ngram": Engine(2, 8),
    }
    found = VllmEndToEnd()._compared(engines, Size(3, 1024), list(range(5000)), 2)
    assert list(found["requests_with_other_text"].values()) == [0, 0, 3]
    ratios = {name: of["median"] for name, of in found["ratio"].items()}
    assert ratios == {"ours over no-speculation": 4, "ours over vllm-ngram": 2}
