"""Reads the options of all drafters: from the environment, or from the section ``ngram_npu`` of
vLLM's ``additional_config``, which other backends use too."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ngram_npu.config import NgramConfig
from ngram_npu.engines.vllm.feed.publishers import parse_publishers
from ngram_npu.errors import suggest_similar
from ngram_npu.store.contents import BLOCK_TOKENS, MAX_BLOCKS

SECTION = "ngram_npu"
STORE_ARGUMENT = "ngram_npu_store"
"""Key in ``SamplingParams.extra_args``: false keeps the text of a request out of the store."""
EXTRA_ARGUMENTS = "extra_args (over HTTP: vllm_xargs)"
REMOVED_ARGUMENTS = {
    "ngram_npu_scope": "requests with the same cache_salt and LoRA adapter share text",
    "ngram_npu_prompt_scope": "requests with the same cache_salt and LoRA adapter share text",
    "ngram_npu_k": "set num_speculative_tokens, or the option k='auto'",
}
"""Former keys in ``extra_args``, and what replaces them."""
MIN_SIMILARITY = 0.85
"""Ratio of ``difflib`` from which a section's name is a misspelling of ours. ``ngram`` and ``npu``,
which may be sections of other backends, have less."""
_SECTION_PATH = f"additional_config[{SECTION!r}]"
PREFIX = "NGRAM_NPU_VLLM_"
CORRECTION = PREFIX + "CORRECTION"
"""Not an option, because it is read when the plugin is loaded, before the configuration."""

OPTION_TYPES: dict[str, type] = {
    **dict.fromkeys(("lookup", "k", "scope", "store_seed", "store_file", "store_feed"), str),
    **dict.fromkeys(("store", "neural", "metrics"), bool),
    **dict.fromkeys(("store_tokens", "num_threads"), int),
    "min_draft_probability": float,
}
CHOICES: dict[str, Collection[str]] = {
    "lookup": ("auto", "ngram"),
    "scope": ("private", "shared"),
    "k": ("auto",),
}
_VLLM_DRAFTS = "lookup='ngram' drafts as vLLM does, lookup='auto' looks up 1 to 16 tokens"
_ONE_PLACE = "drafts are looked up where the runner has its rows"
_ONE_COST_TABLE = "min_draft_probability ends drafts, by the packaged cost table"
REMOVED_OPTIONS: dict[str, str] = {
    **dict.fromkeys(
        ("prompt_lookup_min", "prompt_lookup_max", "match_policy", "overlap"), _VLLM_DRAFTS
    ),
    **dict.fromkeys(("engine", "draft_on", "dense_rows"), _ONE_PLACE),
    **dict.fromkeys(("costs_file", "token_cost"), _ONE_COST_TABLE),
    "step_times_file": "k='auto' measures all step times itself",
    "drafts": "'ngram_gpu' verifies num_speculative_tokens tokens; use 'ngram' for shorter drafts",
    "keep_drafting": "it is on for models with recurrent layers, and off for others",
    "prompt_scopes": "requests with the same cache_salt and LoRA adapter share text",
    "store_save_minutes": "store_file is written at least every minute",
    "beside": "use neural",
    "beside_threshold": "the draft with more expected tokens is used",
}
"""Former options, and what replaces them."""
STORE_OPTIONS = ("store_tokens", "store_seed", "store_file", "store_feed", "scope")
MAX_BATCHES = 2
"""The store holds back the text of a request's newest step, because the request may have ended
within it. With more batches in flight, it would store tokens from after the end of a request."""
DEFAULT_MIN_PROBABILITY = 0.12
"""For servers where one more token takes 5 % of a step."""
TOKENS_PER_REQUEST = 1024
"""Minimum capacity of the store in tokens for each request that adds text."""
MAX_TOKENS = MAX_BLOCKS * BLOCK_TOKENS
STORE_TOKENS = 1 << 20
"""Default capacity of the store: 55 MB, which vLLM measures before it allocates its KV cache."""

_VLLM_NAMES = {
    "min_n": "prompt_lookup_min",
    "max_n": "prompt_lookup_max",
    "k": "num_speculative_tokens",
    "max_len": "max_model_len",
}
"""Names in vLLM's configuration of the fields of ``NgramConfig``."""

