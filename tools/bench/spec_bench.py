"""Replays Spec-Bench's reference answers, twice, for comparison with published figures.

    python -m tools.bench.spec_bench QUESTIONS [--tokenizer T] [--json FILE]

QUESTIONS is data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench, which the
project does not contain. The protocol is that of SuffixGPU's RESULTS.md (section 2): the questions
of a category with a reference answer of at least 16 tokens form one batch, drafts have at most 16
tokens, and only drafted tokens are verified. In the second wave, the same questions are sent again,
so a drafter that shares text has seen each answer. The published figures use the tokenizer of
Llama 3.1; the default here is that of mistral-common with 32,000 tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu_cli.replay import Drafter, Setting, SettingDrafter, simulate
from ngram_npu_cli.tokenization import TokenRequest, load_tokenizer

from tools.bench.measure import make_parser, write_result
from tools.bench.suffix_decoding import VERSION, SuffixDecoding, load_tree_class

CATEGORIES = ("translation", "summarization", "math_reasoning")
K, MAX_PROMPT_TOKENS, MIN_ANSWER_TOKENS = 16, 3072, 16
SETTINGS = {
    "ngram_npu": Setting(k=K, drafts="trimmed"),
    "ngram_npu, store": Setting(k=K, drafts="trimmed", store=True),
    "ngram_npu, store, padded": Setting(k=K, store=True),
}


def read_questions(path: Path, tokenizer: str) -> dict[str, list[TokenRequest]]:
    """Returns the first question of each record and its reference answer, by category."""
    encode = load_tokenizer(tokenizer).encode
    questions: dict[str, list[TokenRequest]] = {category: [] for category in CATEGORIES}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["category"] not in questions or not record.get("reference"):
            continue
        texts = record["turns"][0], record["reference"][0]
        prompt, answer = (np.array(encode(text), np.int32) for text in texts)
        if len(answer) >= MIN_ANSWER_TOKENS:
            request = TokenRequest(((prompt[-MAX_PROMPT_TOKENS:], answer),))
            questions[record["category"]].append(request)
    return questions


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("spec_bench", __doc__)
    parser.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--tokenizer", default="mistral-v1", help="as of ngram-npu replay")
    options = parser.parse_args(arguments)
    tree_class = load_tree_class()
    results: list[dict[str, Any]] = []
    for category, requests in read_questions(options.questions, options.tokenizer).items():
        drafters: dict[str, Drafter] = {
            "suffix decoding": SuffixDecoding(
                tree_class, is_shared=True, k=K, depth=24, max_spec_factor=2.0
            ),
            **{name: SettingDrafter(setting) for name, setting in SETTINGS.items()},
        }
        for name, drafter in drafters.items():
            for wave in ("cold", "warm"):
                figures = simulate(
                    requests, drafter, k=K, batch_size=len(requests), padded="padded" in name
                ).to_dict()
                names = "requests", "tokens_per_step", "drafted_per_step"
                values = {name: round(figures[name], 3) for name in names}
                results.append({"category": category, "wave": wave, "drafter": name, **values})
                print(f"{category:16} {wave:5} {name:25}", values)
    write_result(
        options.json,
        ["question.jsonl"],
        peer=f"arctic-inference {VERSION}, depth 24, max_spec_factor 2",
        k=K,
        tokenizer=options.tokenizer,
        results=results,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
