"""Replays the recorded sets with suffix decoding, the reference of tools.bench.gates.

    python -m tools.bench.suffix_decoding [--data FOLDER] [--json FILE]
    python -m tools.bench.suffix_decoding --spec-bench QUESTIONS [--tokenizer T] [--json FILE]

With ``--spec-bench``, replays Spec-Bench's reference answers with it and with ngram_npu, twice, for
comparison with published figures. QUESTIONS is data/spec_bench/question.jsonl of
https://github.com/hemingkx/Spec-Bench, which the project does not contain. The protocol is that of
SuffixGPU's RESULTS.md (section 2): the questions of a category with a reference answer of at least
16 tokens form one batch, drafts have at most 16 tokens, and only drafted tokens are verified. In
the second wave, the same questions are sent again, so a drafter that shares text has seen each
answer. The published figures use the tokenizer of Llama 3.1; the default here is that of
mistral-common with 32,000 tokens.

Downloads arctic-inference's source from PyPI and compiles only its suffix tree, in
build/suffix-decoding, which git ignores. Needs cmake, ninja and a C++ compiler.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ngram_npu_cli.replay import Drafter, Setting, SettingDrafter, simulate
from ngram_npu_cli.tokenization import TokenRequest, load_tokenizer

from tools.bench.measure import ROOT, make_parser, write_result
from tools.bench.recorded import Counts, find_data, load_sets, replay

VERSION, NANOBIND = "0.3.0", "2.9.2"
FOLDER = ROOT / "build" / "suffix-decoding"
K = 8
CATEGORIES = ("translation", "summarization", "math_reasoning")
SPEC_BENCH_K, MAX_PROMPT_TOKENS, MIN_ANSWER_TOKENS = 16, 3072, 16
SPEC_BENCH_SETTINGS = {
    "ngram_npu": Setting(k=SPEC_BENCH_K, drafts="trimmed"),
    "ngram_npu, store": Setting(k=SPEC_BENCH_K, drafts="trimmed", store=True),
    "ngram_npu, store, padded": Setting(k=SPEC_BENCH_K, store=True),
}


def build_package() -> Path:
    """Returns the folder with the package arctic_inference, after downloading it and compiling its
    suffix tree if needed."""
    package = FOLDER / f"arctic_inference-{VERSION}"
    target = package / "arctic_inference" / "suffix_decoding"
    if not list(target.glob("_C.*")):
        pip = [sys.executable, "-m", "pip"]
        source = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        _run(*pip, *source, f"arctic-inference=={VERSION}", "--dest", str(FOLDER))
        _run(*pip, "install", "--target", str(FOLDER / "nanobind"), f"nanobind=={NANOBIND}")
        with tarfile.open(FOLDER / f"{package.name}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
        tree, build = package / "csrc" / "suffix_decoding", FOLDER / "out"
        python = f"-DPython_EXECUTABLE={sys.executable}"
        _run("cmake", "-S", str(tree), "-B", str(build), "-G", "Ninja", python)
        _run("cmake", "--build", str(build))
        shutil.copy(next(build.glob("_C.*")), target)
    return package


def load_tree_class() -> Any:
    """Returns Arctic's class SuffixTree."""
    sys.path.append(str(build_package()))
    return importlib.import_module("arctic_inference.suffix_decoding._C").SuffixTree


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(FOLDER / "nanobind")})


