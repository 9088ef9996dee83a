"""The ladder by brute force: every two places of a row are compared, in numpy, so that rows of some
hundred tokens take a millisecond. Independent of the kernels and of the package's reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]

MOST = 16
_RUNGS = np.repeat(np.arange(6, dtype=np.int32), (1, 1, 2, 4, 8, 1))
"""For each number of equal tokens, how many of the sizes 1, 2, 4, 8, 16 fit."""


@dataclass(frozen=True)
class Draft:
    """Of one row: k ids and -1 behind them, their number, the length of the match, k costs and 255
    behind them."""

    ids: list[int]
    count: int
    match_len: int
    costs: list[int]


@dataclass(frozen=True)
class Truth:
    """Of a row of T tokens and all that it begins with.

    Attributes:
        ends, matches: [T], of the candidate of the first x + 1 tokens: where its occurrence ends,
            and how many tokens agree there; 0 where there is none.
        outcomes: [T], the byte beside each token.
    """

    tokens: Int32Array
    ends: npt.NDArray[np.intp]
    matches: UInt8Array
    outcomes: UInt8Array

    def draft(
        self,
        length: int,
        k: int,
        costs: UInt8Array | None,
        cost_limit: int,
        overlap: bool = False,
        max_len: int = 2**63 - 1,
    ) -> Draft:
        """Of the first ``length`` tokens."""
        ids: list[int] = []
        paid: list[int] = []
        match = int(self.matches[length - 1]) if length else 0
        if match:
            start = int(self.ends[length - 1]) + 1
            room = min(k, max_len - length) if overlap else min(k, max_len - length, length - start)
            for j in range(room):
                place = start + j % (length - start)
                if costs is not None:
                    cost = int(costs[min(match + j, 15), self.outcomes[place]])
                    if sum(paid) + cost > cost_limit:
                        break
                    paid.append(cost)
                ids.append(int(self.tokens[place]))
        rest = [-1] * (k - len(ids))
        return Draft(ids + rest, len(ids), match if ids else 0, paid + [255] * (k - len(paid)))


def truth_of(tokens: Int32Array) -> Truth:
    size = len(tokens)
    equal = (tokens[:, None] == tokens[None, :]) & np.tri(size, k=-1, dtype=np.bool_)
    matches = np.zeros((size, size), np.uint8)  # of what ends at [this place, that earlier one]
    agree = equal.copy()
    for more in range(1, MOST + 1):
        matches += agree
        agree[more:, more:] &= equal[:-more, :-more]
        agree[:more], agree[:, :more] = False, False
    rank = _RUNGS[matches] * size + np.arange(size)  # the longest size, then the latest place
    ends = np.where(matches, rank, -1).argmax(1) if size else np.zeros(0, np.intp)
    match = np.take_along_axis(matches, ends[:, None], 1)[:, 0]
    outcomes = np.zeros(size, np.uint8)
    right = tokens[ends[:-1] + 1] == tokens[1:]
    outcomes[1:] = np.where(match[:-1], np.minimum(match[:-1], 15) * 2 + right, 0)
    return Truth(tokens, ends, match, outcomes)
