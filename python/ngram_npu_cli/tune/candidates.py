"""Contains the settings to search, and the runners that draft with these settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ngram_npu.config import STORE_TOKENS, NgramConfig
from ngram_npu.errors import InputError, to_one_line

Drafts = Literal["padded", "trimmed"]


@dataclass(frozen=True)
class Candidate:
    """A setting. Two candidates are equal if all of their options are equal, including defaults.

    Attributes:
        options: Keywords of `NgramConfig`, sorted by name.
        drafts: Whether all K tokens are verified (padded) or only the drafted ones (trimmed).
    """

    options: tuple[tuple[str, Any], ...]
    drafts: Drafts = "trimmed"

    @classmethod
    def of(cls, *, drafts: Drafts = "trimmed", **options: Any) -> Candidate:
        """Returns a candidate from keywords of `NgramConfig`. Raises the errors of
        `NgramConfig`."""
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
        """Whether requests also draft from other requests' text."""
        return "store" in dict(self.options)

    @property
    def label(self) -> str:
        """The setting in one line, for tables and reports. Trimmed drafts are not mentioned."""
        config = self.config
        if config.is_ladder:
            parts = ["lookup=ladder", f"k={config.k}"]
            if config.min_draft_probability is not None:
                parts.append(f"p={config.min_draft_probability:g}")
            if config.store is not None:
                parts.append(f"{config.store} store={_abbreviate(config.store_tokens)}")
            if not config.overlap:
                parts.append("no overlap")
        else:
            lookup = f"lookup={config.min_n}-{config.max_n}"
            parts = [lookup, config.match_policy, f"k={config.k}"]
            if config.overlap:
                parts.append("overlap")
        if self.drafts == "padded":
            parts.append("padded")
        return " ".join(parts)


def _abbreviate(tokens: int) -> str:
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


BASELINE = Candidate.of(min_n=2, max_n=5, k=5)
"""The setting with which others are compared by default; it is the default of `ngram-npu
replay`."""

BASELINES = {
    "trimmed": BASELINE,
    "padded": Candidate.of(min_n=2, max_n=5, k=5, match_policy="latest", drafts="padded"),
}
"""The settings with which others are compared by default, for trimmed and for padded drafts. vLLM's
V2 runner uses the latest match."""


def parse_candidate(text: str) -> Candidate:
    """Parses a JSON object of `NgramConfig`'s keywords. Raises an InputError for any other text."""
    try:
        return Candidate.of(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise InputError(
            f'{text:.100}: expected a setting such as {{"min_n": 2, "max_n": 4, "k": 3}}: '
            f"{to_one_line(error):.200}"
        ) from error


PROBABILITIES = (0.6, 0.45, 0.35, 0.25, 0.177, 0.125, 0.088, 0.0625, 0.03)

_LADDERS = [
    Candidate.of(sizes="ladder", k=k, min_draft_probability=p)
    for p in PROBABILITIES
    for k in (4, 8, 16, 32)
]


def _list_trimmed(**bounds: Any) -> list[Candidate]:
    return [
        Candidate.of(**bounds, k=k, match_policy=policy)
        for k in (2, 3, 5, 8, 12, 16, 32)
        for policy in ("earliest", "latest")
    ]


def _list_padded(**bounds: Any) -> list[Candidate]:
    bounds |= {"match_policy": "latest", "overlap": bounds["min_n"] == 1}
    return [Candidate.of(k=k, drafts="padded", **bounds) for k in (1, 2, 3, 5, 8, 12)]


CANDIDATES = (
    *_LADDERS,
    *_list_trimmed(min_n=2, max_n=5),
    *_list_trimmed(min_n=3, max_n=8),
    *_list_padded(min_n=1, max_n=16),
    *_list_padded(min_n=2, max_n=5),
)


def list_candidates(lookup: Mapping[str, Any]) -> Sequence[Candidate]:
    """Returns the settings to search with n-grams of `min_n` to `max_n` tokens; empty: ladders."""
    return [*_list_trimmed(**lookup), *_list_padded(**lookup)] if "min_n" in lookup else _LADDERS


STORE_SIZES = (100_000, STORE_TOKENS)
"""Capacities of stores to try, in tokens: the last one with several ladders, the others only with
the best of these ladders."""

SYNCHRONOUS_SHARE = 0.1
"""Assumed share by which a step is longer without asynchronous scheduling. vLLM-Ascend's developers
measured 6 % with 32B parameters and 20 % with 7B (the table in the pull request that makes its
runner asynchronous)."""


@dataclass(frozen=True)
class Runner:
    """A way to draft in a server: which drafts are verified, the `method` of vLLM's
    `speculative_config`, a description with the features of vLLM that are lost (`about`), and the
    environment variables that the server needs."""

    name: str
    drafts: Drafts
    method: Literal["ngram_gpu", "custom_class", "ngram"]
    about: str
    variables: tuple[str, ...] = ("NGRAM_NPU_VLLM=1",)
    is_synchronous: bool = True


_RUNNERS = (
    Runner(
        "gpu",
        "padded",
        "ngram_gpu",
        "drafts on the GPU (ngram_gpu). Keeps the V2 runner and asynchronous scheduling; all "
        "K tokens are verified. Stores on the GPU (draft_on) are not tried.",
        is_synchronous=False,
    ),
    Runner(
        "host",
        "trimmed",
        "custom_class",
        "drafts on the host (custom_class). On a GPU this TAKES AWAY the V2 runner and "
        "asynchronous scheduling.",
    ),
    Runner(
        "ascend",
        "trimmed",
        "ngram",
        "drafts on the host with vLLM-Ascend (ngram, from v0.24.0rc). This TAKES AWAY "
        "asynchronous scheduling.",
        ("NGRAM_NPU_VLLM=1", "VLLM_USE_V2_MODEL_RUNNER=0"),
    ),
)
RUNNERS = {runner.name: runner for runner in _RUNNERS}


def vllm_options(candidate: Candidate, method: str) -> tuple[str, str]:
    """Returns the options of `vllm serve` for a setting and the method of a `Runner`."""
    config = candidate.config
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": config.k}
    plugin: dict[str, Any] = {}
    if method == "custom_class":
        speculative["model"] = "ngram_npu.engines.vllm.NgramProposer"
    if config.is_ladder:
        plugin["lookup"] = "ladder"
        if config.min_draft_probability is not None:
            plugin["min_draft_probability"] = config.min_draft_probability
        if not config.overlap:
            plugin["overlap"] = False
        if config.store is not None:
            plugin |= {"store": config.store, "store_tokens": config.store_tokens}
    # For n-grams of 1 to 16 tokens, the option `lookup` is used instead of vLLM's bounds.
    elif method == "ngram_gpu" and (config.min_n, config.max_n) == (1, 16):
        plugin["lookup"] = "1-16"
    else:
        bounds = {"prompt_lookup_min": config.min_n, "prompt_lookup_max": config.max_n}
        (plugin if method == "custom_class" else speculative).update(bounds)
        plugin |= {"match_policy": config.match_policy, "overlap": config.overlap}
    return (
        f"--speculative-config {shlex.quote(json.dumps(speculative))}",
        f"--additional-config {shlex.quote(json.dumps({'ngram_npu': plugin}))}",
    )
