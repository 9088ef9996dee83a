"""The settings to search: a plain list, each as keywords of `NgramConfig`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from ngram_npu.config import STORE_TOKENS, NgramConfig
from ngram_npu.errors import InputError, one_line

Drafts = Literal["padded", "trimmed"]


@dataclass(frozen=True)
class Candidate:
    """One setting. Two of them are equal if their settings are, with defaults given or not.

    Attributes:
        options: keywords of `NgramConfig`, sorted by name.
        drafts: as in `ReplayOptions`.
    """

    options: tuple[tuple[str, Any], ...]
    drafts: Drafts = "trimmed"

    @classmethod
    def of(cls, *, drafts: Drafts = "trimmed", **options: Any) -> Candidate:
        """From keywords of `NgramConfig`, which raises ValueError or TypeError for wrong ones, and
        what the runner verifies."""
        if drafts not in ("padded", "trimmed"):
            raise ValueError(f"drafts: expected 'padded' or 'trimmed', got {drafts!r}")
        config = NgramConfig(**options)
        names = ["sizes", "k", "overlap", "min_draft_probability"]
        if not config.is_ladder:
            names = ["min_n", "max_n", "k", "match_policy", "overlap"]
        if config.store is not None:
            if config.store_tokens < 1024:
                raise ValueError(f"store_tokens: expected at least 1024, got {config.store_tokens}")
            names += ["store", "store_tokens"]
        return cls(tuple((name, getattr(config, name)) for name in sorted(names)), drafts)

    @property
    def config(self) -> NgramConfig:
        return NgramConfig(**dict(self.options))

    @property
    def has_store(self) -> bool:
        """Whether requests draft from other requests' text."""
        return self.config.store is not None

    @property
    def label(self) -> str:
        """The setting on one line, for tables and reports; trimmed unless it says padded."""
        config = self.config
        if config.is_ladder:
            least = config.min_draft_probability
            parts = ["ladder", f"k={config.k}"]
            parts += [] if least is None else [f"p={least:g}"]
            if config.store is not None:
                parts.append(f"{config.store} store={_short(config.store_tokens)}")
            parts += [] if config.overlap else ["no overlap"]
        else:
            parts = [f"n={config.min_n}-{config.max_n}", config.match_policy, f"k={config.k}"]
            parts += ["overlap"] if config.overlap else []
        return " ".join([*parts, *(["padded"] if self.drafts == "padded" else [])])


def _short(tokens: int) -> str:
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


BASELINE = Candidate.of(min_n=2, max_n=5, k=5)
"""The default setting to compare with: the default of `ngram-npu replay`."""

BASELINES = {
    "trimmed": BASELINE,
    "padded": Candidate.of(min_n=2, max_n=5, k=5, match_policy="latest", drafts="padded"),
}
"""By what is verified: vLLM's V2 runner follows the latest match."""


def parse_candidate(text: str) -> Candidate:
    """A setting from JSON, an object of `NgramConfig`'s keywords.

    Raises:
        InputError: the text is not a setting.
    """
    try:
        return Candidate.of(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise InputError(
            f'{text:.100}: expected a setting such as {{"min_n": 2, "max_n": 4, "k": 3}}: '
            f"{one_line(error):.200}"
        ) from error


PROBABILITIES = (0.6, 0.45, 0.35, 0.25, 0.177, 0.125, 0.088, 0.0625, 0.03)


def _candidates() -> tuple[Candidate, ...]:
    ladders = [
        Candidate.of(sizes="ladder", k=k, min_draft_probability=p)
        for p in PROBABILITIES
        for k in (4, 8, 16, 32)
    ]
    fixed = [
        Candidate.of(min_n=low, max_n=high, k=k, match_policy=policy)
        for low, high in ((2, 5), (3, 8))
        for k in (2, 3, 5, 8, 12, 16, 32)
        for policy in ("earliest", "latest")
    ]
    padded = [
        Candidate.of(
            min_n=low, max_n=high, k=k, match_policy="latest", overlap=low == 1, drafts="padded"
        )
        for low, high in ((1, 16), (2, 5))
        for k in (1, 2, 3, 5, 8, 12)
    ]
    return (*ladders, *fixed, *padded)


CANDIDATES = _candidates()

STORE_SIZES = (100_000, STORE_TOKENS)
"""Capacities in tokens to try: the last one with several ladders, the others with the best."""


def vllm_options(candidate: Candidate, method: str | None = None) -> tuple[str, str]:
    """The options of `vllm serve` for a setting.

    Args:
        candidate: the setting.
        method: a `Runner`'s; None: `ngram_gpu` where drafts are padded, else `custom_class`.
    """
    method = method or ("ngram_gpu" if candidate.drafts == "padded" else "custom_class")
    config = candidate.config
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": config.k}
    bounds = {"prompt_lookup_min": config.min_n, "prompt_lookup_max": config.max_n}
    own: dict[str, Any] = {}
    if method == "custom_class":
        speculative["model"] = "ngram_npu.engines.vllm.NgramProposer"
    if config.is_ladder:
        own["sizes"] = "ladder"
        if config.min_draft_probability is not None:
            own["min_draft_probability"] = config.min_draft_probability
        if not config.overlap:
            own["overlap"] = False
        if config.store is not None:
            own |= {"store": config.store, "store_tokens": config.store_tokens}
    elif method == "ngram_gpu" and (config.min_n, config.max_n) == (1, 16):
        own["lookup"] = "1-16"
    else:
        (own if method == "custom_class" else speculative).update(bounds)
        own |= {"match_policy": config.match_policy, "overlap": config.overlap}
    return (
        f"--speculative-config {shlex.quote(json.dumps(speculative))}",
        f"--additional-config {shlex.quote(json.dumps({'ngram_npu': own}))}",
    )
