"""Suffix decoding as a peer: Arctic Inference's own C++, called directly, never copied.

    python -m tools.bench.arctic_peer

downloads its source distribution from PyPI and compiles only the suffix tree into
build/arctic-peer, which git ignores: the code is Snowflake's and stays out of the repository. Needs
cmake, ninja and a C++ compiler.
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

from tools.bench.data import Int32Array, Workload
from tools.bench.measure import Contestant
from tools.bench.options import Options, UnavailableError

VERSION = "0.3.0"
NANOBIND = "2.9.2"  # required by that version
FOLDER = Path(__file__).resolve().parents[2] / "build" / "arctic-peer"
DEPTH = 64
"""Depth of a tree, and the longest context it looks up: Arctic's default."""
FACTOR, OFFSET, PROBABILITY = 1.0, 0.0, 0.1
_TREES = f"depth {DEPTH}, factor {FACTOR:g}, probability {PROBABILITY:g}"
DETAIL = f"arctic-inference {VERSION}, a tree for each conversation, {_TREES}"
GLOBAL_DETAIL = (
    f"arctic-inference {VERSION}, a tree for each conversation and one for all that follows the "
    f"first prompts, of which the draft with the higher score is taken; {_TREES}"
)


def build() -> None:
    """Downloads and builds everything below FOLDER."""
    pip = [sys.executable, "-m", "pip"]
    source = f"arctic-inference=={VERSION}"
    fetch = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", source]
    _run(*pip, *fetch, "--dest", str(FOLDER))
    _run(*pip, "install", "--target", str(FOLDER / "nanobind"), f"nanobind=={NANOBIND}")
    with tarfile.open(FOLDER / f"arctic_inference-{VERSION}.tar.gz") as archive:
        archive.extractall(FOLDER, filter="data")
    suffix_tree = FOLDER / f"arctic_inference-{VERSION}" / "csrc" / "suffix_decoding"
    out = str(FOLDER / "out")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    _run("cmake", "-S", str(suffix_tree), "-B", out, "-G", "Ninja", python)
    _run("cmake", "--build", out)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(FOLDER / "nanobind")})


@functools.cache
def suffix_tree() -> Any:
    """Arctic's class SuffixTree.

    Raises:
        UnavailableError: It is not built.
    """
    found = sorted((FOLDER / "out").glob("_C.*"))
    spec = importlib.util.spec_from_file_location("arctic._C", found[0]) if found else None
    if spec is None or spec.loader is None:
        raise UnavailableError("arctic-inference is not built: python -m tools.bench.arctic_peer")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SuffixTree


class SuffixDecoding:
    """A proposer for `ngram_npu_cli.replay.simulate`: one tree per row, which holds its
    conversation.
    If rows share what follows their first prompts, there is one more tree for all of them."""

    def __init__(self, k: int, *, shared: bool = False) -> None:
        self._k = k
        self._new_tree = suffix_tree()
        self._shared = self._new_tree(DEPTH) if shared else None
        self._conversations = 0
        self._trees: dict[int, Any] = {}
        self._held: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def reset(self, rows: Int32Array) -> None:
        for row in rows.tolist():
            self._trees[row] = self._new_tree(DEPTH)
            self._held[row] = 0
            self._numbers[row] = self._conversations
            self._conversations += 1

    def step(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        sampled_token_ids: Int32Array,
        row_indices: Int32Array | None = None,
        advance: bool = True,
    ) -> SimpleNamespace:
        rows = range(len(token_ids)) if row_indices is None else row_indices.tolist()
        drafts = np.full((len(sampled_token_ids), self._k), -1, np.int32)
        counts = np.zeros(len(sampled_token_ids), np.int32)
        for i, row in enumerate(rows):
            new = sampled_token_ids[i][sampled_token_ids[i] >= 0]
            start, end = int(num_tokens[row]), int(num_tokens[row]) + len(new)
            token_ids[row, start:end] = new
            num_tokens[row] = end
            held, trees = self._held[row], [self._trees[row]]
            trees[0].extend_ndarray(0, token_ids[row, held:end])
            self._held[row] = end
            if self._shared is not None:
                trees.append(self._shared)
                self._shared.extend_ndarray(self._numbers[row], token_ids[row, held or start : end])
            context = token_ids[row, max(0, end - DEPTH) : end]
            found = [
                tree.speculate_ndarray(context, self._k, FACTOR, OFFSET, PROBABILITY, False)
                for tree in trees
            ]
            draft = max(found, key=lambda of: of.score).token_ids
            drafts[i, : len(draft)] = draft
            counts[i] = len(draft)
        return SimpleNamespace(draft_token_ids=drafts, num_draft_tokens=counts)


class ArcticStep(Contestant):
    """A step of all rows, called directly: each row's tree takes the sampled tokens, then drafts.
    New trees for each lap and all arguments are made beforehand, untimed."""

    def __init__(self, workload: Workload, options: Options) -> None:
        self._workload = workload
        self._new_tree = suffix_tree()
        self._k = options.k
        self._trees: list[Any] = []
        self._at = -1
        self.detail = DETAIL
        self.function = self._draft

    def reset(self) -> None:
        if self._at == 0:
            return
        self._trees.clear()
        for row, length in zip(self._workload.token_ids, self._workload.lengths[0], strict=True):
            tree = self._new_tree(DEPTH)
            tree.extend_ndarray(0, row[:length])
            self._trees.append(tree)
        self._at = 0

    def arguments(self, step: int) -> tuple[Any, ...]:
        self._at = step + 1
        starts, ends = self._workload.lengths[step : step + 2].tolist()
        rows = zip(self._trees, self._workload.token_ids, starts, ends, strict=True)
        return (
            [
                (tree.extend_ndarray, row[start:end], tree.speculate_ndarray, row[:end][-DEPTH:])
                for tree, row, start, end in rows
            ],
        )

    def _draft(self, requests: list[tuple[Any, ...]]) -> list[Any]:
        drafts = []
        for extend, new, speculate, context in requests:
            extend(0, new)
            drafts.append(speculate(context, self._k, FACTOR, OFFSET, PROBABILITY, False))
        return drafts


if __name__ == "__main__":
    build()
