"""Fits the tables of draft costs from recorded conversations.

    python -m tools.fit_draft_costs --data FILE_OR_FOLDER ... --output FILE

A cost is -16 * log2(p), rounded, where p is the probability that a draft token is accepted if the
draft tokens before it were accepted. The table has a row per match length and a column per outcome
byte. The tool counts the drafts at all positions of all completions, not only at those where steps
begin, because the latter depend on the table itself. Every set has the same weight, whatever its
length.

A cell is smoothed towards the acceptance rate of its neighbours with a weight of `STRENGTH`
observations. Neighbours are the cells whose match length differs by at most one and whose byte has
the same bit for the candidate. The number of observations of a cell is computed after weighting:
(sum of weights)^2 / sum of squared weights.

The store's table has the same cells for all draft tokens except the first of a draft. The columns
of the first token are by how often its entry was right and how often it was wrong, in ranges of
counts; neighbours differ by at most one range. The store contains the earlier conversations, in the
order of the file.

A third table, in a file with the prefix `match_`, has costs by match length only: that of the
longest n-gram of up to 16 tokens, over all tokens of drafts of 16 tokens.

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
from ngram_npu.output import atomic_output, check_writable
from ngram_npu_cli.learn.fit_draft_costs import observe_drafts
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER, ReplayTokenizer
from ngram_npu_cli.replay import InputError, TokenRequest, load_inputs, load_tokenizer, tokenize
from ngram_npu_cli.replay.walks import STORE_SHAPE, IntArray, simulate_ladder

PARTS = {"even": slice(0, None, 2), "odd": slice(1, None, 2), "all": slice(None)}
"""Parts of a set by name; conversations are numbered from 0."""
TABLE = Path(__file__).parents[1] / "python" / "ngram_npu" / "costs.json"
SHAPE = (16, 32)
FIRST_SHAPE = (16, 6, 4)
SCALE = 16
MAX_COST = 255
STRENGTH = 8.0
_PRIVATE = ("--data", "--output", "--compare")
"""Options with paths of this machine, which the recorded command omits."""
_ABOUT = (
    "Costs of draft tokens: -16 * log2 of the probability that one is accepted, given that those "
    "before it were; by match (row) and by the byte of the token (column). The store's first "
    "tokens: by how often the entry was right (6 steps) and wrong (4), from column 32 on."
)
_ABOUT_MATCH = (
    "Costs as in costs.json, by min(match + place in the draft, 15) alone, of drafts from the "
    "longest n-gram of up to 16 tokens. The first is of no match."
)

FloatArray = npt.NDArray[np.float64]


def load(paths: Sequence[Path], tokenizer: ReplayTokenizer) -> dict[str, list[TokenRequest]]:
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
class Observed:
    """Counts of draft tokens by cell of a table; only tokens after accepted tokens are counted."""

    tried: IntArray
    right: IntArray
    """Counts of the draft tokens that were accepted."""

    @classmethod
    def count(cls, cells: IntArray, is_right: Any, shape: tuple[int, ...]) -> Observed:
        tried, right = (
            np.bincount(chosen, minlength=math.prod(shape)) for chosen in (cells, cells[is_right])
        )
        return cls(tried.reshape(shape), right.reshape(shape))

    def select(self, columns: slice, shape: tuple[int, ...]) -> Observed:
        tried, right = self.tried[:, columns], self.right[:, columns]
        return Observed(tried.reshape(shape), right.reshape(shape))


def count_by_table(requests: Sequence[TokenRequest]) -> tuple[Observed, Observed]:
    """Counts the drafts from the rows and those from a store with room for all conversations."""
    (cells, *_), right = observe_drafts(requests)
    is_store, is_right = cells >= math.prod(SHAPE), right > 0
    return (
        Observed.count(cells[~is_store], is_right[~is_store], SHAPE),
        Observed.count(cells[is_store] - math.prod(SHAPE), is_right[is_store], STORE_SHAPE),
    )


def count_by_match(requests: Sequence[TokenRequest]) -> Observed:
    """Returns the counts by match length only, [16, 1]."""
    positions = simulate_ladder(requests, range(1, SHAPE[0] + 1))
    is_reached = positions.find_reached()
    is_accepted = positions.find_accepted()[is_reached]
    return Observed.count(positions.match[is_reached], is_accepted, (SHAPE[0], 1))


@dataclass(frozen=True)
class Weighted:
    """Weighted counts of several sets by cell. Each set has the same total weight."""

    tried: FloatArray
    right: FloatArray
    squares: FloatArray
    """Sum of the squared weights."""

    @classmethod
    def combine(cls, sets: Sequence[Observed]) -> Weighted:
        weights = [1 / max(1, int(counts.tried.sum())) for counts in sets]
        pairs = list(zip(weights, sets, strict=True))
        return cls(
            np.sum([w * counts.tried for w, counts in pairs], axis=0),
            np.sum([w * counts.right for w, counts in pairs], axis=0),
            np.sum([w * w * counts.tried for w, counts in pairs], axis=0),
        )

    def rate(self, cells: Any, prior: float, strength: float = STRENGTH) -> float:
        """Returns the share of accepted tokens in these cells, with `strength` observations of the
        share `prior` added."""
        tried, squares = float(self.tried[cells].sum()), float(self.squares[cells].sum())
        if tried == 0:
            return prior
        observations = tried * tried / squares
        share = float(self.right[cells].sum()) / tried
        return (observations * share + strength * prior) / (observations + strength)


def fit(sets: Sequence[Observed]) -> IntArray:
    """Returns the table, [16, 32], of costs from 0 to 255."""
    weighted = Weighted.combine(sets)
    costs = np.empty(SHAPE, np.int64)
    for match in range(SHAPE[0]):
        near = slice(max(0, match - 1), match + 2)
        for was_right in (0, 1):
            prior = weighted.rate((near, slice(was_right, None, 2)), 0.5, 2.0)
            for outcome in range(was_right, SHAPE[1], 2):
                costs[match, outcome] = _cost(weighted.rate((match, outcome), prior))
    return costs


def fit_store(sets: Sequence[Observed]) -> IntArray:
    """Returns the store's table, [16, 56]: 32 columns for later draft tokens, 24 for the first."""
    after = fit([counts.select(slice(SHAPE[1]), SHAPE) for counts in sets])
    firsts = [counts.select(slice(SHAPE[1], None), FIRST_SHAPE) for counts in sets]
    weighted = Weighted.combine(firsts)
    first = np.empty(FIRST_SHAPE, np.int64)
    for cell in np.ndindex(FIRST_SHAPE):
        near = tuple(slice(max(0, at - 1), at + 2) for at in cell)
        first[cell] = _cost(weighted.rate(cell, weighted.rate(near, 0.5, 2.0)))
    return np.hstack([after, first.reshape(SHAPE[0], -1)])


