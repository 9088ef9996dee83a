"""Lookup and draft settings: one validated, immutable object."""

from __future__ import annotations

import functools
import json
import math
import operator
from dataclasses import dataclass
from importlib import resources
from os import PathLike
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu.draft_costs import Costs

CONTRACT_VERSION = 9
"""The version of the operators' contract (docs/ops); docs/design/contract.md says what changed."""

MAX_NGRAM = _C.MAX_NGRAM
MAX_DRAFT_TOKENS = _C.MAX_DRAFT_TOKENS
MAX_INDEX_SPAN = _C.MAX_INDEX_SPAN

INDEX_POLICY = _C.IndexPolicy()
"""Decides when an index is used and how fast it catches up: csrc/cpu/index_policy.h. Measured in
tools/bench/results/ngram_index_step_-curve.json and vllm-propose.json."""
UNLIMITED = 2**63 - 1
"""The operators' ``max_len`` without a limit."""
ANY_TOKEN = 2**31 - 1
"""The operators' ``vocab_size`` by default: ids from 0 to 2**31 - 2 are valid."""

MATCH_POLICY_CODES = {"earliest": 0, "latest": 1}

LADDER_MAX_N = 16

STORES = ("live", "finish")
STORE_TOKENS = 1_000_000

_COST_COLUMNS = {"costs": 32, "store_costs": 56}


@functools.cache
def _packaged_costs() -> Any:
    text = resources.files("ngram_npu").joinpath("costs.json").read_text(encoding="utf-8")
    return json.loads(text)


@functools.cache
def default_costs() -> npt.NDArray[np.uint8]:
    """[16, 32], the cost of a draft token in sixteenths of a bit: -16 * log2 of the probability
    that it is accepted, fitted to recorded conversations (``python -m tools.fit_costs``;
    costs.json names them)."""
    return _as_costs(_packaged_costs()["row"], "costs")


@functools.cache
def default_match_costs() -> npt.NDArray[np.uint8]:
    """[16], what draft tokens cost where no more is known than the length of their match, in
    sixteenths of a bit: fitted as the others (match_costs.json)."""
    text = resources.files("ngram_npu").joinpath("match_costs.json").read_text(encoding="utf-8")
    costs = np.array(json.loads(text)["match"], np.uint8)
    costs.flags.writeable = False
    return costs


@functools.cache
def default_store_costs() -> npt.NDArray[np.uint8]:
    """[16, 56], the same for tokens drafted from a store."""
    return _as_costs(_packaged_costs()["store"], "store_costs")


