"""Fits the package's cost table on recorded conversations (docs/design/store.md).

    python -m tools.fit_draft_costs [--data FOLDER] [--part odd] [--output FILE]

A cost is -16 * log2(p), rounded, where p is the probability that a draft token is accepted if the
tokens before it in the draft are. The drafts of 16 tokens at every position of every completion are
counted up to their first wrong token, because the positions at which steps begin would depend on
the table. Conversations run 32 at a time; each set begins with an empty store. The first table is
counted on drafts without a store, the second on drafts from the store. Every set has the same
weight, and a cost never rises with the length of the context.

The same conversations, tokenizer and part give the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu import NgramConfig, NgramProposer, NgramStore
from ngram_npu.draft_costs import (
    COST_UNITS_PER_BIT,
    FIRST_CONTEXT_LENGTHS,
    NUM_COLUMNS,
    OWN_DRAFT,
    SINGLE_OCCURRENCE,
)
from ngram_npu_cli.tokenization import TokenRequest

from tools.bench.recorded import find_data, load_sets

TABLE = Path(__file__).parents[1] / "python" / "ngram_npu" / "costs.json"
PARTS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
"""Parts of each set by name; the first conversation has number 0."""
K = 16
BATCH = 32
STORE_TOKENS = 1 << 22
"""Many more than a set has, so that hardly any n-grams share a column of the store's table."""
MAX_COST = 254
SHAPE = (len(FIRST_CONTEXT_LENGTHS), NUM_COLUMNS)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[Any]


class Counts:
    """Drafted and accepted tokens by context length and column of the table, [10, 4] each."""

    def __init__(self) -> None:
        self.num_drafted = np.zeros(SHAPE, np.int64)
        self.num_accepted = np.zeros(SHAPE, np.int64)

    def add_drafts(self, drafts: Any, agreement: IntArray, recorded: IntArray) -> None:
        """Counts the tokens of a batch's drafts up to the first wrong one.

        Args:
            drafts: Drafts of B requests.
            agreement: [B], as `store_propose_` writes it; for a request's own draft, it is
                `SINGLE_OCCURRENCE`.
            recorded: [B, K], the completions' next tokens; -2 after their end.
        """
        position = np.arange(K)
        length = np.minimum(drafts.num_draft_tokens, (recorded >= 0).sum(axis=1))
        is_equal = (drafts.draft_token_ids == recorded) & (position < length[:, None])
        num_accepted = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        context = np.minimum(drafts.match_len[:, None] + position, FIRST_CONTEXT_LENGTHS[-1])
        row = np.searchsorted(FIRST_CONTEXT_LENGTHS, context, side="right") - 1
        column = 2 + np.sign(position - agreement[:, None])
        column[agreement == SINGLE_OCCURRENCE] = 0
        for counts, end in (
            (self.num_drafted, np.minimum(num_accepted + 1, length)),
            (self.num_accepted, num_accepted),
        ):
            is_counted = position < end[:, None]
            np.add.at(counts, (row[is_counted], column[is_counted]), 1)


def run_requests(
    waiting: Iterator[TokenRequest], row: IntArray
) -> Iterator[tuple[TokenRequest, int, int]]:
    """Runs waiting requests one after the other in a row, one token per step. Yields the request,
    the row's length and the completion's end at each position at which a step may begin."""
    for request in waiting:
        tokens = request.tokens()
        row[: len(tokens)] = tokens
        for start, end in request.spans():
            # Prefill generates the first token.
            for length in range(start + 1, end):
                yield request, length, end


