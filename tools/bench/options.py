"""A run's options: validated values, no behaviour."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngram_npu.config import LADDER_MAX_N, default_costs

CACHE_STATES = {"hot": 0, "l2-cold": 4 << 20, "dram-cold": 256 << 20}
"""Cache state -> bytes of other memory read between steps, outside the timed part."""

DATA_KINDS = ("text", "zipf", "random", "periodic", "nomatch")
DEVICES = ("cpu", "cuda", "npu")
FRONTENDS = ("numpy", "torch")
NGRAM_SIZES = ("consecutive", "ladder")
MATCH_POLICY_CODES = {"earliest": 0, "latest": 1}

CHANGEABLE = {
    **{
        name: name
        for name in ("threads", "frontend", "match_policy", "engine", "min_n", "max_n", "k")
    },
    "sizes": "ngram_sizes",
    "min_draft_probability": "min_draft_probability",
}
"""The options that a variant of ours may change, and their fields."""

_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20}


class BenchError(Exception):
    """A message for the user: a wrong option, missing data."""


class UnavailableError(Exception):
    """A peer that cannot take part here; the message says why."""


@dataclass(frozen=True)
class Size:
    """Requests in a batch, and the tokens of each before the first step."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """``"128x32k"``; k is 1024 tokens, m 1024 k."""
        found = re.fullmatch(r"(\d+)x(\d+)([km]?)", text.strip().lower())
        if not found:
            raise BenchError(f"size {text!r}: expected BATCHxCONTEXT, for example 128x32k")
        size = cls(int(found[1]), int(found[2]) * _SUFFIXES[found[3]])
        if size.batch < 1 or size.context < 1:
            raise BenchError(f"size {text!r}: batch and context must be at least 1")
        return size

    def __str__(self) -> str:
        for suffix in ("m", "k"):
            if self.context % _SUFFIXES[suffix] == 0:
                return f"{self.batch}x{self.context // _SUFFIXES[suffix]}{suffix}"
        return f"{self.batch}x{self.context}"

    @property
    def tokens(self) -> int:
        return self.batch * self.context


@dataclass(frozen=True)
class Options:
    """One run's settings.

    Attributes:
        sizes: empty: the op's own.
        peers: names of the op's peers, or ``ours:key=value,...``; None: the op's own.
        engine: one of the op's engines; empty: its first.
        min_n, max_n, k, match_policy: the lookup's arguments.
        threads: the most threads that ours may use; the peers keep their own defaults.
        cache: state of the caches before each timed step.
        idle_ms: sleep before each timed step, so that worker threads fall asleep.
        rounds: measured rounds.
        steps: timed steps per round and contestant; 0: chosen by their duration.
        data_kind: contents of the rows.
        ngram_sizes: "consecutive" or "ladder"; a ladder has the index on the CPU only, and its own
            min_n, max_n, match_policy and overlap.
        min_draft_probability: of a ladder, as in `NgramConfig`; above 0 it implies one.
        data: folder or file of recorded conversations; None: the default.
        vllm_path: folder that contains ``vllm/``; None: an installed one.
        device: where the operators run; if not on the CPU, from torch, and ``threads`` and
            ``idle_ms`` have no effect.
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
    idle_ms: float = 0.0
    frontend: str = "numpy"
    rounds: int = 15
    steps: int = 0
    data_kind: str = "text"
    ngram_sizes: str = "consecutive"
    min_draft_probability: float = 0.0
    data: Path | None = None
    vllm_path: Path | None = None
    device: str = "cpu"

    @property
    def lookup(self) -> dict[str, Any]:
        """Keyword arguments of every lookup, in its schema's order."""
        if self.is_ladder:
            low_high = {"min_n": 1, "max_n": LADDER_MAX_N}
            return {**low_high, "k": self.k, "match_policy": 1, "overlap": True}
        return {
            "min_n": self.min_n,
            "max_n": self.max_n,
            "k": self.k,
            "match_policy": MATCH_POLICY_CODES[self.match_policy],
            "overlap": False,
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

    @property
    def is_ladder(self) -> bool:
        return self.ngram_sizes == "ladder" or self.min_draft_probability > 0

    def __post_init__(self) -> None:
        _check("min_n, max_n", 1 <= self.min_n <= self.max_n <= 64, "1 <= min_n <= max_n <= 64")
        _check("k", 1 <= self.k <= 64, "1 to 64")
        _check(
            "match_policy",
            self.match_policy in MATCH_POLICY_CODES,
            f"one of {', '.join(MATCH_POLICY_CODES)}",
        )
        _check("threads", self.threads >= 1, "at least 1")
        _check("cache", self.cache in CACHE_STATES, f"one of {', '.join(CACHE_STATES)}")
        _check("idle", 0 <= self.idle_ms <= 1000, "0 to 1000 ms")
        _check("frontend", self.frontend in FRONTENDS, f"one of {', '.join(FRONTENDS)}")
        _check("device", self.device in DEVICES, f"one of {', '.join(DEVICES)}")
        _check("cache", self.device == "cpu" or self.cache == "hot", "hot on a device")
        _check("rounds", self.rounds >= 1, "at least 1")
        _check("steps", self.steps >= 0, "at least 0")
        _check("sizes", self.ngram_sizes in NGRAM_SIZES, f"one of {', '.join(NGRAM_SIZES)}")
        _check("min_draft_probability", 0 <= self.min_draft_probability <= 1, "0 to 1")
        _check("data-kind", self.data_kind in DATA_KINDS, f"one of {', '.join(DATA_KINDS)}")

    def changed(self, text: str) -> Options:
        """These options with ``key=value,...`` changed, as a variant of ours is named as a peer."""
        changes: dict[str, str | float] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in CHANGEABLE:
                raise BenchError(f"peer 'ours:{text}': {key!r} cannot be changed")
            field = CHANGEABLE[key]
            try:
                changes[field] = type(getattr(self, field))(value)
            except ValueError:
                raise BenchError(f"peer 'ours:{text}': {key}: expected a number") from None
        return replace(self, **changes)  # type: ignore[arg-type]


def _check(name: str, valid: bool, expected: str) -> None:
    if not valid:
        raise BenchError(f"{name}: expected {expected}")