@dataclass(frozen=True, init=False)
class NgramConfig:
    """How a proposer looks up and drafts.

    Attributes:
        min_n: shortest suffix to look up, in tokens, 1 to ``max_n``.
        max_n: longest suffix to look up, up to 64.
        k: draft tokens per request and step, 1 to 64.
        match_policy: which of several longest occurrences to follow, ``"earliest"`` (vLLM's
            ``ngram``) or ``"latest"`` (vLLM's V2 runner).
        overlap: whether a draft that reaches the row's end continues into itself.
        max_len: no request drafts past this many tokens (vLLM's ``max_model_len``); None: no limit.
        vocab_size: sampled ids at or above it are invalid; None: ids up to 2**31 - 2 are valid.
        sizes: ``"consecutive"``, n-grams of min_n to max_n tokens; or ``"ladder"``, of 1, 2, 4, 8
            and 16 tokens, only with an index, so on the CPU. ``min_n`` is then 1, ``max_n`` 16,
            ``match_policy`` latest, and ``overlap`` on unless it is given.
        min_draft_probability: in (0, 1]: a draft ends where the probability that all of it is
            accepted would fall below this value, after k tokens at most. A ladder knows it by
            match and history; a scan of consecutive sizes by the length of the match, and needs
            no index. The best value is about ``c * tokens / (1 + c * drafted)``, where c is the
            cost of verifying one more token in steps; 0.177 suits c = 0.05. None: drafts of k
            tokens.
        costs: :class:`ngram_npu.Costs`, or the path of their file: costs fitted on one's own
            traffic, for tokens from a row and from a store. Or a [16, 32] matrix of 0 to 255: the
            cost of a draft token (docs/ops/ngram_index_propose.md). None: the package's costs.
        store: with a ``min_draft_probability``, whether requests also draft from other requests'
            text: ``"live"`` as soon as it is generated, ``"finish"`` after the request has finished
            (:class:`ngram_npu.NgramStore`). None: only from their own tokens.
        store_tokens: capacity of the store in tokens.
        store_costs: a [16, 56] matrix, as ``costs``, for tokens from the store (docs/ops/
            ngram_store_step.md).

    vLLM's names ``prompt_lookup_min``, ``prompt_lookup_max`` and ``num_speculative_tokens`` are
    accepted for ``min_n``, ``max_n`` and ``k``. If only one of the two ``prompt_lookup`` bounds is
    given, the other is the same, as in vLLM. Otherwise the defaults are 2 (or ``max_n``, if less),
    5, and 5.

    Raises:
        ValueError: a value out of its range, or given under both names; the message names it.
        TypeError: a value of the wrong type.
    """

    min_n: int
    max_n: int
    k: int
    match_policy: Literal["earliest", "latest"]
    overlap: bool
    max_len: int | None
    vocab_size: int | None
    sizes: Literal["consecutive", "ladder"]
    min_draft_probability: float | None
    costs: Costs | tuple[tuple[int, ...], ...] | None
    store: Literal["live", "finish"] | None
    store_tokens: int
    store_costs: tuple[tuple[int, ...], ...] | None

    def __init__(
        self,
        *,
        min_n: int | None = None,
        max_n: int | None = None,
        k: int | None = None,
        match_policy: Literal["earliest", "latest"] | None = None,
        overlap: bool | None = None,
        max_len: int | None = None,
        vocab_size: int | None = None,
        sizes: Literal["consecutive", "ladder"] = "consecutive",
        min_draft_probability: float | None = None,
        costs: Any = None,
        store: Literal["live", "finish"] | None = None,
        store_tokens: int = STORE_TOKENS,
        store_costs: Any = None,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        low = _one_of("min_n", min_n, "prompt_lookup_min", prompt_lookup_min)
        high = _one_of("max_n", max_n, "prompt_lookup_max", prompt_lookup_max)
        draft = _one_of("k", k, "num_speculative_tokens", num_speculative_tokens)
        if prompt_lookup_min is not None or prompt_lookup_max is not None:
            low, high = (high if low is None else low), (low if high is None else high)
        if sizes == "ladder":
            low, high = 1 if low is None else low, LADDER_MAX_N if high is None else high
        high = 5 if high is None else high
        others = ("earliest", False, 5) if sizes != "ladder" else ("latest", True, 8)
        values = {
            "min_n": min(2, high) if low is None and hasattr(high, "__index__") else low,
            "max_n": high,
            "k": others[2] if draft is None else draft,
            "match_policy": others[0] if match_policy is None else match_policy,
            "overlap": others[1] if overlap is None else overlap,
            "max_len": max_len,
            "vocab_size": vocab_size,
            "sizes": sizes,
            "min_draft_probability": min_draft_probability,
            "costs": Costs.of(costs) if _is_fitted(costs) else _as_tuples(costs, "costs"),
            "store": store,
            "store_tokens": store_tokens,
            "store_costs": _as_tuples(store_costs, "store_costs"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._validate()

    def _validate(self) -> None:
        for name in ("min_n", "max_n", "k", "max_len", "vocab_size", "store_tokens"):
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
        if self.sizes not in ("consecutive", "ladder"):
            raise ValueError(
                f"NgramConfig: sizes: expected 'consecutive' or 'ladder', got {self.sizes!r}"
            )
        self._validate_ladder()
        self._validate_store()

    def _validate_ladder(self) -> None:
        expected: dict[str, Any] = {"costs": None}
        if self.is_ladder:
            expected = {"min_n": 1, "max_n": LADDER_MAX_N, "match_policy": "latest"}
        for name, value in expected.items():
            if (got := getattr(self, name)) != value:
                raise ValueError(
                    f"NgramConfig: {name}: expected {value!r} with sizes={self.sizes!r}, "
                    f"got {got!r}"
                )
        least = self.min_draft_probability
        if least is None:
            if self.costs is not None:
                raise ValueError("NgramConfig: costs: expected None without min_draft_probability")
        elif isinstance(least, bool) or not isinstance(least, (int, float)):
            raise TypeError(f"NgramConfig: min_draft_probability: expected float, got {least!r}")
        elif not 0 < least <= 1:
            raise ValueError(
                f"NgramConfig: min_draft_probability: expected above 0, at most 1, got {least}"
            )

    def _validate_store(self) -> None:
        if self.store is not None and self.store not in STORES:
            raise ValueError(
                f"NgramConfig: store: expected 'live', 'finish' or None, got {self.store!r}"
            )
        for name in ("store", "store_costs"):
            without = not self.is_ladder or self.min_draft_probability is None
            if without and getattr(self, name) is not None:
                raise ValueError(
                    f"NgramConfig: {name}: expected None without sizes='ladder' and a "
                    "min_draft_probability"
                )
        if self.store_costs is not None and self._fitted is not None:
            raise ValueError("NgramConfig: store_costs: expected None, as costs has them")
        _check_range("store_tokens", self.store_tokens, 1, UNLIMITED)

    @property
    def is_ladder(self) -> bool:
        return self.sizes == "ladder"

    @property
    def cost_limit(self) -> int | None:
        """``min_draft_probability`` in sixteenths of a bit, as the operators take it."""
        least = self.min_draft_probability
        return None if least is None else round(-16 * math.log2(least))

    @property
    def _fitted(self) -> Costs | None:
        return self.costs if isinstance(self.costs, Costs) else None

    @property
    def token_logits(self) -> npt.NDArray[np.int8] | None:
        """[4096, 2], what tokens say; None: nothing, and tables hold costs instead of logits."""
        return None if self._fitted is None else self._fitted.tokens

    @property
    def cost_table(self) -> npt.NDArray[Any] | None:
        """[16, 32], a ladder's costs in use, or logits; None if drafts have k tokens."""
        if self.min_draft_probability is None or not self.is_ladder:
            return None
        if self._fitted is not None:
            return self._fitted.row
        return default_costs() if self.costs is None else _as_costs(self.costs, "costs")

    @property
    def match_cost_table(self) -> npt.NDArray[np.uint8] | None:
        """[16], the costs in use by the length of the match, for consecutive sizes."""
        if self.min_draft_probability is None or self.is_ladder:
            return None
        return default_match_costs()

    @property
    def store_cost_table(self) -> npt.NDArray[Any] | None:
        """[16, 56], the same for a store's tokens."""
        if self.min_draft_probability is None:
            return None
        if self._fitted is not None:
            return self._fitted.store
        if self.store_costs is None:
            return default_store_costs()
        return _as_costs(self.store_costs, "store_costs")

    @property
    def match_policy_code(self) -> int:
        """``match_policy`` as the operators take it."""
        return MATCH_POLICY_CODES[self.match_policy]

    @property
    def fits_index(self) -> bool:
        """Whether an index can answer: it holds a span of 8 sizes, and costs only of a ladder."""
        if self.is_ladder:
            return True
        return self.max_n - self.min_n < MAX_INDEX_SPAN and self.min_draft_probability is None

    @property
    def lookup_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a lookup operator, without the costs, which are tensors or arrays.
        Defaults are left out, because each argument that is passed takes time."""
        arguments: dict[str, Any] = {"min_n": self.min_n, "max_n": self.max_n, "k": self.k}
        if self.match_policy_code:
            arguments["match_policy"] = self.match_policy_code
        if self.overlap:
            arguments["overlap"] = True
        if self.max_len is not None:
            arguments["max_len"] = self.max_len
        if self.is_ladder:
            arguments["ladder"] = True
        if self.cost_limit is not None:
            arguments["cost_limit"] = self.cost_limit
        return arguments

    @property
    def max_len_or_unlimited(self) -> int:
        return UNLIMITED if self.max_len is None else self.max_len

    @property
    def vocab_size_or_unlimited(self) -> int:
        return ANY_TOKEN if self.vocab_size is None else self.vocab_size


def _as_costs(costs: Any, name: str) -> npt.NDArray[np.uint8]:
    """A table of costs as a read-only array."""
    table, columns = np.array(costs), _COST_COLUMNS[name]
    if (
        table.shape != (16, columns)
        or table.dtype.kind not in "iu"
        or not ((table >= 0) & (table < 256)).all()
    ):
        raise ValueError(
            f"NgramConfig: {name}: expected 16 rows of {columns} integers of 0 to 255, got "
            f"{table.dtype} of shape {list(table.shape)}"
        )
    table = table.astype(np.uint8)
    table.flags.writeable = False
    return table


def _is_fitted(costs: Any) -> bool:
    return isinstance(costs, (Costs, str, PathLike))


def _as_tuples(costs: Any, name: str) -> tuple[tuple[int, ...], ...] | None:
    return None if costs is None else tuple(map(tuple, _as_costs(costs, name).tolist()))


def _one_of(name: str, value: int | None, alias: str, aliased: int | None) -> int | None:
    if value is not None and aliased is not None:
        raise ValueError(f"NgramConfig: {name} is given twice, once as {alias}")
    return aliased if value is None else value


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"NgramConfig: {name}: expected {low} to {high}, got {value}")
