"""Fits the tables of draft costs from recorded conversations.

    python -m tools.fit_draft_costs --data FILE_OR_FOLDER ... --output FILE

A cost is -16 * log2(p), rounded, where p is the probability that a draft token is accepted if the
draft tokens before it were accepted. The table has a row per match length and a column per outcome
byte. The tool counts the drafts at all positions of all completions, because the positions at which
steps begin depend on the table itself. Every set has the same weight, whatever its length.

A cell is smoothed towards the acceptance rate of its neighbours with a weight of `STRENGTH`
observations. Neighbours are the cells whose match length differs by at most one and whose outcome
byte has the same lowest bit, that of the last candidate. The number of observations of a cell is
computed after weighting: (sum of weights)^2 / sum of squared weights.

The store's table has the same cells for all draft tokens except the first of a draft. The column of
a first token depends on how often its store entry was right and how often it was wrong, in ranges
of counts; neighbours differ by at most one range. The store contains the earlier conversations, in
the order of the file.

A third table, in a file with the prefix `match_`, has costs by match length only: the length of the
longest matching n-gram of up to 16 tokens, for all tokens of drafts of 16 tokens.

The same conversations, tokenizer and options give the same table.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu.draft_costs import SHAPES
from ngram_npu.output import atomic_output, check_writable
from ngram_npu_cli.learn.fit_draft_costs import observe_drafts
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER, ReplayTokenizer
from ngram_npu_cli.replay import InputError, TokenRequest, load_inputs, load_tokenizer, tokenize
from ngram_npu_cli.replay.walks import IntArray, simulate_ladder

PARTS = {"even": slice(0, None, 2), "odd": slice(1, None, 2), "all": slice(None)}
"""Parts of a set by name; conversations are numbered from 0."""
TABLE = Path(__file__).parents[1] / "python" / "ngram_npu" / "costs.json"
SHAPE, STORE_SHAPE = SHAPES["row"], SHAPES["store"]
FIRST_SHAPE = (16, 6, 4)
SCALE = 16
MAX_COST = 255
STRENGTH = 8.0
_PRIVATE_OPTIONS = ("--data", "--output", "--compare")
"""Options with paths of this machine, which the recorded command omits."""
_ABOUT = (
    "Costs of draft tokens: -16 * log2 of the probability that a token is accepted if the tokens "
    "before it were; by match length (row) and outcome byte (column). First tokens of the store: "
    "by how often the entry was right (6 ranges) and wrong (4 ranges), from column 32 on."
)
_ABOUT_MATCH = (
    "Costs as in costs.json, only by min(match length + position in the draft, 15), of drafts from "
    "the longest n-gram of up to 16 tokens. The first cost is for no match."
)

FloatArray = npt.NDArray[np.float64]


def load_sets(paths: Sequence[Path], tokenizer: ReplayTokenizer) -> dict[str, list[TokenRequest]]:
    """Reads the sets of conversations in files and folders; returns the requests by set name.

    Raises:
        InputError: A file cannot be read, or no completion of a set has two tokens.
    """
    sets = {item.name: tokenize(item, tokenizer) for item in load_inputs(paths)}
    for name, requests in sets.items():
        if not any(request.spans() for request in requests):
            raise InputError(f"{name}: expected a completion of at least two tokens, got none")
    return sets


@dataclass(frozen=True)
class CellCounts:
    """Counts of draft tokens by cell of a table; only tokens after accepted tokens are counted."""

    num_drafted: IntArray
    num_accepted: IntArray

    @classmethod
    def count(cls, cells: IntArray, is_accepted: Any, shape: tuple[int, ...]) -> CellCounts:
        num_drafted, num_accepted = (
            np.bincount(counted, minlength=math.prod(shape))
            for counted in (cells, cells[is_accepted])
        )
        return cls(num_drafted.reshape(shape), num_accepted.reshape(shape))

    def select_columns(self, columns: slice, shape: tuple[int, ...]) -> CellCounts:
        num_drafted, num_accepted = self.num_drafted[:, columns], self.num_accepted[:, columns]
        return CellCounts(num_drafted.reshape(shape), num_accepted.reshape(shape))


def count_by_table(requests: Sequence[TokenRequest]) -> tuple[CellCounts, CellCounts]:
    """Counts the drafts from rows and the drafts from a store with room for all conversations."""
    (cells, *_), right = observe_drafts(requests)
    is_store, is_accepted = cells >= math.prod(SHAPE), right > 0
    return (
        CellCounts.count(cells[~is_store], is_accepted[~is_store], SHAPE),
        CellCounts.count(cells[is_store] - math.prod(SHAPE), is_accepted[is_store], STORE_SHAPE),
    )


def count_by_match(requests: Sequence[TokenRequest]) -> CellCounts:
    """Returns the counts by match length only, [16, 1]."""
    positions = simulate_ladder(requests, range(1, SHAPE[0] + 1))
    is_reached = positions.find_reached()
    is_accepted = positions.find_accepted()[is_reached]
    return CellCounts.count(positions.match[is_reached], is_accepted, (SHAPE[0], 1))


@dataclass(frozen=True)
class WeightedCounts:
    """Weighted counts of several sets by cell. Each set has the same total weight."""

    num_drafted: FloatArray
    num_accepted: FloatArray
    squares: FloatArray
    """Sum of the squared weights."""

    @classmethod
    def combine_sets(cls, sets: Sequence[CellCounts]) -> WeightedCounts:
        weights = [1 / max(1, int(counts.num_drafted.sum())) for counts in sets]
        pairs = list(zip(weights, sets, strict=True))
        return cls(
            np.sum([w * counts.num_drafted for w, counts in pairs], axis=0),
            np.sum([w * counts.num_accepted for w, counts in pairs], axis=0),
            np.sum([w * w * counts.num_drafted for w, counts in pairs], axis=0),
        )

    def compute_rate(self, cells: Any, prior: float, strength: float = STRENGTH) -> float:
        """Returns the share of accepted tokens, with `strength` observations of `prior` added."""
        num_drafted, squares = (
            float(self.num_drafted[cells].sum()),
            float(self.squares[cells].sum()),
        )
        if num_drafted == 0:
            return prior
        observations = num_drafted * num_drafted / squares
        share = float(self.num_accepted[cells].sum()) / num_drafted
        return (observations * share + strength * prior) / (observations + strength)


def fit_costs(sets: Sequence[CellCounts]) -> IntArray:
    """Returns the table, [16, 32], of costs from 0 to 255."""
    weighted = WeightedCounts.combine_sets(sets)
    costs = np.empty(SHAPE, np.int64)
    for match in range(SHAPE[0]):
        neighbours = slice(max(0, match - 1), match + 2)
        for was_right in (0, 1):
            prior = weighted.compute_rate((neighbours, slice(was_right, None, 2)), 0.5, 2.0)
            for outcome in range(was_right, SHAPE[1], 2):
                costs[match, outcome] = _compute_cost(
                    weighted.compute_rate((match, outcome), prior)
                )
    return costs


def fit_store_costs(sets: Sequence[CellCounts]) -> IntArray:
    """Returns the store's table, [16, 56]: 32 columns for later draft tokens, 24 for the first."""
    later_costs = fit_costs([counts.select_columns(slice(SHAPE[1]), SHAPE) for counts in sets])
    first_counts = [counts.select_columns(slice(SHAPE[1], None), FIRST_SHAPE) for counts in sets]
    weighted = WeightedCounts.combine_sets(first_counts)
    first_costs = np.empty(FIRST_SHAPE, np.int64)
    for cell in np.ndindex(FIRST_SHAPE):
        neighbours = tuple(slice(max(0, i - 1), i + 2) for i in cell)
        prior = weighted.compute_rate(neighbours, 0.5, 2.0)
        first_costs[cell] = _compute_cost(weighted.compute_rate(cell, prior))
    return np.hstack([later_costs, first_costs.reshape(SHAPE[0], -1)])


