"""Costs by the length of a match, and `fill`: the samples of the lookups take turns with them. And
costs with token logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from .spec import Array, in_buffer

RISING = in_buffer(np.arange(16) * 4, before=1, gap=2, dtype=np.uint8)
FALLING = in_buffer(np.arange(16)[::-1] * 4, before=3, gap=1, dtype=np.uint8)
TABLES = {"rising": RISING, "falling": FALLING}
LIMITS = (40, 0, 2**31 - 1)

Costs = tuple[Array | None, int]
"""match_costs and cost_limit."""


def costs_in_turn(label: str, number: int) -> tuple[str, Costs]:
    """The label and the costs of a sample: two of five have some."""
    at = number % 5
    if at not in (1, 3):
        return label, (None, 40)
    name, limit = ("rising", "falling")[at == 3], LIMITS[number // 5 % len(LIMITS)]
    return f"{label}-{name}-{limit}", (TABLES[name], limit)


def fills_in_turn(label: str, number: int) -> Iterator[tuple[str, bool]]:
    """The labels and `fill` of a sample; both for one that a lookup may leave alone."""
    both = label.startswith(("empty", "hostile"))
    for fill in (False, True) if both else (number // 2 % 2 == 1,):
        yield f"{label}-filled" if fill else label, fill


def paid_in_turn(costs: Costs, number: int, batch: int, k: int) -> Array | None:
    """The tensor for the costs of the drafts, if the call has costs; every other call lacks it."""
    if costs[0] is None or number % 2 == 0:
        return None
    return in_buffer(np.full((batch, k), 77), before=number % 3, gap=2, dtype=np.uint8)


def with_token_logits(rng: np.random.Generator, columns: int) -> dict[str, Array]:
    """Logits of all sizes, most of them as large as those of likely tokens."""
    cells = rng.integers(-100, 250, (16, columns)).astype(np.int16)
    cells[rng.random(cells.shape) < 0.1] = rng.integers(-900, -300)  # beyond the highest cost
    tokens = rng.integers(-64, 64, (4096, 2)).astype(np.int8)
    for table in (cells, tokens):
        ends = np.iinfo(table.dtype)
        table[rng.random(table.shape) < 0.02] = ends.min
        table[rng.random(table.shape) < 0.02] = ends.max
    return {"costs": cells, "token_logits": tokens}


def bad_logits(columns: int) -> list[tuple[str, dict[str, Any], str, str]]:
    """Of calls with costs: label, changed arguments, what the error says and names."""
    cells, tokens = np.zeros((16, columns), np.int16), np.zeros((4096, 2), np.int8)
    wide = np.zeros((4096, 3), np.int8)[:, :2]
    given = {"costs": cells, "token_logits": tokens}
    return [
        ("costs without token logits", {"costs": cells}, "uint8, got int16", "costs"),
        ("no logits", {**given, "costs": cells.astype(np.uint8)}, "int16, got uint8", "costs"),
        ("token logits' dtype", {**given, "token_logits": tokens + cells[0, 0]}, "int8", ""),
        ("token logits' shape", {**given, "token_logits": tokens[:9]}, r"\[4096, 2\]", ""),
        ("token logits' stride", {**given, "token_logits": wide}, "contiguous", ""),
    ]


@st.composite
def any_costs(draw: st.DrawFn) -> Costs:
    table = None
    if draw(st.booleans()):
        cost = st.one_of(st.integers(0, 30), st.sampled_from([0, 255]))
        table = in_buffer(draw(st.lists(cost, min_size=16, max_size=16)), dtype=np.uint8)
    return table, draw(st.sampled_from([0, 10, 40, 100, 2**31 - 1]))