Method = Literal["custom_class", "ngram", "ngram_gpu", "v2", "ascend_v2", "neural"]
"""A method of the V1 runner, any n-gram method of the V2 runner (``v2``) or of vLLM-Ascend's V2
runner (``ascend_v2``), or a neural drafter of the V2 runner with n-gram drafts (``neural``)."""
HOST_METHODS = ("custom_class", "ngram")
"""Methods that draft on the host. They verify only the tokens found."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """All settings of a drafter in vLLM. docs/guides/vllm.md describes each of them."""

    ngram: NgramConfig
    lookup: str
    max_num_seqs: int
    max_model_len: int
    keep_drafting: bool
    """Whether a request that sampled something always gets a draft."""
    neural: bool
    """Whether n-gram drafts are added to those of a neural drafter."""
    sources: tuple[str, ...]
    """Where options were set; empty if all options have their defaults."""
    num_threads: int = 1
    metrics: bool = False
    store: bool = False
    store_tokens: int = STORE_TOKENS
    """Capacity of the store in tokens; more than the default if its requests need more."""
    store_seed: str = ""
    """Path of the file with the initial contents of the store; empty: none."""
    store_file: str = ""
    """Path of the file that this engine saves its store to; empty: none."""
    store_feed: str = ""
    """Publishers of KV events whose text is stored too; empty: none."""
    scope: str = "private"
    """With whom requests without ``cache_salt`` and LoRA adapter share text: ``"private"``: with
    nobody, so that their text is not stored; ``"shared"``: with each other."""
    k: str = ""
    """``"auto"``: the draft tokens per step depend on the load; empty: a constant number."""


def find_method(vllm_config: Any) -> Method | None:
    """Returns which of our drafters this configuration selects; None if it selects none."""
    speculative = getattr(vllm_config, "speculative_config", None)
    stock = getattr(speculative, "method", None)
    if stock is None or getattr(vllm_config, "model_config", None) is None:
        return None
    in_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    if stock in ("ngram", "ngram_gpu"):
        v2: Method = "v2" if importlib.util.find_spec("vllm_ascend") is None else "ascend_v2"
        return v2 if in_v2 else stock
    if stock == "custom_class":
        is_ours = str(getattr(speculative, "model", "")).startswith("ngram_npu.")
        return "custom_class" if is_ours else None
    return "neural" if in_v2 and read_neural_option(vllm_config) else None


def read_options(vllm_config: Any, method: Method) -> Options:
    """Reads the options for ``method``.

    Raises:
        ValueError: An option is unknown, malformed, or contradicts another; in one line.
    """
    model_config = vllm_config.model_config
    for name in find_misplaced_options(vllm_config):
        raise ValueError(
            f"ngram_npu: option {name!r} at the top level of additional_config; did you mean "
            f"{_SECTION_PATH}[{name!r}]?"
        )
    settings, sources = read_settings(vllm_config)
    settings = {name: check_value(name, value) for name, value in settings.items()}
    _check_method(method, settings, vllm_config)
    lookup = settings.pop("lookup", "auto")
    ngram = _make_ngram_config(lookup, method, vllm_config, settings)
    settings.pop("min_draft_probability", None)
    for name in STORE_OPTIONS:
        if name in settings and not settings.get("store"):
            raise ValueError(f"ngram_npu: {name}: expected none without store=true")
    if settings.get("store_file") and (number := engine_index(vllm_config.parallel_config)):
        settings["store_file"] += f".{number}"
    # Recurrent layers (Mamba, GDN) keep a state instead of a KV cache. Without vLLM's fix,
    # a step without drafts corrupts this state if the step before had accepted drafts.
    has_state = any(getattr(model_config, name, False) for name in ("has_inner_state", "is_hybrid"))
    options = Options(
        ngram=ngram,
        lookup=lookup,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=model_config.max_model_len,
        keep_drafting=has_state,
        sources=sources,
        **{**settings, "neural": method == "neural"},
    )
    return _choose_store_tokens(options, is_set="store_tokens" in settings)


def _choose_store_tokens(options: Options, *, is_set: bool) -> Options:
    """Raises the default capacity to what the requests need.

    Raises:
        ValueError: The configured capacity is less.
    """
    minimum = TOKENS_PER_REQUEST * options.max_num_seqs
    if not options.store or options.store_tokens >= minimum:
        return options
    if is_set:
        raise ValueError(
            f"ngram_npu: store_tokens: expected at least {minimum}, {TOKENS_PER_REQUEST} for each "
            f"of {options.max_num_seqs} requests (max_num_seqs), got {options.store_tokens}"
        )
    return replace(options, store_tokens=minimum)


def _make_ngram_config(
    lookup: str, method: Method, vllm_config: Any, settings: Mapping[str, Any]
) -> NgramConfig:
    """Returns the lookup's settings. With ``lookup='ngram'`` they are those of vLLM's own method;
    its V2 runner takes the latest match, and does not limit a draft to ``max_model_len``."""
    speculative, model_config = vllm_config.speculative_config, vllm_config.model_config
    in_v2 = method in ("v2", "ascend_v2", "neural")
    bounds: dict[str, Any] = {}
    if lookup == "ngram":
        min_n, max_n = 2, 5
        if method != "custom_class":  # for which vLLM drops these settings
            min_n, max_n = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        policy = "latest" if method == "v2" else "earliest"
        bounds = {"min_n": min_n, "max_n": max_n, "match_policy": policy, "overlap": False}
    min_probability = settings.get("min_draft_probability")
    is_default = "min_draft_probability" not in settings
    if method in HOST_METHODS and lookup == "auto" and is_default:
        min_probability = DEFAULT_MIN_PROBABILITY
    try:
        return NgramConfig(
            k=speculative.num_speculative_tokens,
            max_len=None if in_v2 else model_config.max_model_len,
            vocab_size=model_config.get_vocab_size(),
            min_draft_probability=min_probability,
            **bounds,
        )
    except (TypeError, ValueError) as error:
        field, _, reason = str(error).removeprefix("NgramConfig: ").partition(":")
        raise ValueError(f"ngram_npu: {_VLLM_NAMES.get(field, field)}:{reason}") from error


def _check_method(method: Method, settings: Mapping[str, Any], vllm_config: Any) -> None:
    """Raises ValueError if the method does not support an option, or the runner's configuration."""
    in_v2 = method in ("v2", "ascend_v2", "neural")
    if "k" in settings and not in_v2:
        raise ValueError("ngram_npu: k: expected only in the V2 runner, got 'auto'")
    min_probability = settings.get("min_draft_probability")
    if min_probability is not None and method not in HOST_METHODS:
        raise ValueError(
            "ngram_npu: min_draft_probability: expected none, because this runner verifies "
            f"num_speculative_tokens tokens of every request, got {min_probability}"
        )
    if method == "neural" and settings.get("lookup") == "ngram":
        raise ValueError("ngram_npu: lookup: expected 'auto' with a neural drafter, got 'ngram'")
    if method == "ngram_gpu" and getattr(vllm_config.model_config, "enable_prompt_embeds", False):
        # vLLM's own class has this limit too: docs/guides/vllm.md.
        raise ValueError(
            "ngram_npu: enable_prompt_embeds: expected false, got true, with 'ngram_gpu' in the "
            "V1 runner: its text would be wrong; use method 'ngram' or the V2 runner"
        )
    if not settings.get("store"):
        return
    if method in HOST_METHODS and (scope := settings.get("scope", "private")) != "shared":
        raise ValueError(
            f"ngram_npu: scope: expected 'shared' with a store and {method!r} in the V1 runner, "
            "which does not pass on the cache_salt and the LoRA adapter of requests, got "
            f"{scope!r}; set it if the server has one tenant, otherwise use 'ngram_gpu'"
        )
    batches = vllm_config.max_concurrent_batches
    if batches > MAX_BATCHES and method not in HOST_METHODS:
        raise ValueError(
            f"ngram_npu: store: expected at most {MAX_BATCHES} batches in flight, got {batches}"
        )


