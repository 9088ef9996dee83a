"""Contains logits of draft tokens that are fitted on traffic and bound to a tokenizer, and their
file. The operators compute the cost of a draft token from its logits."""

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
"""Shapes: match length x outcome of earlier drafts (from a row or a store), and
class of token x (drafted token, token before it)."""
DTYPES = {"row": np.int16, "store": np.int16, "tokens": np.int8}
RANGES = {"row": (-768, 769), "store": (-768, 769), "tokens": (-128, 127)}
"""Ranges of the values. The sum of a cell and two tokens' logits is in the range of kLogitCosts
(csrc/core/draft_costs.h), -1024 to 1023."""
UNITS_PER_NAT = 32
"""Number of logit units per nat."""
TOKEN_CLASSES = SHAPES["tokens"][0]
"""Number of rows of `tokens`. A token's row is its id modulo this number."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[Any]


class Costs:
    """Immutable logits of draft tokens, in 32nds of a nat (docs/ops/ngram_index_propose.md, "Token
    logits").

    Attributes:
        row: [16, 32] int16, logits of tokens from a request's own row.
        store: [16, 56] int16, logits of tokens from a store.
        tokens: [4096, 2] int8, logits added for the drafted token and for the token before it.
        tokenizer: digest of the vocabulary, 32 hex digits; empty: unknown.
        digest: 32 hex digits that identify these costs.

    Raises:
        ValueError: a table has another shape or values out of range, or ``tokenizer`` is no digest.
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
        digest = hashlib.blake2b(tokenizer.encode(), digest_size=16)
        for name, values in {"row": row, "store": store, "tokens": tokens}.items():
            array, shape = np.asarray(values), SHAPES[name]
            low, high = RANGES[name]
            if array.shape != shape or array.dtype.kind not in "iu":
                raise ValueError(
                    f"Costs: {name}: expected integers of shape {list(shape)}, got {array.dtype} "
                    f"of shape {list(array.shape)}"
                )
            if array.min() < low or array.max() > high:
                raise ValueError(
                    f"Costs: {name}: expected {low} to {high}, got {array.min()} to {array.max()}"
                )
            table = array.astype(DTYPES[name])
            table.flags.writeable = False
            digest.update(table.astype("<i2").tobytes())
            setattr(self, name, table)
        self.digest = digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Costs) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Costs({self.digest})"

    @classmethod
    def load(cls, path: str | PathLike[str], tokenizer: str | None = None) -> Costs:
        """Loads costs from a file.

        Args:
            path: a file that :meth:`save` wrote.
            tokenizer: the digest of the vocabulary in use; None: not checked.

        Raises:
            ValueError: the file cannot be read, has another format or is damaged, or its costs are
                for another tokenizer.
        """
        prefix = f"Costs: {Path(path)}"
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{prefix}: cannot be read: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{prefix}: expected a file written by Costs.save")
        if content.get("version") != VERSION:
            got = content.get("version")
            raise ValueError(f"{prefix}: expected version {VERSION}, got {got!r}")
        try:
            tables = {name: np.array(content[name]) for name in SHAPES}
            costs = cls(**tables, tokenizer=content["tokenizer"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{prefix}: damaged: {error}") from error
        if content.get("digest") != costs.digest:
            raise ValueError(f"{prefix}: damaged: the numbers do not match the digest")
        if tokenizer is not None and tokenizer != costs.tokenizer:
            raise ValueError(
                f"{prefix}: expected costs for tokenizer {tokenizer}, got costs for "
                f"{costs.tokenizer or 'an unknown tokenizer'}"
            )
        return costs

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the costs to a file of about 45 KB, completely or not at all.

        Raises:
            ngram_npu.errors.InputError: the file cannot be written.
        """
        header = {"format": FORMAT, "version": VERSION, "tokenizer": self.tokenizer}
        tables = {name: getattr(self, name).tolist() for name in SHAPES}
        check_writable(Path(path))
        with atomic_output(Path(path)) as scratch:
            text = json.dumps({**header, "digest": self.digest, **tables}, separators=(",", ":"))
            scratch.write_text(text + "\n", encoding="utf-8")


def costs_to_logits(costs: npt.ArrayLike) -> FloatArray:
    """Converts operators' costs, in sixteenths of a bit, to logits in nats. A cost of 0 would have
    an infinite logit, so costs below 0.25 are replaced by 0.25."""
    probability = 2.0 ** (-np.maximum(np.asarray(costs, np.float64), 0.25) / 16)
    logits: FloatArray = np.log(probability / (1 - probability))
    return logits
