"""Our options, read from vLLM's configuration and from the environment.

vLLM has no options for a custom proposer class. So ours are in the environment, or in
``additional_config`` under our own key, since other backends use ``additional_config`` too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ngram_npu.config import MAX_INDEX_SPAN, STORE_TOKENS, NgramConfig

SECTION = "ngram_npu"
"""Our key in ``additional_config``."""

PREFIX = "NGRAM_NPU_VLLM_"
"""Prefix of our environment variables; an option's name in capitals follows."""

ENGINES = ("auto", "index", "scan")
DRAFTS = ("padded", "trimmed")
DEFAULT_LOOKUP = (2, 5)

Method = Literal["custom_class", "ngram", "ngram_gpu", "v2"]
"""The vLLM method that the proposer serves: one of V1's, or any n-gram method of the V2 runner."""


@dataclass(frozen=True)
class Options:
    """All settings of a proposer in vLLM."""

    ngram: NgramConfig
    engine: str
    num_threads: int
    max_num_seqs: int
    max_model_len: int
    drafts: str
    """For ``ngram_gpu``: ``"trimmed"`` reports the number of draft tokens found to the runner."""
    keep_drafting: bool
    """Whether a request that sampled tokens always gets a draft."""
    metrics: bool
    """Whether to count which matches were accepted, and on a device whether to count at all."""
    store_tokens: int | None
    """Capacity of the store in tokens; None: a million, or more if its slots need it."""
    store_file: str
    """File that the store is loaded from and saved to; empty: none."""
    sources: tuple[str, ...]
    """Where options were given, for the log line at start-up; empty: all are defaults."""


