"""Contains NgramConfig, the validated and immutable settings of lookup and drafts."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal

import ngram_npu._C as _C

CONTRACT_VERSION = 12
"""Version of the operators' contract (docs/ops). CHANGELOG.md lists the changes."""

MAX_NGRAM = _C.MAX_NGRAM
MAX_DRAFT_TOKENS = _C.MAX_DRAFT_TOKENS
UNLIMITED = 2**63 - 1
"""Value of the operators' ``max_len`` for no limit."""
ANY_TOKEN = 2**31 - 1
"""The operators' default ``vocab_size``: ids from 0 to 2**31 - 2 are valid."""
MATCH_POLICY_CODES = {"earliest": 0, "latest": 1}


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """Lookup and draft settings of a proposer. The defaults are the recommended settings. vLLM's
    ``ngram`` method has ``min_n=2, max_n=5, match_policy="earliest", overlap=False``.

    Attributes:
        min_n: shortest suffix to look up, in tokens, 1 to ``max_n``.
        max_n: longest suffix to look up, up to 64.
        k: draft tokens per request and step, 1 to 64.
        match_policy: which of several longest occurrences to follow, ``"latest"`` or
            ``"earliest"``.
        overlap: whether a draft that reaches the row's end continues with its own first tokens.
        max_len: maximum length of a row with its draft (vLLM's ``max_model_len``); None: no limit.
        vocab_size: only ids below this number are drafted, and sampled ids must be below it; None:
            below 2**31 - 1. Pass the size of the model's vocabulary.
        min_draft_probability: in (0, 1]: a draft ends where the probability that all of it is
            accepted would fall below this value (:mod:`ngram_npu.draft_costs`). Use about 2.3 times
            the time that one more verified token takes, as a share of a step: 0.12 for 5 %. None:
            drafts end only with the text that they follow.

    Raises:
        ValueError: a value is out of range; the message names the field.
        TypeError: a value has the wrong type.
    """

    min_n: int = 1
    max_n: int = 16
    k: int = 5
    match_policy: Literal["earliest", "latest"] = "latest"
    overlap: bool = True
    max_len: int | None = None
    vocab_size: int | None = None
    min_draft_probability: float | None = None

    def __post_init__(self) -> None:
        for name in ("min_n", "max_n", "k", "max_len", "vocab_size"):
            value = getattr(self, name)
            if value is None and name in ("max_len", "vocab_size"):
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"NgramConfig: {name}: expected int, got {value!r}")
            object.__setattr__(self, name, operator.index(value))
        if not isinstance(self.overlap, bool):
            raise TypeError(f"NgramConfig: overlap: expected bool, got {self.overlap!r}")
        ranges = {
            "max_n": (1, MAX_NGRAM),
            "min_n": (1, self.max_n),
            "k": (1, MAX_DRAFT_TOKENS),
            "max_len": (0, UNLIMITED),
            "vocab_size": (0, UNLIMITED),
        }
        for name, (lowest, highest) in ranges.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise ValueError(
                    f"NgramConfig: {name}: expected {lowest} to {highest}, got {value}"
                )
        if self.match_policy not in MATCH_POLICY_CODES:
            raise ValueError(
                "NgramConfig: match_policy: expected 'earliest' or 'latest', got "
                f"{self.match_policy!r}"
            )
        self._check_probability()

    def _check_probability(self) -> None:
        probability = self.min_draft_probability
        if probability is None:
            return
        if isinstance(probability, bool) or not isinstance(probability, (int, float)):
            raise TypeError(
                f"NgramConfig: min_draft_probability: expected float, got {probability!r}"
            )
        if not 0 < probability <= 1:
            raise ValueError(
                "NgramConfig: min_draft_probability: expected above 0, at most 1, got "
                f"{probability}"
            )

    @property
    def cost_limit(self) -> int | None:
        """``min_draft_probability`` as a cost, in sixteenths of a bit."""
        probability = self.min_draft_probability
        return None if probability is None else round(-16 * math.log2(probability))

    @property
    def match_policy_code(self) -> int:
        """The operators' ``match_policy``."""
        return MATCH_POLICY_CODES[self.match_policy]

    @property
    def lookup_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a lookup operator. Defaults are omitted, because each passed
        argument takes time."""
        arguments: dict[str, Any] = {"min_n": self.min_n, "max_n": self.max_n, "k": self.k}
        if self.match_policy_code:
            arguments["match_policy"] = self.match_policy_code
        if self.overlap:
            arguments["overlap"] = True
        return arguments | self.limit_arguments

    @property
    def limit_arguments(self) -> dict[str, Any]:
        """Keyword arguments of lookup operators and ``store_propose_`` that bound the drafts."""
        limits = {"max_len": self.max_len, "vocab_size": self.vocab_size}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def vocab_size_or_unlimited(self) -> int:
        return ANY_TOKEN if self.vocab_size is None else self.vocab_size
