"""Fits the tables of costs by which drafts of a ladder end, from recorded conversations.

    python -m tools.fit_costs --data FILE_OR_FOLDER ... --output FILE

A cost is -16 * log2(probability that a draft token is accepted, given that those before it were),
rounded, by the token's match (row) and the byte beside it (column). Counted are the drafts at every
place of every completion, not only at those where steps begin: which these are depends on the table
itself. Every set weighs the same, whatever its length.

A cell is drawn towards the rate of its neighbours by `STRENGTH` observations of these. Neighbours
are all cells whose match differs by one at most, and whose byte says as this one's whether the
candidate was right. How many observations a cell itself has counts after weighing: (sum of
weights)^2 / sum of squared weights.

The store's table has the same for tokens after a draft's first. The first one's column says how
often its entry was right and wrong, in steps; neighbours differ by one step at most. The store
holds what the conversations before said, in the order of the file.

A third table, in a file of its own whose name begins with `match_`, knows of a draft token no more
than its match: the longest n-gram of up to 16 tokens, on the tokens of every draft of 16.

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
from ngram_npu_cli.learn.fit_draft_costs import observed
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER
from ngram_npu_cli.replay import InputError, TokenRequest
from ngram_npu_cli.replay.walks import STORE_SHAPE, IntArray, walks

from tools.drafts import PARTS, load

TABLE = Path(__file__).parents[1] / "python" / "ngram_npu" / "costs.json"
SHAPE = (16, 32)
FIRST_SHAPE = (16, 6, 4)
SCALE = 16
MAX_COST = 255
STRENGTH = 8.0
_PRIVATE = ("--data", "--output", "--compare")

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Observed:
    """Counts of draft tokens whose predecessors were all accepted, by cell of a table."""

    tried: IntArray
    right: IntArray

    @classmethod
    def counted(cls, cells: IntArray, right: Any, shape: tuple[int, ...]) -> Observed:
        counts = (np.bincount(of, minlength=math.prod(shape)) for of in (cells, cells[right]))
        return cls(*(of.reshape(shape) for of in counts))

    def part(self, columns: slice, shape: tuple[int, ...]) -> Observed:
        return Observed(
            self.tried[:, columns].reshape(shape), self.right[:, columns].reshape(shape)
        )


def in_tables(requests: Sequence[TokenRequest]) -> tuple[Observed, Observed]:
    """Of drafts from the rows, and from a store large enough for all of these conversations."""
    (cells, *_), right = observed(requests)
    of_store, came = cells >= math.prod(SHAPE), right > 0
    return (
        Observed.counted(cells[~of_store], came[~of_store], SHAPE),
        Observed.counted(cells[of_store] - math.prod(SHAPE), came[of_store], STORE_SHAPE),
    )


def by_match(requests: Sequence[TokenRequest]) -> Observed:
    """By match alone, [16, 1]."""
    found = walks(requests, range(1, SHAPE[0] + 1))
    met = found.reached()
    return Observed.counted(found.match[met], found.accepted()[met], (SHAPE[0], 1))


@dataclass(frozen=True)
class Weighed:
    """Observations of several sets, each set with the same total weight, by cell."""

    tried: FloatArray
    right: FloatArray
    squares: FloatArray
    """Of the weights, summed."""

    @classmethod
    def of(cls, sets: Sequence[Observed]) -> Weighed:
        weights = [1 / max(1, int(of.tried.sum())) for of in sets]
        pairs = list(zip(weights, sets, strict=True))
        return cls(
            np.sum([w * of.tried for w, of in pairs], axis=0),
            np.sum([w * of.right for w, of in pairs], axis=0),
            np.sum([w * w * of.tried for w, of in pairs], axis=0),
        )

    def rate(self, cells: Any, prior: float, strength: float = STRENGTH) -> float:
        """Share that was right in these cells, with `strength` observations of `prior` added."""
        tried, squares = float(self.tried[cells].sum()), float(self.squares[cells].sum())
        if tried == 0:
            return prior
        observations = tried * tried / squares
        share = float(self.right[cells].sum()) / tried
        return (observations * share + strength * prior) / (observations + strength)


def fit(sets: Sequence[Observed]) -> IntArray:
    """The table, [16, 32], of costs from 0 to 255."""
    weighed = Weighed.of(sets)
    costs = np.empty(SHAPE, np.int64)
    for match in range(SHAPE[0]):
        near = slice(max(0, match - 1), match + 2)
        for said in (0, 1):
            prior = weighed.rate((near, slice(said, None, 2)), 0.5, 2.0)
            for outcome in range(said, SHAPE[1], 2):
                rate = weighed.rate((match, outcome), prior)
                costs[match, outcome] = _cost(rate)
    return costs


def fit_store(sets: Sequence[Observed]) -> IntArray:
    """The store's table, [16, 56]: of tokens after the first, then of the first."""
    after = fit([of.part(slice(SHAPE[1]), SHAPE) for of in sets])
    weighed = Weighed.of([of.part(slice(SHAPE[1], None), FIRST_SHAPE) for of in sets])
    first = np.empty(FIRST_SHAPE, np.int64)
    for cell in np.ndindex(FIRST_SHAPE):
        near = tuple(slice(max(0, at - 1), at + 2) for at in cell)
        prior = weighed.rate(near, 0.5, 2.0)
        first[cell] = _cost(weighed.rate(cell, prior))
    return np.hstack([after, first.reshape(SHAPE[0], -1)])


