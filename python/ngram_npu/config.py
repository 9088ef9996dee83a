"""Contains NgramConfig, the validated and immutable settings of lookup and drafts."""

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

CONTRACT_VERSION = 12
"""Version of the operators' contract (docs/ops). CHANGELOG.md lists the changes."""

MAX_NGRAM = _C.MAX_NGRAM
MAX_DRAFT_TOKENS = _C.MAX_DRAFT_TOKENS
MAX_INDEX_SPAN = _C.MAX_INDEX_SPAN

INDEX_POLICY = _C.IndexPolicy()
"""Decides when an index is used and how fast it catches up with the rows (csrc/cpu/index_policy.h).
Its constants are from tools/bench/results/ngram_index_step_-curve.json and vllm-propose.json."""
UNLIMITED = 2**63 - 1
"""Value of the operators' ``max_len`` for no limit."""
ANY_TOKEN = 2**31 - 1
"""The operators' default ``vocab_size``: ids from 0 to 2**31 - 2 are valid."""

MATCH_POLICY_CODES = {"earliest": 0, "latest": 1}
LADDER_MAX_N = 16
STORES = ("live", "finish")
STORE_TOKENS = 1_000_000

_COST_COLUMNS = {"costs": 32, "store_costs": 56}


@functools.cache
def _load_packaged_table(file: str, name: str) -> npt.NDArray[np.uint8]:
    """Returns a read-only table of costs from a file of the package. The files state on which
    recorded conversations ``python -m tools.fit_draft_costs`` fitted them."""
    text = resources.files("ngram_npu").joinpath(file).read_text(encoding="utf-8")
    table = np.array(json.loads(text)[name], np.uint8)
    table.flags.writeable = False
    return table


def default_costs() -> npt.NDArray[np.uint8]:
    """Returns [16, 32], the costs of draft tokens from a row in sixteenths of a bit: -16 * log2 of
    the probability that a token is accepted."""
    return _load_packaged_table("costs.json", "row")


def default_match_costs() -> npt.NDArray[np.uint8]:
    """Returns [16], the costs of draft tokens by the length of the match."""
    return _load_packaged_table("match_costs.json", "match")


def default_store_costs() -> npt.NDArray[np.uint8]:
    """Returns [16, 56], the costs of draft tokens from a store."""
    return _load_packaged_table("costs.json", "store")