def fit_match_costs(sets: Sequence[CellCounts]) -> IntArray:
    """Returns the costs by match length only, [16]. The first is the cost without a match."""
    weighted = WeightedCounts.combine_sets(sets)
    rates = [weighted.compute_rate((match, 0), 0.5, 2.0) for match in range(1, SHAPE[0])]
    return np.array([MAX_COST, *map(_compute_cost, rates)])


def _compute_cost(rate: float) -> int:
    return min(MAX_COST, round(-SCALE * np.log2(rate)))


def compute_mean_difference(
    costs: IntArray, other_costs: IntArray, sets: Sequence[CellCounts]
) -> float:
    """Returns the mean absolute difference of two tables, weighted by the counts of the cells."""
    num_drafted = WeightedCounts.combine_sets(sets).num_drafted
    # The weighted counts of a set sum to 1, or to 0 if the set has none.
    return float((abs(costs - other_costs) * num_drafted).sum() / max(1.0, num_drafted.sum()))


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _make_parser().parse_args(arguments)
    try:
        _run(options, arguments)
    except InputError as error:
        print(f"tools.fit_draft_costs: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    match_output = options.output.with_name(f"match_{options.output.name}")
    for path in (options.output, match_output):
        check_writable(path)
    tokenizer = load_tokenizer(options.tokenizer)
    sets, part = load_sets(options.data, tokenizer), PARTS[options.part]
    parts = {name: requests[part] for name, requests in sets.items() if requests[part]}
    tables = [count_by_table(requests) for requests in parts.values()]
    row_counts, store_counts = [row for row, _ in tables], [store for _, store in tables]
    matches = list(map(count_by_match, parts.values()))
    costs, store_costs = fit_costs(row_counts), fit_store_costs(store_counts)

    def describe_sets(about: str, **counts: Sequence[CellCounts]) -> dict[str, Any]:
        descriptions = {}
        for i, (name, requests) in enumerate(parts.items()):
            descriptions[name] = {
                "conversations": len(requests),
                "tokens": sum(request.num_tokens for request in requests),
                **{key: int(sets[i].num_drafted.sum()) for key, sets in counts.items()},
            }
        return {
            "about": about,
            "command": _format_command(arguments),
            "date": date.today().isoformat(),
            "tokenizer": f"{tokenizer.name}: {tokenizer.source}",
            "conversations": f"{options.part} of each set, the first is number 0",
            "sets": descriptions,
        }

    observations = {"draft_tokens_observed": row_counts}
    observations["store_draft_tokens_observed"] = store_counts
    table = describe_sets(_ABOUT, **observations)
    if options.compare:
        other_tables = json.loads(options.compare.read_text(encoding="utf-8"))
        row_fit, store_fit = ("row", costs, row_counts), ("store", store_costs, store_counts)
        for prefix, (key, fitted, counts) in (("", row_fit), ("store_", store_fit)):
            difference = compute_mean_difference(fitted, np.array(other_tables[key]), counts)
            table[f"{prefix}mean_difference_from_another_fit"] = round(difference, 3)
    match_table = describe_sets(_ABOUT_MATCH, draft_tokens_observed=matches)
    match_table["match"] = fit_match_costs(matches).tolist()
    _write_file(options.output, _format_tables(table, row=costs, store=store_costs))
    _write_file(match_output, json.dumps(match_table, indent=1) + "\n")
    num_observations = sum(int(counts.num_drafted.sum()) for counts in row_counts)
    print(f"{options.output}: {num_observations} observations")


def _write_file(path: Path, text: str) -> None:
    with atomic_output(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _format_tables(table: dict[str, Any], **costs: IntArray) -> str:
    """Returns JSON with one line per row of the tables."""
    text = json.dumps(table, indent=1)[:-2]
    for name, rows in costs.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows.tolist())
        text += f',\n "{name}": [\n{lines}\n ]'
    return text + "\n}\n"


def _format_command(arguments: Sequence[str]) -> str:
    """Returns the command without paths of this machine."""
    words = ["python", "-m", "tools.fit_draft_costs"]
    is_private_value = False
    for argument in arguments:
        if argument.startswith("--"):
            is_private_value = argument.partition("=")[0] in _PRIVATE_OPTIONS
        if not is_private_value:
            words.append(argument)
    return shlex.join(words)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fit_draft_costs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="files or folders of conversations")
    add("--output", type=Path, default=TABLE, help="default: the package's table")
    add("--tokenizer", default=DEFAULT_TOKENIZER, help="a name or a folder, as for replay")
    add("--part", choices=list(PARTS), default="even", help="conversations of each set to fit on")
    add("--compare", type=Path, metavar="FILE", help="another table; records the difference")
    return parser


if __name__ == "__main__":
    sys.exit(main())
