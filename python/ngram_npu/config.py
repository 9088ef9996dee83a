"""What to look for and how much to draft: one validated, immutable object."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

from ngram_npu import _C

MAX_NGRAM = _C.MAX_NGRAM
MAX_DRAFT_TOKENS = _C.MAX_DRAFT_TOKENS
MAX_INDEX_SPAN = _C.MAX_INDEX_SPAN

SHORT_ROW = 2048
"""Up to this row capacity (tokens) a scan is about as fast as the index, which ``auto`` then does
not use: tools/bench/results/crossover.json."""
SHORT_CONTEXT = 8192
"""The same for vLLM's ``max_model_len``, where finding a row's slot costs as well:
tools/bench/results/vllm-propose.json."""
UNLIMITED = 2**63 - 1
"""The operators' ``max_len`` without a limit."""
ANY_TOKEN = 2**31 - 1
"""The operators' ``vocab_size`` by default: ids from 0 to 2**31 - 2 are valid."""

MATCH_POLICY_CODES = {"earliest": 0, "latest": 1}


@dataclass(frozen=True, init=False)
class NgramConfig:
    """How a proposer looks up and drafts.

    Attributes:
        min_n: shortest suffix (in tokens) whose earlier occurrence is worth a draft, to ``max_n``.
        max_n: longest suffix looked for, up to 64.
        k: draft tokens per request and step, 1 to 64.
        match_policy: which of several longest occurrences to follow, ``"earliest"`` (vLLM's
            ``ngram``) or ``"latest"`` (vLLM's V2 runner).
        overlap: whether a draft that reaches the row's end continues into itself.
        max_len: no request drafts past this many tokens (vLLM's ``max_model_len``); None: no limit.
        vocab_size: sampled ids at or above it are invalid; None: ids up to 2**31 - 2 are valid.

    vLLM's names ``prompt_lookup_min``, ``prompt_lookup_max`` and ``num_speculative_tokens`` are
    accepted for ``min_n``, ``max_n`` and ``k``; of the two bounds, one that is missing is then the
    other, as in vLLM. Otherwise the defaults are 2 (or ``max_n``, if less), 5, and 5.

    Raises:
        ValueError: a value out of its range, or given under both its names; the message names it.
        TypeError: a value of the wrong type.
    """

    min_n: int
    max_n: int
    k: int
    match_policy: Literal["earliest", "latest"]
    overlap: bool
    max_len: int | None
    vocab_size: int | None

    def __init__(
        self,
        *,
        min_n: int | None = None,
        max_n: int | None = None,
        k: int | None = None,
        match_policy: Literal["earliest", "latest"] = "earliest",
        overlap: bool = False,
        max_len: int | None = None,
        vocab_size: int | None = None,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        low = _one_of("min_n", min_n, "prompt_lookup_min", prompt_lookup_min)
        high = _one_of("max_n", max_n, "prompt_lookup_max", prompt_lookup_max)
        draft = _one_of("k", k, "num_speculative_tokens", num_speculative_tokens)
        if prompt_lookup_min is not None or prompt_lookup_max is not None:
            low, high = (high if low is None else low), (low if high is None else high)
        high = 5 if high is None else high
        values = {
            "min_n": min(2, high) if low is None and hasattr(high, "__index__") else low,
            "max_n": high,
            "k": 5 if draft is None else draft,
            "match_policy": match_policy,
            "overlap": overlap,
            "max_len": max_len,
            "vocab_size": vocab_size,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._validate()

    def _validate(self) -> None:
        for name in ("min_n", "max_n", "k", "max_len", "vocab_size"):
            value = getattr(self, name)
            if value is None and name in ("max_len", "vocab_size"):
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"NgramConfig: {name}: expected int, got {value!r}")
            object.__setattr__(self, name, operator.index(value))
        if not isinstance(self.overlap, bool):
            raise TypeError(f"NgramConfig: overlap: expected bool, got {self.overlap!r}")
        _check_range("max_n", self.max_n, 1, MAX_NGRAM)
        _check_range("min_n", self.min_n, 1, self.max_n)
        _check_range("k", self.k, 1, MAX_DRAFT_TOKENS)
        if self.match_policy not in MATCH_POLICY_CODES:
            raise ValueError(
                "NgramConfig: match_policy: expected 'earliest' or 'latest', "
                f"got {self.match_policy!r}"
            )
        for name in ("max_len", "vocab_size"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 0, UNLIMITED)

    @property
    def match_policy_code(self) -> int:
        """``match_policy`` as the operators take it."""
        return MATCH_POLICY_CODES[self.match_policy]

    @property
    def fits_index(self) -> bool:
        """Whether an index holds n-grams of all the lengths asked for."""
        return self.max_n - self.min_n < MAX_INDEX_SPAN

    @property
    def lookup_arguments(self) -> dict[str, Any]:
        """What every lookup operator takes by keyword. Those that have their default are left out:
        each one passed takes time."""
        arguments: dict[str, Any] = {"min_n": self.min_n, "max_n": self.max_n, "k": self.k}
        if self.match_policy_code:
            arguments["match_policy"] = self.match_policy_code
        if self.overlap:
            arguments["overlap"] = True
        if self.max_len is not None:
            arguments["max_len"] = self.max_len
        return arguments

    @property
    def max_len_or_unlimited(self) -> int:
        return UNLIMITED if self.max_len is None else self.max_len

    @property
    def vocab_size_or_unlimited(self) -> int:
        return ANY_TOKEN if self.vocab_size is None else self.vocab_size


def _one_of(name: str, value: int | None, alias: str, aliased: int | None) -> int | None:
    if value is not None and aliased is not None:
        raise ValueError(f"NgramConfig: {name} is given twice, once as {alias}")
    return aliased if value is None else value


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"NgramConfig: {name}: expected {low} to {high}, got {value}")