def check_value(name: str, value: Any) -> Any:
    """Returns an option's value, with ``store_feed`` as a text. Raises ValueError if the value is
    not allowed."""
    if (choices := CHOICES.get(name)) and value not in choices:
        raise ValueError(f"ngram_npu: {name}: expected one of {', '.join(choices)}, got {value!r}")
    if name == "store_feed" and value:
        parse_publishers(value)  # raises an error
        return value if isinstance(value, str) else ",".join(value)
    if name == "store_tokens" and value > MAX_TOKENS:
        raise ValueError(f"ngram_npu: store_tokens: expected at most {MAX_TOKENS}, got {value}")
    if name == "num_threads" and value < 0:
        raise ValueError(f"ngram_npu: num_threads: expected 0 or more, got {value}")
    return value


def read_neural_option(vllm_config: Any) -> bool:
    """Returns the option ``neural``. Raises the errors of :func:`read_options`."""
    return bool(read_settings(vllm_config)[0].get("neural", False))


def read_k_option(vllm_config: Any) -> bool:
    """Returns whether the option ``k`` is ``"auto"``. Raises the errors of :func:`read_options`."""
    settings = read_settings(vllm_config)[0]
    return "k" in settings and check_value("k", settings["k"]) == "auto"


def has_options(vllm_config: Any) -> bool:
    """Returns whether any option is set, also where it has no effect or is misspelled."""
    try:
        return bool(read_settings(vllm_config)[0] or find_misplaced_options(vllm_config))
    except ValueError:
        return True


