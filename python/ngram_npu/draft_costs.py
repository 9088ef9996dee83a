"""Tables of what draft tokens cost, and their file, bound to a tokenizer: for the configuration."""

from __future__ import annotations

import hashlib
import json
import re
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngram_npu.output import atomic_output, check_writable

FORMAT = "ngram-npu costs"
VERSION = 1
SHAPES = {"row": (16, 32), "store": (16, 56), "tokens": (4096, 2)}
DTYPES = {"row": np.int16, "store": np.int16, "tokens": np.int8}
RANGES = {"row": (-768, 769), "store": (-768, 769), "tokens": (-128, 127)}
"""No sum of a cell and two tokens' logits wraps."""
UNIT = 32
"""Of a logit, per nat."""
CLASSES = SHAPES["tokens"][0]

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
            ngram_npu_cli.replay.InputError: it cannot be written.
        """
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
