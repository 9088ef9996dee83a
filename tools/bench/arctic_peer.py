"""Defines suffix decoding for comparison in benchmarks: calls Arctic Inference's C++ code directly.

    python -m tools.bench.arctic_peer

downloads Arctic Inference's source distribution from PyPI and compiles only the suffix tree, in
build/arctic-peer. Do not commit this folder, which git ignores: the code is Snowflake's. The
command needs cmake, ninja and a C++ compiler.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tools.bench.data import Int32Array
from tools.bench.options import UnavailableError

VERSION = "0.3.0"
NANOBIND = "2.9.2"  # required by arctic-inference of this version
FOLDER = Path(__file__).resolve().parents[2] / "build" / "arctic-peer"
DEPTH = 64
"""Depth of a tree, which is also the longest context that can match (Arctic's default)."""
FACTOR, OFFSET, PROBABILITY = 1.0, 0.0, 0.1
"""Arctic's defaults of max_spec_factor, max_spec_offset and min_token_prob."""
_TREE_DETAIL = f"depth {DEPTH}, factor {FACTOR:g}, probability {PROBABILITY:g}"
DETAIL = f"arctic-inference {VERSION}, one tree per conversation, {_TREE_DETAIL}"
GLOBAL_DETAIL = (
    f"arctic-inference {VERSION}, one tree per conversation and one for all text after the first "
    f"prompts; the draft with the higher score is used; {_TREE_DETAIL}"
)


def build_suffix_tree() -> None:
    """Downloads and builds the suffix tree in FOLDER."""
    pip = [sys.executable, "-m", "pip"]
    download = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    _run_command(*pip, *download, f"arctic-inference=={VERSION}", "--dest", str(FOLDER))
    _run_command(*pip, "install", "--target", str(FOLDER / "nanobind"), f"nanobind=={NANOBIND}")
    with tarfile.open(FOLDER / f"arctic_inference-{VERSION}.tar.gz") as archive:
        archive.extractall(FOLDER, filter="data")
    source = FOLDER / f"arctic_inference-{VERSION}" / "csrc" / "suffix_decoding"
    build_folder = str(FOLDER / "out")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    _run_command("cmake", "-S", str(source), "-B", build_folder, "-G", "Ninja", python)
    _run_command("cmake", "--build", build_folder)


def _run_command(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(FOLDER / "nanobind")})


@functools.cache
def load_suffix_tree() -> Any:
    """Returns Arctic's class SuffixTree.

    Raises:
        UnavailableError: The suffix tree is not built.
    """
    libraries = sorted((FOLDER / "out").glob("_C.*"))
    spec = importlib.util.spec_from_file_location("arctic._C", libraries[0]) if libraries else None
    if spec is None or spec.loader is None:
        raise UnavailableError(
            "arctic-inference is not built: run python -m tools.bench.arctic_peer"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SuffixTree


class SuffixDecoding:
    """A proposer for `simulate`. Each row has a tree for its conversation. With
    ``has_shared_tree``, another tree contains the text of all conversations without the first
    prompt of each."""

    def __init__(self, k: int, *, has_shared_tree: bool = False) -> None:
        self._k = k
        self._tree_class = load_suffix_tree()
        self._shared_tree = self._tree_class(DEPTH) if has_shared_tree else None
        self._num_conversations = 0
        self._trees: dict[int, Any] = {}
        self._lengths: dict[int, int] = {}
        self._conversation_ids: dict[int, int] = {}

    def reset(self, rows: Int32Array) -> None:
        for row in rows.tolist():
            self._trees[row] = self._tree_class(DEPTH)
            self._lengths[row] = 0
            self._conversation_ids[row] = self._num_conversations
            self._num_conversations += 1

    def step(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        sampled_token_ids: Int32Array,
        row_indices: Int32Array | None = None,
        advance: bool = True,
    ) -> SimpleNamespace:
        rows = range(len(token_ids)) if row_indices is None else row_indices.tolist()
        draft_token_ids = np.full((len(sampled_token_ids), self._k), -1, np.int32)
        counts = np.zeros(len(sampled_token_ids), np.int32)
        for i, row in enumerate(rows):
            new_tokens = sampled_token_ids[i][sampled_token_ids[i] >= 0]
            start, end = int(num_tokens[row]), int(num_tokens[row]) + len(new_tokens)
            token_ids[row, start:end] = new_tokens
            num_tokens[row] = end
            length, trees = self._lengths[row], [self._trees[row]]
            trees[0].extend_ndarray(0, token_ids[row, length:end])
            self._lengths[row] = end
            if self._shared_tree is not None:
                trees.append(self._shared_tree)
                # In a conversation's first step, `length` is 0, and the prompt is left out.
                text = token_ids[row, length or start : end]
                self._shared_tree.extend_ndarray(self._conversation_ids[row], text)
            context = token_ids[row, max(0, end - DEPTH) : end]
            limits = (self._k, FACTOR, OFFSET, PROBABILITY, False)
            drafts = [tree.speculate_ndarray(context, *limits) for tree in trees]
            best_draft = max(drafts, key=lambda draft: draft.score).token_ids
            draft_token_ids[i, : len(best_draft)] = best_draft
            counts[i] = len(best_draft)
        return SimpleNamespace(draft_token_ids=draft_token_ids, num_draft_tokens=counts)


if __name__ == "__main__":
    build_suffix_tree()
