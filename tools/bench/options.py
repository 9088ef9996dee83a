"""Defines and validates the options of a benchmark run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngram_npu.config import LADDER_MAX_N, default_costs

CACHE_STATES = {"hot": 0, "l2-cold": 4 << 20, "dram-cold": 256 << 20}
"""By cache state: the bytes of other memory that are read before each timed step."""

DATA_KINDS = ("text", "zipf", "random", "periodic", "nomatch")
DEVICES = ("cpu", "cuda", "npu")
FRONTENDS = ("numpy", "torch")
MATCH_POLICY_CODES = {"earliest": 0, "latest": 1}

VARIANT_OPTIONS = (
    *("threads", "frontend", "match_policy", "engine", "min_n", "max_n", "k"),
    *("ngram_sizes", "min_draft_probability"),
)
"""Options that a peer ``ours:key=value`` may change. The key ``sizes`` sets ``ngram_sizes``."""


class BenchError(Exception):
    """An error of the user, such as a wrong option or missing data."""


class UnavailableError(Exception):
    """A peer cannot run on this machine or with these options; the message states why."""


@dataclass(frozen=True)
class Size:
    """Number of requests in the batch, and number of tokens per request before the first step."""

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
        sizes: Sizes to measure (default: those of the op).
        peers: Names of the op's peers, or ``ours:key=value,...`` (default: those of the op).
        engine: One of the op's engines (default: the first).
        threads: Maximum number of our threads; peers keep their own defaults.
        steps: Timed steps per round and implementation; 0: the number depends on their duration.
        ngram_sizes: "consecutive" or "ladder". A ladder needs the index on the CPU, and has its own
            min_n, max_n, match_policy and overlap.
        min_draft_probability: As in `NgramConfig`. A value above 0 implies a ladder.
        data: Folder or file of recorded conversations (default: see `load_corpus`).
        device: "cpu" or the device on which the operators run. On a device, the operators are
            called from torch, and ``threads`` has no effect.
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
        if self.device != "cpu" and self.cache != "hot":
            raise BenchError(f"cache: expected hot with --device {self.device}, got {self.cache}")
        for name, choices in (
            ("match_policy", MATCH_POLICY_CODES),
            ("cache", CACHE_STATES),
            ("frontend", FRONTENDS),
            ("ngram_sizes", ("consecutive", "ladder")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise BenchError(f"{name}: expected one of {', '.join(choices)}, got {value}")

    @property
    def is_ladder(self) -> bool:
        return self.ngram_sizes == "ladder" or self.min_draft_probability > 0

    @property
    def lookup(self) -> dict[str, Any]:
        """Arguments of every lookup by name, in the order of the operators' schemas."""
        return {
            "min_n": 1 if self.is_ladder else self.min_n,
            "max_n": LADDER_MAX_N if self.is_ladder else self.max_n,
            "k": self.k,
            "match_policy": 1 if self.is_ladder else MATCH_POLICY_CODES[self.match_policy],
            "overlap": self.is_ladder,
        }

    @property
    def ladder(self) -> dict[str, Any]:
        """Further arguments of a lookup with a ladder by name, in the order of the schemas."""
        if not self.is_ladder:
            return {}
        if not self.min_draft_probability:
            return {"ladder": True}
        limit = round(-16 * math.log2(self.min_draft_probability))
        return {"ladder": True, "costs": default_costs(), "cost_limit": limit}

    def apply_changes(self, text: str) -> Options:
        """Returns these options with the changes in ``text``: ``key=value,...``, as in the name of
        a peer ``ours:...``."""
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
                message = f"peer 'ours:{text}': {key}: expected a number, got {value!r}"
                raise BenchError(message) from None
        return replace(self, **changes)  # type: ignore[arg-type]