def fit_match(sets: Sequence[Observed]) -> IntArray:
    """Returns the costs by match length only, [16]. The first is the cost without a match."""
    weighted = Weighted.combine(sets)
    rates = [weighted.rate((match, 0), 0.5, 2.0) for match in range(1, SHAPE[0])]
    return np.array([MAX_COST, *map(_cost, rates)])


def _cost(rate: float) -> int:
    return min(MAX_COST, round(-SCALE * np.log2(rate)))


def mean_difference(costs: IntArray, other: IntArray, sets: Sequence[Observed]) -> float:
    """Returns the mean absolute difference of two tables, weighted by the counts of the cells."""
    tried = Weighted.combine(sets).tried
    # The weighted counts of a set sum to 1, or to 0 if the set has none.
    return float((abs(costs - other) * tried).sum() / max(1.0, tried.sum()))


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
    sets, part = load(options.data, tokenizer), PARTS[options.part]
    parts = {name: requests[part] for name, requests in sets.items() if requests[part]}
    tables = [count_by_table(requests) for requests in parts.values()]
    rows, stored = [row for row, _ in tables], [store for _, store in tables]
    matches = list(map(count_by_match, parts.values()))
    costs, store_costs = fit(rows), fit_store(stored)

    def describe(about: str, **counts: Sequence[Observed]) -> dict[str, Any]:
        described = {}
        for number, (name, requests) in enumerate(parts.items()):
            described[name] = {
                "conversations": len(requests),
                "tokens": sum(request.num_tokens for request in requests),
                **{key: int(sets[number].tried.sum()) for key, sets in counts.items()},
            }
        return {
            "about": about,
            "command": _format_command(arguments),
            "date": date.today().isoformat(),
            "tokenizer": f"{tokenizer.name}: {tokenizer.source}",
            "conversations": f"{options.part} of each set, the first is number 0",
            "sets": described,
        }

    observations = {"draft_tokens_observed": rows, "store_draft_tokens_observed": stored}
    table = describe(_ABOUT, **observations)
    if options.compare:
        other = json.loads(options.compare.read_text(encoding="utf-8"))
        fits = (("", "row", costs, rows), ("store_", "store", store_costs, stored))
        for prefix, key, fitted, counts in fits:
            difference = mean_difference(fitted, np.array(other[key]), counts)
            table[f"{prefix}mean_difference_from_another_fit"] = round(difference, 3)
    match_table = describe(_ABOUT_MATCH, draft_tokens_observed=matches)
    match_table["match"] = fit_match(matches).tolist()
    _write(options.output, _format(table, row=costs, store=store_costs))
    _write(match_output, json.dumps(match_table, indent=1) + "\n")
    print(f"{options.output}: {sum(int(counts.tried.sum()) for counts in rows)} observations")


def _write(path: Path, text: str) -> None:
    with atomic_output(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _format(table: dict[str, Any], **costs: IntArray) -> str:
    """Returns JSON with one line per row of the tables."""
    text = json.dumps(table, indent=1)[:-2]
    for name, rows in costs.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows.tolist())
        text += f',\n "{name}": [\n{lines}\n ]'
    return text + "\n}\n"


def _format_command(arguments: Sequence[str]) -> str:
    """Returns the command without paths of this machine."""
    words = ["python", "-m", "tools.fit_draft_costs"]
    is_private = False
    for argument in arguments:
        if argument.startswith("--"):
            is_private = argument.partition("=")[0] in _PRIVATE
        if not is_private:
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