def fit_match(sets: Sequence[Observed]) -> IntArray:
    """[16], the costs by match alone; the first is of no match."""
    weighed = Weighed.of(sets)
    rates = [weighed.rate((match, 0), 0.5, 2.0) for match in range(1, SHAPE[0])]
    return np.array([MAX_COST, *map(_cost, rates)])


def _cost(rate: float) -> int:
    return min(MAX_COST, round(-SCALE * np.log2(rate)))


def difference(costs: IntArray, other: IntArray, sets: Sequence[Observed]) -> float:
    """Mean of the absolute difference of two tables, each cell weighed as often as it occurs."""
    tried = Weighed.of(sets).tried
    return float((abs(costs - other) * tried).sum() / max(1.0, tried.sum()))  # a set sums to 1


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    given = _parser().parse_args(arguments)
    try:
        _run(given, arguments)
    except InputError as error:
        print(f"tools.fit_costs: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace, arguments: Sequence[str]) -> None:
    check_writable(given.output)
    data = load(given.data, given.tokenizer)
    part = PARTS[given.part]
    chosen = {name: requests[part] for name, requests in data.sets.items()}
    chosen = {name: of for name, of in chosen.items() if of}
    tables = {name: in_tables(requests) for name, requests in chosen.items()}
    rows, stored = ([of[i] for of in tables.values()] for i in (0, 1))
    matches = list(map(by_match, chosen.values()))
    costs, store_costs = fit(rows), fit_store(stored)
    compared = {}
    if given.compare:
        other = json.loads(given.compare.read_text(encoding="utf-8"))
        found = difference(costs, np.array(other["row"]), rows)
        compared["mean_difference_from_another_fit"] = round(found, 3)
        found = difference(store_costs, np.array(other["store"]), stored)
        compared["store_mean_difference_from_another_fit"] = round(found, 3)

    def described(about: str, **counts: Sequence[Observed]) -> dict[str, Any]:
        each = [[int(of.tried.sum()) for of in sets] for sets in counts.values()]
        return {
            "about": about,
            "command": _command(arguments),
            "date": date.today().isoformat(),
            "tokenizer": data.tokenizer,
            "conversations": f"{given.part} of each set, the first is number 0",
            "sets": {
                name: {
                    "conversations": len(requests),
                    "tokens": sum(request.num_tokens for request in requests),
                    **dict(zip(counts, numbers, strict=True)),
                }
                for (name, requests), *numbers in zip(chosen.items(), *each, strict=True)
            },
        }

    table = described(
        "Costs of draft tokens: -16 * log2 of the probability that one is accepted, given that "
        "those before it were; by match (row) and by the byte beside the token (column). The "
        "store's first tokens: by how often the entry was right (6 steps) and wrong (4), from "
        "column 32 on.",
        draft_tokens_observed=rows,
        store_draft_tokens_observed=stored,
    )
    match_table = described(
        "Costs as in costs.json, by min(match + place in the draft, 15) alone, of drafts from the "
        "longest n-gram of up to 16 tokens. The first is of no match.",
        draft_tokens_observed=matches,
    )
    match_table["match"] = fit_match(matches).tolist()
    for path, text in (
        (given.output, _laid_out(table | compared, row=costs, store=store_costs)),
        (
            given.output.with_name(f"match_{given.output.name}"),
            json.dumps(match_table, indent=1) + "\n",
        ),
    ):
        check_writable(path)
        with atomic_output(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    print(f"{given.output}: {sum(int(of.tried.sum()) for of in rows)} observations")


def _laid_out(table: dict[str, Any], **costs: IntArray) -> str:
    """As JSON, a line for each row of the tables."""
    text = json.dumps(table, indent=1)[:-2]
    for name, rows in costs.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows.tolist())
        text += f',\n "{name}": [\n{lines}\n ]'
    return text + "\n}\n"


def _command(arguments: Sequence[str]) -> str:
    """The command without paths of this machine."""
    pattern = ["python", "-m", "tools.fit_costs"]
    private = False
    for argument in arguments:
        if argument.startswith("--"):
            private = argument.partition("=")[0] in _PRIVATE
        if not private:
            pattern.append(argument)
    return shlex.join(pattern)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fit_costs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="conversations as replay reads them")
    add("--output", type=Path, default=TABLE, help="default: the package's own table")
    add("--tokenizer", default=DEFAULT_TOKENIZER, help="a name or a folder, as for replay")
    add("--part", choices=list(PARTS), default="even", help="of each set")
    add("--compare", type=Path, metavar="FILE", help="another table, to say how far this is off")
    return parser


if __name__ == "__main__":
    sys.exit(main())