def count_drafts(requests: Sequence[TokenRequest]) -> tuple[Counts, Counts]:
    """Returns the counts of drafts from the requests' own rows, and of drafts from the store."""
    config = NgramConfig(k=K)
    store = NgramStore(STORE_TOKENS, num_slots=BATCH, max_batch=BATCH)
    own_proposer, shared_proposer = NgramProposer(config), NgramProposer(config, store=store)
    own_counts, store_counts = Counts(), Counts()
    capacity = max(len(request.tokens()) for request in requests)
    token_ids = np.zeros((BATCH, capacity), np.int32)
    num_tokens, ends = np.zeros((2, BATCH), np.int32)
    running: list[TokenRequest | None] = [None] * BATCH
    waiting = iter(requests)
    walks = [run_requests(waiting, row) for row in token_ids]
    while True:
        steps = [(row, step) for row, walk in enumerate(walks) if (step := next(walk, None))]
        if not steps:
            return own_counts, store_counts
        for row, (request, num_tokens[row], ends[row]) in steps:
            if running[row] is not request:
                running[row] = request
                store.begin_requests(row)
        rows = np.array([row for row, _ in steps], np.int32)
        batch = {"row_indices": rows, "num_sampled": np.ones(len(rows), np.int32)}
        next_positions = num_tokens[rows, None] + np.arange(K)
        recorded = token_ids[rows[:, None], np.minimum(next_positions, capacity - 1)]
        recorded[next_positions >= ends[rows, None]] = -2
        drafts = own_proposer.propose(token_ids, num_tokens, **batch)
        own_counts.add_drafts(drafts, np.full(len(rows), SINGLE_OCCURRENCE), recorded)
        drafts = shared_proposer.propose(token_ids, num_tokens, **batch)
        agreement = drafts.agreement
        assert agreement is not None
        is_shared = agreement != OWN_DRAFT
        drafts = type(drafts)(*(array[is_shared] for array in (*drafts[:3], agreement)))
        store_counts.add_drafts(drafts, agreement[is_shared], recorded[is_shared])


def fit_costs(sets: Sequence[Counts]) -> IntArray:
    """Returns the costs, [10, 4]. A cell without counts costs as much as the next longer context,
    and 0 if there is none."""
    num_drafted, num_accepted = np.zeros((2, *SHAPE))
    for counts in sets:
        total = max(1, int(counts.num_drafted.sum()))
        num_drafted += counts.num_drafted / total
        num_accepted += counts.num_accepted / total
    with np.errstate(divide="ignore", invalid="ignore"):
        costs = -COST_UNITS_PER_BIT * np.log2(num_accepted / num_drafted)
    costs = np.where(num_drafted > 0, np.minimum(costs, MAX_COST), 0)
    monotonic: IntArray = np.maximum.accumulate(np.rint(costs[::-1]).astype(np.int64))[::-1]
    return monotonic


def fit_table(sets: dict[str, list[TokenRequest]], part: str) -> str:
    """Returns the table of costs as JSON."""
    pairs = [count_drafts(requests[PARTS[part]]) for requests in sets.values()]
    own_counts, store_counts = zip(*pairs, strict=True)
    row, store = fit_costs(own_counts)[:, 0], fit_costs(store_counts)
    num_own, num_store = (
        sum(int(counts.num_drafted.sum()) for counts in by_set)
        for by_set in (own_counts, store_counts)
    )
    about = (
        f"Fitted by tools/fit_draft_costs.py on {part} conversations of {len(sets)} recorded sets "
        f"({', '.join(sorted(sets))}): {num_own} draft tokens from rows, {num_store} from a store."
    )
    rows = ",\n           ".join(json.dumps(costs) for costs in store.tolist())
    return f'{{"about": {json.dumps(about)},\n "row": {row.tolist()},\n "store": [{rows}]}}\n'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fit_draft_costs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="folder with the recorded sets in replay/")
    parser.add_argument("--part", choices=list(PARTS), default="all", help="conversations to use")
    parser.add_argument("--output", type=Path, default=TABLE, help="default: the package's table")
    options = parser.parse_args(arguments)
    data = find_data(options.data)
    if data is None:
        print("tools.fit_draft_costs: expected --data FOLDER, got none", file=sys.stderr)
        return 2
    options.output.write_text(fit_table(load_sets(data), options.part), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
