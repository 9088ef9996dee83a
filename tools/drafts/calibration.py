"""Calibration: how well the costs of drafted tokens predict their acceptance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tools.drafts.simulator import IntArray, Walks

BINS = 10


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
    paid = costs[found.match[places, :k], found.outcome[places, :k]]
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
