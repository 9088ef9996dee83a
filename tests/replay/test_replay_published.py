"""The figures published for the recorded sets, where the sets are present."""

from __future__ import annotations

from pathlib import Path

import pytest
from ngram_npu.replay import ReplayFigures, ReplayOptions, load_tokenizer, replay

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "replay"

# Tokens per step for earliest 2-5, k=5; and the tokens and steps counted by an independent program
# (a dictionary of n-grams per conversation), which must match exactly.
PUBLISHED = {
    "specbench-chat": (1.54, 42059, 27327),
    "specbench-summarization": (2.13, 13474, 6325),
    "tau-bench-airline": (1.69, 79300, 46955),
    "zeroeval-math-l5": (2.34, 200810, 85993),
    "humaneval-gpt4": (2.57, 37946, 14750),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, ReplayFigures]:
    files = [DATA / f"{name}.jsonl.gz" for name in PUBLISHED]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        pytest.skip(f"the recorded sets are not here: {', '.join(absent)} in {DATA}")
    pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
    pytest.importorskip("sentencepiece", reason="needs the extra ngram-npu[replay]")
    report = replay(
        files, ReplayOptions(min_n=2, max_n=5, k=5), tokenizer=load_tokenizer("mistral-v1")
    )
    return {figures.name: figures for figures in report.inputs}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figure(measured: dict[str, ReplayFigures], name: str) -> None:
    tokens_per_step, tokens, steps = PUBLISHED[name]
    figures = measured[name]
    assert figures.tokens_per_step == pytest.approx(tokens_per_step, abs=0.02)
    assert (figures.num_tokens, figures.num_steps) == (tokens, steps)