class SuffixDecoding:
    """A drafter with a tree per conversation. If it is shared, another tree has the text of all
    conversations without the first prompt of each; the draft with the higher score is used.

    Args:
        depth: Depth of a tree, which is also the longest context that can match. The default is
            Arctic's, as are those of the limits.
        max_spec_factor: Draft tokens per matched token.
    """

    def __init__(
        self,
        tree_class: Any,
        is_shared: bool,
        *,
        k: int = K,
        depth: int = 64,
        max_spec_factor: float = 1.0,
    ) -> None:
        self._tree_class, self._k, self._depth = tree_class, k, depth
        # The others are max_spec_offset, min_token_prob, and no tree drafts.
        self._limits = max_spec_factor, 0.0, 0.1, False
        self._shared_tree = tree_class(depth) if is_shared else None
        self._num_conversations = 0
        self._states: dict[int, Any] = {}

    def reset(self, rows: Any) -> None:
        for row in rows.tolist():
            tree = self._tree_class(self._depth)
            self._states[row] = SimpleNamespace(tree=tree, length=0, id=self._num_conversations)
            self._num_conversations += 1

    def step(
        self, token_ids: Any, num_tokens: Any, sampled: Any, *, row_indices: Any, advance: bool
    ) -> Any:
        """Appends the sampled tokens to the rows and drafts; the replay always advances."""
        rows = range(len(token_ids)) if row_indices is None else row_indices.tolist()
        drafts, counts = np.full((len(rows), self._k), -1, np.int32), np.zeros(len(rows), np.int32)
        for i, row in enumerate(rows):
            new, state, start = sampled[i][sampled[i] >= 0], self._states[row], num_tokens[row]
            end = start + len(new)
            token_ids[row, start:end] = new
            num_tokens[row] = end
            state.tree.extend_ndarray(0, token_ids[row, state.length : end])
            trees = [state.tree]
            if self._shared_tree is not None:
                # In a conversation's first step, the length is 0, and the prompt is left out.
                text = token_ids[row, state.length or start : end]
                self._shared_tree.extend_ndarray(state.id, text)
                trees.append(self._shared_tree)
            state.length = end
            context = token_ids[row, max(0, end - self._depth) : end]
            found = [tree.speculate_ndarray(context, self._k, *self._limits) for tree in trees]
            best = max(found, key=lambda draft: draft.score).token_ids
            drafts[i, : len(best)], counts[i] = best, len(best)
        return SimpleNamespace(draft_token_ids=drafts, num_draft_tokens=counts)


def read_questions(path: Path, tokenizer: str) -> dict[str, list[TokenRequest]]:
    """Returns the first question of each record of Spec-Bench and its answer, by category."""
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


def replay_spec_bench(
    tree_class: Any, questions: dict[str, list[TokenRequest]]
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for category, requests in questions.items():
        limits = {"k": SPEC_BENCH_K, "depth": 24, "max_spec_factor": 2.0}
        drafters: dict[str, Drafter] = {
            "suffix decoding": SuffixDecoding(tree_class, is_shared=True, **limits),
            **{name: SettingDrafter(setting) for name, setting in SPEC_BENCH_SETTINGS.items()},
        }
        for name, drafter in drafters.items():
            options = {"batch_size": len(requests), "padded": "padded" in name}
            for wave in ("cold", "warm"):
                figures = simulate(requests, drafter, k=SPEC_BENCH_K, **options).to_dict()
                names = "requests", "tokens_per_step", "drafted_per_step"
                values = {name: round(figures[name], 3) for name in names}
                results.append({"category": category, "wave": wave, "drafter": name, **values})
                print(f"{category:16} {wave:5} {name:25}", values)
    return results


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("suffix_decoding", __doc__)
    parser.add_argument("--spec-bench", type=Path, metavar="QUESTIONS", help="its question.jsonl")
    parser.add_argument("--tokenizer", default="mistral-v1", help="of Spec-Bench's texts")
    options = parser.parse_args(arguments)
    tree_class = load_tree_class()
    peer = f"arctic-inference {VERSION}"
    if options.spec_bench:
        questions = read_questions(options.spec_bench, options.tokenizer)
        spec_bench_results = replay_spec_bench(tree_class, questions)
        write_result(
            options.json,
            ["--spec-bench question.jsonl"],
            peer=f"{peer}, depth 24, max_spec_factor 2",
            k=SPEC_BENCH_K,
            tokenizer=options.tokenizer,
            results=spec_bench_results,
        )
        return
    sets = load_sets(find_data(options.data))
    results: dict[str, dict[str, Counts]] = {"single": {}, "shared": {}}
    for kind, counts in results.items():
        for name, requests in sets.items():
            drafter = SuffixDecoding(tree_class, is_shared=kind == "shared")
            counts[name] = replay(requests, drafter, K, padded=False)
            print(f"{kind:8} {name:28} {counts[name].tokens_per_step:.4f} tokens per step")
    values = {
        kind: {name: c._asdict() for name, c in counts.items()} for kind, counts in results.items()
    }
    write_result(options.json, arguments, peer=peer, k=K, **values)


if __name__ == "__main__":
    main(sys.argv[1:])
