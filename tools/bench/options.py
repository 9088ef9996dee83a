"""The options of a run, validated."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngram_npu.config import LADDER_MAX_N, default_costs

CACHE_STATES = {"hot": 0, "l2-cold": 4 << 20, "dram-cold": 256 << 20}
"""Bytes of other memory that are read between steps, outside the timed part."""

DATA_KINDS = ("text", "zipf", "random", "periodic", "nomatch")
DEVICES = ("cpu", "cuda", "npu")
FRONTENDS = ("numpy", "torch")
MATCH_POLICY_CODES = {"earliest": 0, "latest": 1}

VARIANT_OPTIONS = (
    *("threads", "frontend", "match_policy", "engine", "min_n", "max_n", "k"),
    *("ngram_sizes", "min_draft_probability"),
)
"""Options that a peer ``ours:key=value`` may change; ``sizes`` sets ``ngram_sizes``."""


class BenchError(Exception):
    """A message for the user, such as a wrong option or missing data."""


class UnavailableError(Exception):
    """A peer that cannot take part here; the message is the reason."""


@dataclass(frozen=True)
class Size:
    """Number of requests in a batch, and of each request's tokens before the first step."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Reads ``"128x32k"``; k is 1024 tokens."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(k?)", text)
        if not match:
            raise BenchError(f"size {text!r}: expected BATCHxCONTEXT, for example 128x32k")
        return cls(int(match[1]), int(match[2]) * (1024 if match[3] else 1))

    def __str__(self) -> str:
        is_round = self.context % 1024 == 0
        return f"{self.batch}x{f'{self.context // 1024}k' if is_round else self.context}"


@dataclass(frozen=True)
class Options:
    """The settings of a run.

    Attributes:
        sizes: Empty: the op's defaults.
        peers: Names of the op's peers, or ``ours:key=value,...``; None: the op's defaults.
        engine: One of the op's engines; empty: its first.
        threads: Maximum number of our threads; peers keep their own defaults.
        steps: Timed steps per round and contestant; 0: chosen by their duration.
        ngram_sizes: "consecutive" or "ladder". A ladder needs the index on the CPU, and has its own
            min_n, max_n, match_policy and overlap.
        min_draft_probability: As in `NgramConfig`; above 0 it implies a ladder.
        data: Folder or file of recorded conversations; None: the default.
        device: Where the operators run. On a device they are called from torch, and ``threads`` has
            no effect.
    """

    sizes: tuple[Size, ...] = ()
    peers: tuple[str, ...] | None = None
    engine: str = ""
    min_n: int = 2
    max_n: int = 4
    k: int = 4
    match_policy: str = "earliest"
    threads: int = 1
    cache: str = "hot"
    frontend: str = "numpy"
    rounds: int = 15
    steps: int = 0
    data_kind: str = "text"
    ngram_sizes: str = "consecutive"
    min_draft_probability: float = 0.0
    data: Path | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        _check("cache", self.device == "cpu" or self.cache == "hot", "hot on a device")
        for name, choices in (
            ("match_policy", MATCH_POLICY_CODES),
            ("cache", CACHE_STATES),
            ("frontend", FRONTENDS),
            ("ngram_sizes", ("consecutive", "ladder")),
        ):
            _check(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")

    @property
    def is_ladder(self) -> bool:
        return self.ngram_sizes == "ladder" or self.min_draft_probability > 0

    @property
    def lookup(self) -> dict[str, Any]:
        """Keyword arguments of every lookup, in its schema's order."""
        return {
            "min_n": 1 if self.is_ladder else self.min_n,
            "max_n": LADDER_MAX_N if self.is_ladder else self.max_n,
            "k": self.k,
            "match_policy": 1 if self.is_ladder else MATCH_POLICY_CODES[self.match_policy],
            "overlap": self.is_ladder,
        }

    @property
    def ladder(self) -> dict[str, Any]:
        """Further keyword arguments of a lookup from a ladder, in its schema's order."""
        if not self.is_ladder:
            return {}
        if not self.min_draft_probability:
            return {"ladder": True}
        limit = round(-16 * math.log2(self.min_draft_probability))
        return {"ladder": True, "costs": default_costs(), "cost_limit": limit}

    def changed(self, text: str) -> Options:
        """Returns these options with ``key=value,...`` changed, as a peer ``ours:...`` names
        them."""
        changes: dict[str, str | float] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            field = "ngram_sizes" if key == "sizes" else key
            if field not in VARIANT_OPTIONS:
                known = ", ".join(VARIANT_OPTIONS)
                raise BenchError(f"peer 'ours:{text}': expected one of {known}, got {key!r}")
            try:
                changes[field] = type(getattr(self, field))(value)
            except ValueError:
                raise BenchError(f"peer 'ours:{text}': {key}: expected a number") from None
        return replace(self, **changes)  # type: ignore[arg-type]


def _check(name: str, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise BenchError(f"{name}: expected {expected}")
