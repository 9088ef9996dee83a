"""What costs fitted on logs bring over the shipped ones, and what they take; longer drafts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from ngram_npu import _C, Costs, NgramConfig, NgramIndex, NgramProposer
from ngram_npu_cli.learn.fit_draft_costs import fit
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER
from ngram_npu_cli.replay import TokenRequest, TokenTurn, load_tokenizer, stdlib_conversations
from ngram_npu_cli.replay.walks import Counts, at_equal_drafts, walks

from tools.bench.data import default_data, make_workload
from tools.bench.ops.acceptance import VERIFYING, Acceptance, proposed
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import BenchError, Options, Size
from tools.drafts import PARTS, load

K = 8
LIMIT = 40
LIMITS = tuple(range(10, 90, 2))
STORE_LIMITS = tuple(range(28, 60, 4))
SIZE = "128x8k"
ROUNDS, CALLS = 200, 20
LONGER = (8, 16, 32)
EDITED = "edited files"


def drafting(
    requests: Sequence[TokenRequest], limit: int, costs: Costs | None, k: int, store: str | None
) -> Counts:
    config = NgramConfig(
        sizes="ladder", k=k, min_draft_probability=2 ** (-limit / 16), costs=costs, store=store
    )
    return proposed(requests, NgramProposer(config, "index"), k, 1 if store else 64)


class CostsFromLogs(Op):
    name = "costs-from-logs"
    help = "costs fitted on even conversations against the shipped ones, on odd ones; k up to 32"
    sizes = ()
    unused_settings = Acceptance.unused_settings
    assumptions: Mapping[str, Any] = {
        "ratio": "tokens per step of the fitted costs over the shipped ones, where both draft as "
        f"many tokens per step as the shipped ones at limit {LIMIT}, k = {K}, in a straight line "
        "between two limits; without a store, and with a live one that is empty at first",
        "time": f"ngram_index_propose_ on rows of {SIZE} that do not grow, k = {K}; the logits are "
        "those of the shipped costs, so the drafts are the same; in turns, "
        f"{ROUNDS} rounds of {CALLS} calls, over the rows that draft",
        EDITED: "made, not recorded: the files of `replay --demo`, of which one line of thirty is "
        "changed, left out or doubled; the prompt is the old text, the completion the new one",
        "speedup": Acceptance.assumptions["speedup"],
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        sets = load([default_data(options.data)], DEFAULT_TOKENIZER).sets
        results: list[Result] = []
        for name, requests in sets.items():
            found = _compared(requests[PARTS["even"]], requests[PARTS["odd"]])
            results.append({"set": name, **found})
            yield results[-1]
        ratios = {
            key: [of[key]["ratio"] for of in results] for key in ("without_store", "with_store")
        }
        summary = {
            key: {
                "geometric_mean": round(geometric_mean(of), 4),
                "least": min(of),
                "sets_ahead": sum(ratio > 1 for ratio in of),
            }
            for key, of in ratios.items()
        }
        yield {"set": "all", "sets": len(sets), **summary}
        yield {"set": "time", **_times(options)}
        for name, requests in (("humaneval-gpt4", sets.get("humaneval-gpt4")), (EDITED, _edited())):
            if requests:
                yield {"set": f"longer, {name}", **_longer(requests)}


def _compared(even: Sequence[TokenRequest], odd: Sequence[TokenRequest]) -> Result:
    began = time.perf_counter()
    fitted = fit(even)
    seconds = time.perf_counter() - began
    found = walks(odd)
    curve = [found.replay(found.lengths(fitted.of_row, limit, K)) for limit in LIMITS]
    stored = [drafting(odd, limit, fitted, K, "live") for limit in STORE_LIMITS]
    return {
        "fit_seconds": round(seconds, 1),
        "without_store": _ratio(drafting(odd, LIMIT, None, K, None), curve),
        "with_store": _ratio(drafting(odd, LIMIT, None, K, "live"), stored),
        "drafts_as_simulated": drafting(odd, LIMIT, fitted, K, None) == curve[LIMITS.index(LIMIT)],
    }


def _ratio(shipped: Counts, curve: Sequence[Counts]) -> Result:
    tokens, _ = at_equal_drafts(curve, shipped.drafted_per_step)
    return {
        "tokens_per_step": round(tokens, 4),
        "shipped": round(shipped.tokens_per_step, 4),
        "drafted_per_step": round(shipped.drafted_per_step, 4),
        "ratio": round(tokens / shipped.tokens_per_step, 4),
    }


def _times(options: Options) -> Result:
    """Of the shipped costs as costs and as logits with token logits that say nothing."""
    workload = make_workload(Size.parse(SIZE), options)
    lengths = workload.lengths[0]
    capacity = int(lengths.sum()) + (1 << 16)
    sizes: Any = {"min_n": 1, "max_n": 16, "sizes": "ladder", "outcomes": True}
    index = NgramIndex(len(lengths), capacity, **sizes)
    index.append(workload.token_ids, lengths - 1)
    costs = fit([])
    shipped = NgramConfig(sizes="ladder", min_draft_probability=0.177).cost_table
    tables = {
        "shipped": {"costs": shipped},
        "fitted": {"costs": costs.row, "token_logits": costs.tokens},
    }
    same = {"min_n": 1, "max_n": 16, "match_policy": 1, "overlap": True, "ladder": True}

    def call(which: str) -> Any:
        rows = workload.token_ids, lengths, index.tensor
        return _C.ngram_index_propose_(*rows, k=K, cost_limit=LIMIT, **same, **tables[which])

    drafts = {which: call(which) for which in tables}
    if not all(np.array_equal(a, b) for a, b in zip(*drafts.values(), strict=True)):
        raise BenchError("the same costs, other drafts")
    spent: dict[str, list[float]] = {which: [] for which in tables}
    for number in range(ROUNDS):
        for which in sorted(tables, reverse=number % 2 == 1):
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                call(which)
            spent[which].append((time.perf_counter_ns() - began) / CALLS)
    rows = int((drafts["shipped"][1] > 0).sum()) or 110
    differences = [b - a for a, b in zip(spent["shipped"], spent["fitted"], strict=True)]
    return {
        "drafts": rows,
        "drafted_tokens": int(drafts["shipped"][1].sum()),
        "ns_per_draft": {which: round(median(of) / rows, 1) for which, of in spent.items()},
        "difference_ns_per_draft": round(median(differences) / rows, 2),
    }


def _longer(requests: Sequence[TokenRequest]) -> Result:
    counts = {k: drafting(requests, LIMIT, None, k, None) for k in LONGER}
    return {
        f"k{k}": {
            "tokens_per_step": round(of.tokens_per_step, 3),
            "drafted_per_step": round(of.drafted_per_step, 3),
            "speedup": round(of.speedup(VERIFYING), 3),
        }
        for k, of in counts.items()
    }


def _edited() -> list[TokenRequest]:
    encode = load_tokenizer(DEFAULT_TOKENIZER).encode
    rng = random.Random(0)
    made = []
    for conversation in stdlib_conversations()[0]:
        old = conversation.turns[0].completion.splitlines(keepends=True)
        new = [line for of in old for line in _edited_line(of, rng)]
        texts = (np.array(encode("".join(lines)), np.int32) for lines in (old, new))
        made.append(TokenRequest(conversation.id, (TokenTurn(*texts),)))
    return made


def _edited_line(line: str, rng: random.Random) -> list[str]:
    """Of thirty lines one."""
    words = line.split(" ")
    if rng.randrange(30) or not line.strip():
        return [line]
    rng.shuffle(words)
    return rng.choice([[" ".join(words)], [], [line, line]])