def read_options(vllm_config: Any, method: Method) -> Options:
    """The options for ``method``. For the V2 runner ``match_policy`` defaults to ``latest``, and
    drafts may exceed ``max_model_len``, as in that runner's own methods.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """
    speculative = vllm_config.speculative_config
    given, sources = _given(vllm_config)
    max_model_len = vllm_config.model_config.max_model_len
    sizes = given.get("sizes", "consecutive")
    if sizes == "ladder":
        low, high = _none_with_ladder(given)
    elif method == "custom_class":
        low, high = _lookup(given.get("prompt_lookup_min"), given.get("prompt_lookup_max"))
    else:
        low, high = _lookup_of_stock(speculative, given)
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"ngram_npu: prompt_lookup_min={low} is greater than prompt_lookup_max={high}"
        )
    num_threads = given.get("num_threads", 1)
    if num_threads < 0:
        raise ValueError(f"ngram_npu: num_threads: expected 0 or more, got {num_threads}")
    engine = given.get("engine", "auto")
    if engine not in ENGINES:
        raise ValueError(f"ngram_npu: engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    drafts = given.get("drafts", "padded")
    if drafts not in DRAFTS:
        raise ValueError(f"ngram_npu: drafts: expected one of {', '.join(DRAFTS)}, got {drafts!r}")
    try:
        ngram = NgramConfig(
            prompt_lookup_min=low,
            prompt_lookup_max=high,
            num_speculative_tokens=speculative.num_speculative_tokens,
            match_policy=given.get("match_policy", "latest" if method == "v2" else None),
            overlap=given.get("overlap"),
            max_len=None if method == "v2" else max_model_len,
            sizes=sizes,
            min_draft_probability=given.get("min_draft_probability"),
            store=given.get("store"),
            store_tokens=given.get("store_tokens", STORE_TOKENS),
        )
    except (TypeError, ValueError) as error:
        # The user knows only vLLM's names, so the message explains our short ones.
        names = "min_n, max_n, k: prompt_lookup_min, prompt_lookup_max, num_speculative_tokens"
        raise ValueError(f"ngram_npu: {error} ({names})") from error
    if engine == "index" and not ngram.fits_index:
        raise ValueError(
            "ngram_npu: engine: 'index' needs prompt_lookup_max - prompt_lookup_min <= "
            f"{MAX_INDEX_SPAN - 1}, got {low} to {high}"
        )
    if engine == "scan" and ngram.is_ladder:
        raise ValueError(
            "ngram_npu: engine: expected 'auto' or 'index' with sizes='ladder', got 'scan'"
        )
    for name in ("store_tokens", "store_file"):
        if name in given and ngram.store is None:
            raise ValueError(f"ngram_npu: {name}: expected none without a store")
    return Options(
        ngram=ngram,
        engine=engine,
        num_threads=num_threads,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=max_model_len,
        drafts=drafts,
        keep_drafting=given.get("keep_drafting", _is_recurrent(vllm_config.model_config)),
        metrics=given.get("metrics", False),
        store_tokens=given.get("store_tokens"),
        store_file=_own_file(given.get("store_file", ""), vllm_config.parallel_config),
        sources=sources,
    )


def _is_recurrent(model_config: Any) -> bool:
    """Whether layers keep a state instead of a KV cache (Mamba, GDN). Without vLLM's fix, a step
    without drafts after one with accepted drafts corrupts this state."""
    return bool(
        getattr(model_config, "has_inner_state", False) or getattr(model_config, "is_hybrid", False)
    )


def _own_file(path: str, parallel: Any) -> str:
    """The store file of this engine: each engine of a data-parallel server has its own."""
    rank = getattr(parallel, "data_parallel_rank", 0)
    return f"{path}.{rank}" if path and rank else path


def _given(vllm_config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    section = _section(getattr(vllm_config, "additional_config", None))
    environment = _environment(os.environ)
    sources = [f"additional_config[{SECTION!r}]"] if section else []
    sources += ["the environment"] if environment.keys() - section.keys() else []
    return {**environment, **section}, tuple(sources)


def _section(additional_config: object) -> dict[str, Any]:
    if not isinstance(additional_config, Mapping):  # another platform's own class
        return {}
    for name in additional_config:
        if name != SECTION and _letters(str(name)) == _letters(SECTION):
            raise ValueError(
                f"ngram_npu: unknown section {name!r} in additional_config; did you mean "
                f"{SECTION!r}?"
            )
    section = additional_config.get(SECTION, {})
    where = f"additional_config[{SECTION!r}]"
    if not isinstance(section, Mapping):
        raise ValueError(f"ngram_npu: {where}: expected a mapping of options, got {section!r}")
    for name, value in section.items():
        _check_known(str(name), _NAMES, where)
        kind = _KINDS[name]
        if not isinstance(value, _TYPES.get(kind, kind)) or (
            kind is not bool and isinstance(value, bool)
        ):
            raise ValueError(
                f"ngram_npu: {name} in {where}: expected {kind.__name__}, got {value!r}"
            )
    return dict(section)


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        _check_known(name, _NAMES, f"the environment, as {variable}")
        try:
            options[name] = _PARSERS[_KINDS[name]](text)
        except (KeyError, ValueError):
            raise ValueError(
                f"ngram_npu: {variable}: expected {_KINDS[name].__name__}, got {text!r}"
            ) from None
    return options


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _check_known(name: str, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        hint = ""
        if name in ("num_speculative_tokens", "k"):
            hint = "; num_speculative_tokens belongs in speculative_config"
        elif similar := difflib.get_close_matches(name, known, n=1):
            hint = f"; did you mean {similar[0]!r}?"
        raise ValueError(
            f"ngram_npu: unknown option {name!r} in {where}; known: {', '.join(known)}{hint}"
        )


def _none_with_ladder(given: Mapping[str, Any]) -> tuple[None, None]:
    """Rejects explicit sizes with a ladder. Those of vLLM's own methods are always set and are
    ignored."""
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if name in given:
            raise ValueError(
                f"ngram_npu: {name}: expected none with sizes='ladder', got {given[name]}"
            )
    return None, None


def _lookup(low: int | None, high: int | None) -> tuple[int, int]:
    """vLLM's rule: if only one of the two is given, the other is the same."""
    if low is None and high is None:
        return DEFAULT_LOOKUP
    low, high = (high if low is None else low), (low if high is None else high)
    assert low is not None
    assert high is not None
    return low, high


def _lookup_of_stock(speculative: Any, given: Mapping[str, Any]) -> tuple[int, int]:
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        stock = getattr(speculative, name)
        if name in given and given[name] != stock:
            raise ValueError(
                f"ngram_npu: {name}={given[name]} contradicts speculative_config, which decides "
                f"for vLLM's own methods and says {stock}"
            )
    return speculative.prompt_lookup_min, speculative.prompt_lookup_max


_KINDS: dict[str, type] = {
    "prompt_lookup_min": int,
    "prompt_lookup_max": int,
    "match_policy": str,
    "overlap": bool,
    "sizes": str,
    "min_draft_probability": float,
    "store": str,
    "store_tokens": int,
    "store_file": str,
    "engine": str,
    "num_threads": int,
    "drafts": str,
    "keep_drafting": bool,
    "metrics": bool,
}
_NAMES = tuple(_KINDS)
_TYPES: dict[type, tuple[type, ...]] = {float: (int, float, type(None))}
"""Additional types that a mapping may contain for an option's type."""
_FLAGS = {"1": True, "true": True, "0": False, "false": False}
_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    str: str,
    float: lambda text: None if text.lower() == "none" else float(text),
    bool: lambda text: _FLAGS[text.lower()],
}