@dataclass(frozen=True, init=False)
class NgramConfig:
    """Lookup and draft settings of a proposer.

    Attributes:
        min_n: shortest suffix to look up, in tokens, 1 to ``max_n``.
        max_n: longest suffix to look up, up to 64.
        k: draft tokens per request and step, 1 to 64.
        match_policy: which of several longest occurrences to follow, ``"earliest"`` (vLLM's
            ``ngram``) or ``"latest"`` (vLLM's V2 runner).
        overlap: whether a draft that reaches the row's end continues with its own first tokens.
        max_len: maximum length of a row with its draft (vLLM's ``max_model_len``); None: no limit.
        vocab_size: sampled ids must be below this number; None: below 2**31 - 1.
        sizes: ``"consecutive"``: n-grams of min_n to max_n tokens; or ``"ladder"``: n-grams of 1,
            2, 4, 8 and 16 tokens, which need an index and therefore the CPU. With a ladder,
            ``min_n`` is 1, ``max_n`` is 16, ``match_policy`` is latest, and ``overlap`` defaults to
            True.
        min_draft_probability: in (0, 1]: a draft ends where the probability that all of it is
            accepted would fall below this value, and after at most k tokens. A ladder estimates the
            probability from match and history. A scan of consecutive sizes estimates it from the
            length of the match. The best value is about ``c * t / (1 + c * d)``, where c is the
            time to verify one more token as a share of a step, t the generated tokens per step, and
            d the draft tokens per step; 0.177 suits c = 0.05. None: drafts have k tokens.
        costs: the cost of a draft token: :class:`ngram_npu.Costs` that were fitted on your own
            traffic, for tokens from a row and from a store, or the path of a file of such costs; or
            a [16, 32] matrix of 0 to 255 (docs/ops/ngram_index_propose.md). None: the package's
            costs.
        store: with a ``min_draft_probability``, whether requests also draft from other requests'
            text: ``"live"``: as soon as the text is generated; ``"finish"``: after the other
            request has finished (:class:`ngram_npu.NgramStore`). None: only from their own
            tokens.
        store_tokens: capacity of the store in tokens.
        store_costs: a [16, 56] matrix like ``costs``, for tokens from the store
            (docs/ops/ngram_store_step.md).

    Raises:
        ValueError: a value is out of range or contradicts another; the message names the field.
        TypeError: a value has the wrong type.
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
    ) -> None:
        if sizes == "ladder":
            defaults = {"min_n": 1, "max_n": LADDER_MAX_N, "k": 8, "match_policy": "latest"}
        else:
            defaults = {"min_n": 2, "max_n": 5, "k": 5, "match_policy": "earliest"}
            # A max_n of 1 reduces the default min_n. _validate rejects other types than int.
            if hasattr(max_n, "__index__"):
                defaults["min_n"] = min(2, max_n)  # type: ignore[type-var]
        values = {
            "min_n": min_n,
            "max_n": max_n,
            "k": k,
            "match_policy": match_policy,
            "overlap": sizes == "ladder" if overlap is None else overlap,
            "max_len": max_len,
            "vocab_size": vocab_size,
            "sizes": sizes,
            "min_draft_probability": min_draft_probability,
            "costs": _read_costs(costs),
            "store": store,
            "store_tokens": store_tokens,
            "store_costs": _convert_to_tuples(store_costs, "store_costs"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, defaults.get(name) if value is None else value)
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
        ranges = {
            "max_n": (1, MAX_NGRAM),
            "min_n": (1, self.max_n),
            "k": (1, MAX_DRAFT_TOKENS),
            "max_len": (0, UNLIMITED),
            "vocab_size": (0, UNLIMITED),
            "store_tokens": (1, UNLIMITED),
        }
        for name, (lowest, highest) in ranges.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise ValueError(
                    f"NgramConfig: {name}: expected {lowest} to {highest}, got {value}"
                )
        choices: dict[str, tuple[str | None, ...]] = {
            "match_policy": ("earliest", "latest"),
            "sizes": ("consecutive", "ladder"),
            "store": (*STORES, None),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                *others, last = map(repr, allowed)
                raise ValueError(
                    f"NgramConfig: {name}: expected {', '.join(others)} or {last}, got {value!r}"
                )
        required_values: dict[str, Any] = {"costs": None}
        if self.is_ladder:
            required_values = {"min_n": 1, "max_n": LADDER_MAX_N, "match_policy": "latest"}
        for name, value in required_values.items():
            if (got := getattr(self, name)) != value:
                raise ValueError(
                    f"NgramConfig: {name}: expected {value!r} with sizes={self.sizes!r}, "
                    f"got {got!r}"
                )
        self._validate_costs()

    def _validate_costs(self) -> None:
        probability = self.min_draft_probability
        if probability is None:
            if self.costs is not None:
                raise ValueError("NgramConfig: costs: expected None without min_draft_probability")
        elif isinstance(probability, bool) or not isinstance(probability, (int, float)):
            raise TypeError(
                f"NgramConfig: min_draft_probability: expected float, got {probability!r}"
            )
        elif not 0 < probability <= 1:
            raise ValueError(
                "NgramConfig: min_draft_probability: expected above 0, at most 1, got "
                f"{probability}"
            )
        if not self.is_ladder or probability is None:
            for name in ("store", "store_costs"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"NgramConfig: {name}: expected None without sizes='ladder' and a "
                        "min_draft_probability"
                    )
        if self.store_costs is not None and isinstance(self.costs, Costs):
            raise ValueError("NgramConfig: store_costs: expected None, because costs contains them")

    @property
    def is_ladder(self) -> bool:
        return self.sizes == "ladder"

    @property
    def cost_limit(self) -> int | None:
        """The operators' ``cost_limit``: ``min_draft_probability`` in sixteenths of a bit."""
        probability = self.min_draft_probability
        return None if probability is None else round(-16 * math.log2(probability))

    @property
    def token_logits(self) -> npt.NDArray[np.int8] | None:
        """[4096, 2], logits by token. None: the tables contain costs instead of logits."""
        return self.costs.tokens if isinstance(self.costs, Costs) else None

    @property
    def cost_table(self) -> npt.NDArray[Any] | None:
        """[16, 32], a ladder's costs, or logits if :attr:`token_logits` is set. None if drafts have
        k tokens."""
        if self.min_draft_probability is None or not self.is_ladder:
            return None
        if isinstance(self.costs, Costs):
            return self.costs.row
        return default_costs() if self.costs is None else _check_table(self.costs, "costs")

    @property
    def match_cost_table(self) -> npt.NDArray[np.uint8] | None:
        """[16], the costs by length of the match, for consecutive sizes."""
        if self.min_draft_probability is None or self.is_ladder:
            return None
        return default_match_costs()

    @property
    def store_cost_table(self) -> npt.NDArray[Any] | None:
        """[16, 56], costs or logits of tokens from a store."""
        if self.min_draft_probability is None:
            return None
        if isinstance(self.costs, Costs):
            return self.costs.store
        if self.store_costs is None:
            return default_store_costs()
        return _check_table(self.store_costs, "store_costs")

    @property
    def match_policy_code(self) -> int:
        """The operators' ``match_policy``."""
        return MATCH_POLICY_CODES[self.match_policy]

    @property
    def fits_index(self) -> bool:
        """Whether an index can be used: for up to 8 sizes of n-grams, with costs only for a
        ladder."""
        if self.is_ladder:
            return True
        return self.max_n - self.min_n < MAX_INDEX_SPAN and self.min_draft_probability is None

    @property
    def lookup_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a lookup operator, without the costs, which are tensors or arrays.
        Defaults are omitted, because each passed argument takes time."""
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
    def vocab_size_or_unlimited(self) -> int:
        return ANY_TOKEN if self.vocab_size is None else self.vocab_size


def _check_table(costs: Any, name: str) -> npt.NDArray[np.uint8]:
    """Returns a table of costs as a read-only array."""
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


def _read_costs(costs: Any) -> Costs | tuple[tuple[int, ...], ...] | None:
    """Returns fitted costs, loaded from their file if ``costs`` is a path, or a hashable table."""
    if isinstance(costs, (str, PathLike)):
        return Costs.load(costs)
    return costs if isinstance(costs, Costs) else _convert_to_tuples(costs, "costs")


def _convert_to_tuples(costs: Any, name: str) -> tuple[tuple[int, ...], ...] | None:
    return None if costs is None else tuple(map(tuple, _check_table(costs, name).tolist()))
