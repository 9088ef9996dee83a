"""The settings to search: a plain list, each as keywords of `NgramConfig`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import Any, Literal

from ngram_npu.config import STORE_TOKENS, NgramConfig
from ngram_npu.replay.errors import ReplayError, one_line

__all__ = [
    "BASELINE",
    "CANDIDATES",
    "STORE_SIZES",
    "Candidate",
    "parse_candidate",
    "vllm_options",
]


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
        """The setting on one line, for tables and reports."""
        config = self.config
        if config.is_ladder:
            least = config.min_draft_probability
            parts = ["ladder", f"k={config.k}"]
            parts += [] if least is None else [f"p={least:g}"]
            if config.store is not None:
                parts.append(f"{config.store} store={_short(config.store_tokens)}")
            return " ".join([*parts, *([] if config.overlap else ["no overlap"]), self.drafts])
        parts = [f"n={config.min_n}-{config.max_n}", config.match_policy, f"k={config.k}"]
        return " ".join([*parts, *(["overlap"] if config.overlap else []), self.drafts])


def _short(tokens: int) -> str:
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


BASELINE = Candidate.of(min_n=2, max_n=5, k=5)
"""The default setting to compare with: the default of `ngram-npu replay`."""


def parse_candidate(text: str | None, drafts: Drafts = "trimmed") -> Candidate:
    """A setting from JSON, an object of `NgramConfig`'s keywords; None: `BASELINE`. Its drafts are
    verified as `drafts` says, unless the object says it.

    Raises:
        ReplayError: the text is not a setting.
    """
    if text is None:
        return replace(BASELINE, drafts=drafts)
    try:
        return Candidate.of(**{"drafts": drafts, **json.loads(text)})
    except (ValueError, TypeError) as error:
        raise ReplayError(
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
        for k in (2, 3, 5, 8, 12, 16)
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
"""Capacities in tokens to try for the best ladders."""


def vllm_options(candidate: Candidate) -> tuple[str, str]:
    """The options of `vllm serve` for a setting: drafting on the host (`custom_class`), or where
    drafts are padded `ngram_gpu`, for which NGRAM_NPU_VLLM=1 must be set."""
    config = candidate.config
    if candidate.drafts == "padded":
        return _ngram_gpu(config)
    speculative = {
        "method": "custom_class",
        "model": "ngram_npu.vllm.NgramProposer",
        "num_speculative_tokens": config.k,
    }
    if config.is_ladder:
        own: dict[str, Any] = {"sizes": "ladder"}
        if config.min_draft_probability is not None:
            own["min_draft_probability"] = config.min_draft_probability
        if not config.overlap:
            own["overlap"] = False
        if config.store is not None:
            own["store"] = config.store
            # The default is left out, because it grows with the server's `max_num_seqs`.
            if config.store_tokens != STORE_TOKENS:
                own["store_tokens"] = config.store_tokens
    else:
        own = {"prompt_lookup_min": config.min_n, "prompt_lookup_max": config.max_n}
        if config.match_policy != "earliest":
            own["match_policy"] = config.match_policy
        if config.overlap:
            own["overlap"] = True
    return _flags(speculative, own)


def _ngram_gpu(config: NgramConfig) -> tuple[str, str]:
    own: dict[str, Any] = {"lookup": "1-16"}
    speculative: dict[str, Any] = {"method": "ngram_gpu", "num_speculative_tokens": config.k}
    if (config.min_n, config.max_n) != (1, 16):
        speculative |= {"prompt_lookup_min": config.min_n, "prompt_lookup_max": config.max_n}
        own = {"match_policy": config.match_policy, "overlap": config.overlap}
    return _flags(speculative, own)


def _flags(speculative: dict[str, Any], own: dict[str, Any]) -> tuple[str, str]:
    return (
        f"--speculative-config {shlex.quote(json.dumps(speculative))}",
        f"--additional-config {shlex.quote(json.dumps({'ngram_npu': own}))}",
    )
