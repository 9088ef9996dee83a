"""Recorded sets as conversations, their halves, and the calibration of a table of costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu_cli.replay import InputError, TokenRequest, load_inputs, load_tokenizer, tokenize
from ngram_npu_cli.replay.walks import IntArray, Walks

PARTS = {"even": slice(0, None, 2), "odd": slice(1, None, 2), "all": slice(None)}
"""Halves of a set's conversations, whose first has number 0."""
BINS = 10
"""Of the calibration."""


@dataclass(frozen=True)
class Recorded:
    """Sets by name, and the tokenizer that made their token ids, for the record."""

    sets: dict[str, list[TokenRequest]]
    tokenizer: str


def load(paths: Sequence[Path], tokenizer: str) -> Recorded:
    """Read files of conversations and folders of them; `tokenizer` is as for `load_tokenizer`.

    Raises:
        InputError: something cannot be read, or generates nothing in more than one step.
    """
    loaded = load_tokenizer(tokenizer)
    sets = {item.name: tokenize(item, loaded) for item in load_inputs(paths)}
    for name, requests in sets.items():
        if not any(request.spans() for request in requests):
            raise InputError(f"{name}: no completion of two tokens or more")
    return Recorded(sets, f"{loaded.name}: {loaded.source}")


def calibration(found: Walks, costs: IntArray, limit: int, k: int) -> dict[str, Any]:
    """Predicted against actual acceptance in a replay of drafts by this table and limit.

    ``token``: of a drafted token, where those before it were accepted (2 ** (-cost / 16)).
    ``run``: of a drafted token and all before it (2 ** (-sum of costs / 16)). Tokens drafted past
    a completion's end are left out: nobody knows what they would have met.
    """
    lengths = found.lengths(costs, limit, k)
    places = found.steps(lengths)
    j = np.arange(k)
    drafted = j < np.minimum(lengths, found.remaining)[places, None]
    right = j < found.right[places, None]
    paid = costs[found.match[places, :k], found.column[places, :k]]
    met = drafted & found.reached()[places, :k]
    return {
        "token": _binned(paid[met], right[met]),
        "run": _binned(np.cumsum(paid, axis=1)[drafted], right[drafted]),
    }


def _binned(costs: IntArray, right: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Bins of equal width over the predicted probability; the expected calibration error is the
    mean over all tokens of their bin's |predicted - accepted|."""
    predicted = 2.0 ** (-costs / 16)
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    number = np.bincount(bins, minlength=BINS)
    sums = [np.bincount(bins, weights=of, minlength=BINS) for of in (predicted, right)]
    used = number > 0
    expected, actual = (of[used] / number[used] for of in sums)
    error = float((abs(expected - actual) * number[used]).sum() / number.sum())
    return {
        "tokens": int(number.sum()),
        "expected_calibration_error": round(error, 4),
        "predicted": expected.round(4).tolist(),
        "accepted": actual.round(4).tolist(),
        "bin_tokens": number[used].tolist(),
    }
