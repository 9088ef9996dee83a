"""Costs of draft tokens fitted on one's own traffic: a small file, bound to a tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ngram_npu.replay import TokenRequest
    from ngram_npu.replay.walks import Walks

__all__ = ["Comparison", "Costs", "compare", "fit"]

FORMAT = "ngram-npu costs"
VERSION = 1
SHAPES = {"row": (16, 32), "store": (16, 56), "tokens": (4096, 2)}
DTYPES = {"row": np.int16, "store": np.int16, "tokens": np.int8}
RANGES = {"row": (-768, 769), "store": (-768, 769), "tokens": (-128, 127)}
"""No sum of a cell and two tokens' logits wraps."""
UNIT = 32
"""Of a logit, per nat."""
CLASSES = SHAPES["tokens"][0]
MOST_TOKENS = 1 << 20
"""Of completions that are fitted on: the newest; 200 MB of memory."""
STRENGTH = {"cells": 20.0, "tokens": 20.0}
"""Observations' worth of belief in the shipped costs, and in a token that says nothing."""
ROUNDS = 12

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[Any]


class Costs:
    """Logits of draft tokens, in 32nds of a nat (docs/ops/ngram_index_propose.md, "Token logits").
    They do not change.

    Attributes:
        row: [16, 32] int16, of tokens from a request's own row.
        store: [16, 56] int16, of tokens from a store.
        tokens: [4096, 2] int8, what the drafted token and the token before it say.
        tokenizer: 32 hex digits that name the vocabulary; empty: not known.
        digest: 32 hex digits that name these costs.

    Raises:
        ValueError: a table of another shape or with other numbers; a name of another form.
    """

    row: npt.NDArray[np.int16]
    store: npt.NDArray[np.int16]
    tokens: npt.NDArray[np.int8]

    def __init__(
        self,
        row: npt.ArrayLike,
        store: npt.ArrayLike,
        tokens: npt.ArrayLike,
        tokenizer: str = "",
    ) -> None:
        if not isinstance(tokenizer, str) or not re.fullmatch("([0-9a-f]{32})?", tokenizer):
            raise ValueError(
                f"Costs: tokenizer: expected 32 hex digits or none, got {tokenizer!r:.60}"
            )
        self.tokenizer = tokenizer
        found = hashlib.blake2b(tokenizer.encode(), digest_size=16)
        for name, table in {"row": row, "store": store, "tokens": tokens}.items():
            given, shape, dtype = np.asarray(table), SHAPES[name], DTYPES[name]
            least, most = RANGES[name]
            if given.shape != shape or given.dtype.kind not in "iu":
                raise ValueError(
                    f"Costs: {name}: expected integers of shape {list(shape)}, got {given.dtype} "
                    f"of shape {list(given.shape)}"
                )
            if given.min() < least or given.max() > most:
                raise ValueError(
                    f"Costs: {name}: expected {least} to {most}, got {given.min()} to {given.max()}"
                )
            kept = given.astype(dtype)
            kept.flags.writeable = False
            found.update(kept.astype("<i2").tobytes())
            setattr(self, name, kept)
        self.digest = found.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Costs) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Costs({self.digest})"

    @classmethod
    def of(cls, given: Costs | str | PathLike[str]) -> Costs:
        """Costs as they are, or from their file."""
        return given if isinstance(given, Costs) else cls.load(given)

    @classmethod
    def load(cls, path: str | PathLike[str], tokenizer: str | None = None) -> Costs:
        """Reads a file.

        Args:
            tokenizer: the digest of the vocabulary in use; None: not checked.

        Raises:
            ValueError: the file cannot be read, is no such file or a damaged one, or is for another
                tokenizer.
        """
        says = f"Costs: {Path(path)}"
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{says}: cannot be read: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{says}: expected a file of Costs.save, got another one")
        if found.get("version") != VERSION:
            raise ValueError(f"{says}: expected version {VERSION}, got {found.get('version')!r}")
        try:
            tables = {name: np.array(found[name]) for name in SHAPES}
            loaded = cls(**tables, tokenizer=found["tokenizer"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{says}: damaged: {error}") from error
        if found.get("digest") != loaded.digest:
            raise ValueError(f"{says}: damaged: the numbers are not those that were saved")
        if tokenizer is not None and tokenizer != loaded.tokenizer:
            raise ValueError(
                f"{says}: expected costs for tokenizer {tokenizer}, got those for "
                f"{loaded.tokenizer or 'one that is not named'}"
            )
        return loaded

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a file of about 45 KB, completely or not at all.

        Raises:
            ngram_npu.replay.ReplayError: it cannot be written.
        """
        from ngram_npu.replay.output import atomic_output, check_writable

        head = {"format": FORMAT, "version": VERSION, "tokenizer": self.tokenizer}
        tables = {name: getattr(self, name).tolist() for name in SHAPES}
        check_writable(Path(path))
        with atomic_output(Path(path)) as scratch:
            text = json.dumps({**head, "digest": self.digest, **tables}, separators=(",", ":"))
            scratch.write_text(text + "\n", encoding="utf-8")

    def of_row(
        self, match: IntArray, column: IntArray, token: IntArray, before: IntArray
    ) -> IntArray:
        """What tokens from a row cost: arrays of one shape, of which the first two name a cell."""
        logits = self.row[match, column].astype(np.int64)
        logits += self.tokens[token % CLASSES, 0]
        logits += self.tokens[before % CLASSES, 1]
        return costs_of(logits)


def costs_of(logits: IntArray) -> IntArray:
    """Logits in 32nds of a nat as costs in sixteenths of a bit."""
    nats = np.asarray(logits) / UNIT
    costs: IntArray = np.minimum(255, np.rint(16 * np.log2(1 + np.exp(-nats)))).astype(np.int64)
    return costs


def logits_of(costs: npt.ArrayLike) -> FloatArray:
    """Costs as logits, in nats. A cost of 0 stands for the lower half of its range."""
    rate = 2.0 ** (-np.maximum(np.asarray(costs, np.float64), 0.25) / 16)
    logits: FloatArray = np.log(rate / (1 - rate))
    return logits


@dataclass(frozen=True)
class Comparison:
    """What fitted costs bring on conversations that they were not fitted on, without a store."""

    conversations: int
    """Measured on."""
    shipped: float
    """Tokens per step with the package's costs."""
    fitted: float
    """The same with the fitted ones, where they draft as many tokens per step."""

    @property
    def gain(self) -> float:
        return self.fitted / self.shipped

    @property
    def wins(self) -> bool:
        """Whether fitted costs are recommended."""
        return self.gain > 1


def compare(conversations: Sequence[TokenRequest], k: int = 8, limit: int = 40) -> Comparison:
    """Fits on every second conversation and measures on the others.

    Args:
        k: draft tokens per step, at most 16.
        limit: the shipped costs' limit, which says how much is drafted.

    Raises:
        ngram_npu.replay.ReplayError: too few conversations, or none with a completion.
    """
    from ngram_npu.config import default_costs
    from ngram_npu.replay.errors import ReplayError
    from ngram_npu.replay.walks import at_equal_drafts, walks

    used = [request for request in conversations if request.spans()]
    if len(used) < 2:
        raise ReplayError("costs: expected two conversations with completions or more, got fewer")
    fitted, measured = fit(used[::2]), list(_newest(used[1::2]))
    found = walks(measured)
    shipped = found.replay(found.lengths(default_costs().astype(np.int64), limit, k))
    curve = [found.replay(found.lengths(fitted.of_row, at, k)) for at in (*range(0, 160, 2), 4080)]
    if shipped.drafted in (curve[0].drafted, curve[-1].drafted):  # nothing to choose from
        return Comparison(len(measured), shipped.tokens_per_step, shipped.tokens_per_step)
    tokens, _ = at_equal_drafts(curve, shipped.drafted_per_step)
    return Comparison(len(measured), shipped.tokens_per_step, tokens)


def fit(conversations: Sequence[TokenRequest], tokenizer: str = "") -> Costs:
    """Costs fitted on conversations, oldest first: all drafts of a ladder and of a store at every
    place of every completion, up to their first wrong token.

    A logit is the sum of a table's cell and of two tokens' logits. Each is as likely as possible,
    where cells are drawn to the shipped costs and tokens to 0. The same conversations give the same
    costs.

    Args:
        conversations: if they have more than ``MOST_TOKENS`` tokens, the newest of them.
        tokenizer: 32 hex digits (``ngram_npu.tokenizer_digest.digest_of``).
    """
    from ngram_npu.config import default_costs, default_store_costs

    places, right = observed(list(_newest(conversations)))
    shipped = np.concatenate([default_costs().ravel(), default_store_costs().ravel()])
    cells, *tokens = _likeliest(places, right, logits_of(shipped))
    row, store = np.split(_whole(cells, "row"), [default_costs().size])
    pair = np.stack([_whole(of, "tokens") for of in tokens], axis=1)
    return Costs(row.reshape(SHAPES["row"]), store.reshape(SHAPES["store"]), pair, tokenizer)


def _newest(conversations: Sequence[TokenRequest]) -> Iterator[TokenRequest]:
    left, first = MOST_TOKENS, len(conversations)
    while first > 0 and left > 0:
        first -= 1
        left -= sum(end - start for start, end in conversations[first].spans())
    return iter(conversations[first:])


def observed(conversations: Sequence[TokenRequest]) -> tuple[list[IntArray], FloatArray]:
    """Of each draft token that was reached its cell (those of the store's table behind the row's),
    its class and that of the token before it; and whether it was right."""
    from ngram_npu.replay.walks import record, walks
    from ngram_npu.store import NgramStore

    tokens = sum(request.num_tokens for request in conversations)
    store = NgramStore(1, max(4096, 2 * tokens))
    found: list[tuple[IntArray, ...]] = [(np.empty(0, np.int64),) * 4]
    for request in conversations:
        found.append(_flat(walks([request]), 0, SHAPES["row"][1]))
        drafts = record([request], store)
        found.append(_flat(drafts, SHAPES["row"][0] * SHAPES["row"][1], SHAPES["store"][1]))
    *places, right = (np.concatenate(list(of)) for of in zip(*found, strict=True))
    return places, right.astype(np.float64)


def _flat(found: Walks, first: int, columns: int) -> tuple[IntArray, ...]:
    met = found.reached()
    return (
        first + found.match[met] * columns + found.column[met],
        (found.token[met] % CLASSES).astype(np.int16),
        (found.before[met] % CLASSES).astype(np.int16),
        found.accepted()[met],
    )


def _likeliest(
    places: Sequence[IntArray], right: FloatArray, start: FloatArray
) -> list[FloatArray]:
    """Newton's steps, one table after the other, each entry of a table by itself."""
    tables = [start.copy(), np.zeros(CLASSES), np.zeros(CLASSES)]
    strengths = STRENGTH["cells"], STRENGTH["tokens"], STRENGTH["tokens"]
    logits = start[places[0]]
    for _ in range(ROUNDS):
        for table, at, strength, centre in zip(
            tables, places, strengths, (start, 0.0, 0.0), strict=True
        ):
            rate = 1 / (1 + np.exp(-logits))
            pull = np.bincount(at, right - rate, len(table)) - strength * (table - centre)
            curvature = np.bincount(at, rate * (1 - rate), len(table)) + strength
            step = np.clip(pull / curvature, -1, 1)
            table += step
            logits += step[at]
    return tables


def _whole(nats: FloatArray, table: str) -> IntArray:
    found: IntArray = np.clip(np.rint(nats * UNIT), *RANGES[table]).astype(np.int64)
    return found