def publishes_text(vllm_config: Any) -> bool:
    """Returns whether vLLM publishes KV events, which contain the text of requests."""
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(getattr(events, "enable_kv_cache_events", False))


def engine_index(parallel_config: Any) -> int:
    """Returns the number of this engine in a data-parallel server. vLLM's ``data_parallel_rank`` is
    0 in every engine if the model is dense."""
    return getattr(parallel_config, "data_parallel_index", 0)


def find_misplaced_options(vllm_config: Any) -> list[str]:
    """Returns the names of options at the top level of ``additional_config``, where they have no
    effect."""
    additional_config = getattr(vllm_config, "additional_config", None)
    names = additional_config if isinstance(additional_config, Mapping) else ()
    return [name for name in names if name in OPTION_TYPES]


def read_settings(vllm_config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the values of all options that are set, and the places where they are set."""
    section = read_section(getattr(vllm_config, "additional_config", None))
    environment = read_environment(os.environ)
    sources = [_SECTION_PATH] if section else []
    sources += ["the environment"] if environment.keys() - section.keys() else []
    return {**environment, **section}, tuple(sources)


def read_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Reads the variables of options. Others with our prefix are ignored: Kubernetes sets some for
    a service whose name begins so."""
    environment = {}
    for name in (*OPTION_TYPES, *REMOVED_OPTIONS):
        variable = PREFIX + name.upper()
        if (text := variables.get(variable)) is None:
            continue
        option_type = _find_option_type(name, f"the environment, as {variable}")
        try:
            environment[name] = _PARSERS[option_type](text)
        except (KeyError, ValueError):
            raise ValueError(
                f"ngram_npu: {variable}: expected {option_type.__name__}, got {text!r}"
            ) from None
    return environment


def read_section(additional_config: object) -> Mapping[str, Any]:
    """Returns the options in ``additional_config``. Raises ValueError if one is unknown or has the
    wrong type."""
    if not isinstance(additional_config, Mapping):  # another platform uses a class
        return {}
    for name in additional_config:
        if name != SECTION and _resembles_section(str(name)):
            raise ValueError(
                f"ngram_npu: unknown section {name!r} in additional_config; did you mean "
                f"{SECTION!r}?"
            )
    section: Any = additional_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(
            f"ngram_npu: {_SECTION_PATH}: expected a mapping of options, got {section!r}"
        )
    for name, value in section.items():
        option_type = _find_option_type(str(name), _SECTION_PATH)
        accepted_types: Any = (int, float, type(None)) if option_type is float else option_type
        if name == "store_feed" and isinstance(value, list):
            continue
        has_type = isinstance(value, accepted_types)
        if not has_type or (option_type is not bool and isinstance(value, bool)):
            raise ValueError(
                f"ngram_npu: {name} in {_SECTION_PATH}: expected {option_type.__name__}, "
                f"got {value!r}"
            )
    return section


def _resembles_section(name: str) -> bool:
    letters, expected = "".join(filter(str.isalnum, name)).lower(), SECTION.replace("_", "")
    is_similar = difflib.SequenceMatcher(None, letters, expected).ratio() >= MIN_SIMILARITY
    return expected in letters or is_similar


def _find_option_type(name: str, source: str) -> type:
    if name in OPTION_TYPES:
        return OPTION_TYPES[name]
    if name in REMOVED_OPTIONS:
        raise ValueError(
            f"ngram_npu: {name} in {source}: this option was removed: {REMOVED_OPTIONS[name]}"
        )
    hint = suggest_similar(name, OPTION_TYPES)
    if name == "num_speculative_tokens":
        hint = "; num_speculative_tokens belongs in speculative_config"
    known = ", ".join(OPTION_TYPES)
    raise ValueError(f"ngram_npu: unknown option {name!r} in {source}; known: {known}{hint}")


_FLAGS = {"1": True, "true": True, "0": False, "false": False}
_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    str: str,
    float: lambda text: None if text.lower() == "none" else float(text),
    bool: lambda text: _FLAGS[text.lower()],
}
