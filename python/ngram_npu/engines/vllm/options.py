"""Reads the options of all drafters: from the environment, or from the section ``ngram_npu`` of
vLLM's ``additional_config``, which other backends use too."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ngram_npu import _library
from ngram_npu.config import INDEX_POLICY, MAX_DRAFT_TOKENS, STORE_TOKENS, NgramConfig
from ngram_npu.draft_costs import Costs
from ngram_npu.drafting import uses_index
from ngram_npu.engines.vllm.feed.addresses import parse_publishers
from ngram_npu.errors import InputError, suggest_similar
from ngram_npu.step_time import VerificationCost, load_cost
from ngram_npu.store import tokenizer_digest

SECTION = "ngram_npu"
EXTRA_ARGUMENT = "ngram_npu_scope"
"""Key in ``SamplingParams.extra_args`` for the scope of a request."""
PROMPT_ARGUMENT = "ngram_npu_prompt_scope"
"""Key in ``SamplingParams.extra_args`` for a second scope of a request, such as one per prompt."""
K_ARGUMENT = "ngram_npu_k"
"""Key in ``SamplingParams.extra_args`` for the largest number of a request's draft tokens."""
EXTRA_ARGUMENTS = "extra_args (over HTTP: vllm_xargs)"
_SECTION_PATH = f"additional_config[{SECTION!r}]"
PREFIX = "NGRAM_NPU_VLLM_"
CORRECTION = PREFIX + "CORRECTION"
"""Not an option, because it is read when the plugin is loaded, before the configuration."""
BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")
CHOICES: dict[str, Collection[str]] = {
    "drafts": ("padded", "trimmed"),
    "draft_on": ("auto", "device", "host"),
    "scope": ("shared", "required"),
    "lookup": ("ngram", "1-16", "ladder", "auto"),
    "k": ("auto",),
}
MAXIMA = {"token_cost": 1.0, "store_save_minutes": 1_000_000, "beside_threshold": MAX_DRAFT_TOKENS}
STORE_OPTIONS = (
    *("store_tokens", "store_seed", "store_file", "store_save_minutes", "store_feed", "scope"),
    "prompt_scopes",
)
COST_OPTIONS = ("min_draft_probability", "token_cost", "costs_file")
MAX_DEVICE_BATCHES = 2
"""A store on the device stores text one step late, because the request may have ended already. With
more batches in flight, it would store tokens from after the end of a request."""
AUTO_MIN_PROBABILITY = 0.177
"""Default ``min_draft_probability``, for servers where one more token takes 5 % of a step."""
UNCUT = sys.float_info.min
"""A ``min_draft_probability`` that ends no draft early: 2**-1022. The least likely draft, 64 tokens
of probability 2**(-255 / 16) each, has the probability 2**-1020."""

Method = Literal["custom_class", "ngram", "ngram_gpu", "v2", "ascend_v2", "beside"]
"""A method of the V1 runner, any n-gram method of the V2 runner (``v2``) or of vLLM-Ascend's V2
runner (``ascend_v2``), or a neural drafter of the V2 runner with n-gram drafts (``beside``)."""


@dataclass(frozen=True)
class Options:
    """All settings of a drafter in vLLM. docs/guides/vllm.md describes each of them."""

    ngram: NgramConfig
    lookup: str
    """Which n-grams are looked up: ``"ngram"``, ``"1-16"`` or ``"ladder"``."""
    ignored_bounds: str
    """Settings of ``prompt_lookup_*`` that have no effect because of ``lookup``; empty: none."""
    max_num_seqs: int
    max_model_len: int
    min_draft_probability: float | None
    """The configured value. The value in ``ngram`` is ``UNCUT`` if vLLM verifies all positions of a
    draft: then a draft that ends early saves nothing."""
    keep_drafting: bool
    """Whether a request that sampled something always gets a draft."""
    beside: bool
    """Whether n-gram drafts are added to those of a neural drafter."""
    sources: tuple[str, ...]
    """Where options were set; empty if all options have their defaults."""
    engine: str = "auto"
    draft_on: str = "auto"
    num_threads: int = 1
    drafts: str = "padded"
    """For ``ngram_gpu``: ``"padded"`` or ``"trimmed"``."""
    metrics: bool = False
    device_store: bool = False
    """Whether there is a store, ``"live"``, in the memory of the device that runs the model. One in
    host memory belongs to ``ngram``."""
    store_tokens: int | None = None
    """Capacity of the store in tokens; None: 16 million, on a device 1 million, or more if the
    slots need more."""
    store_seed: str = ""
    """Path of the file with the initial contents of the store; empty: none."""
    store_file: str = ""
    """Path of the file that this engine saves its store to; empty: none."""
    store_save_minutes: float = 1.0
    store_feed: str = ""
    """Publishers of KV events whose text is stored too; empty: none."""
    scope: str = "shared"
    """``"shared"``, or ``"required"``: a request must have a salt, an adapter or a scope."""
    prompt_scopes: bool = False
    """Whether requests may have a second scope. The store then has twice as many slots."""
    beside_threshold: float = 0.0
    dense_rows: bool = True
    k: str = ""
    """``"auto"``: the draft tokens per step depend on the load; empty: a constant number."""
    step_times: VerificationCost | None = None
    """Step times with which ``k="auto"`` starts; None: it measures all step times."""
    step_times_batch: int = 0
    """Batch size whose step times determined ``min_draft_probability``; 0 if it was configured."""

    @property
    def has_store(self) -> bool:
        return self.ngram.store is not None or self.device_store

    def uses_index(self, device_type: str = "cpu") -> bool:
        """Returns whether rows of ``max_model_len`` tokens are looked up in an index.

        Raises:
            ValueError: An index or a ladder is requested on a device other than the CPU.
        """
        rows: Any = {"capacity": self.max_model_len, "device_type": device_type}
        rows |= {"max_scan": INDEX_POLICY.max_scan_context, "prefix": "ngram_npu: "}
        return uses_index(self.ngram, self.engine, **rows)

    def check_device(self, method: Method, device_type: str) -> None:
        """Checks the options against the device on which ``method`` drafts.

        Raises:
            ValueError: The device does not support these options.
        """
        if method in ("v2", "ascend_v2", "beside"):
            self.drafts_on_host(device_type)
        else:
            self.uses_index("cpu" if method in ("custom_class", "ngram") else device_type)

    def drafts_on_host(self, device_type: str) -> bool:
        """Returns whether the V2 runner drafts on the host.

        With ``auto`` it does so if there is an ``NgramStore``, or if the rows are in host memory
        and an index is faster than a scan.

        Raises:
            ValueError: The device does not support these options.
        """
        if self.draft_on == "host":
            return True
        if self.device_store:
            if device_type not in ("cpu", "cuda"):
                raise ValueError(
                    f"ngram_npu: store: expected a CPU or a CUDA device, got {device_type}; "
                    "draft_on='host' drafts there"
                )
            return False
        has_store = self.ngram.store is not None
        if self.draft_on == "auto" and (has_store or device_type == "cpu"):
            return has_store or self.uses_index(device_type)
        try:
            if has_store:
                raise ValueError("ngram_npu: store: expected none on this device")
            return self.uses_index("the device")
        except ValueError as error:
            raise ValueError(f"{error}; draft_on='host' drafts there") from None


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
    return "beside" if in_v2 and read_beside_option(vllm_config) else None


def read_options(vllm_config: Any, method: Method) -> Options:
    """Reads the options for ``method``.

    In the V2 runner, ``match_policy`` defaults to ``latest`` (vLLM-Ascend: ``earliest``), and
    drafts may exceed ``max_model_len``, as in that runner's own methods. With a neural drafter,
    ``overlap`` defaults to true, since the runner verifies all positions of a draft anyway.

    Raises:
        ValueError: An option is unknown, malformed, or contradicts another; in one line.
    """
    speculative, model_config = vllm_config.speculative_config, vllm_config.model_config
    settings, sources = read_settings(vllm_config)
    settings = {name: _check_value(name, value) for name, value in settings.items()}
    device_store = _uses_device_store(settings, method, vllm_config)
    lookup = "1-16" if device_store else _choose_lookup(settings, method)
    min_n, max_n = _choose_range(lookup, method, speculative, settings)
    in_v2 = method in ("v2", "ascend_v2", "beside")
    _check_method(method, settings, model_config)
    is_adaptive = getattr(speculative, "enable_adaptive_verification", False)
    is_padded = method == "ngram_gpu" and settings.get("drafts") != "trimmed"
    verifies_padding = is_padded or (in_v2 and not is_adaptive)
    step_times = _load_step_times(settings, lookup, verifies_padding)
    min_probability, step_times_batch = _choose_min_probability(settings, lookup), 0
    has_limit = bool(settings.keys() & {"token_cost", "min_draft_probability"})
    if step_times is not None and lookup == "ladder" and not (verifies_padding or has_limit):
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        cost, step_times_batch = step_times.compute_token_cost(
            max_num_seqs, speculative.num_speculative_tokens
        )
        min_probability = convert_cost_to_probability(cost)
    uses_latest_match = lookup == "1-16" or (in_v2 and method != "ascend_v2")
    overlap = True if method == "beside" or lookup == "1-16" else None
    costs = None
    try:
        if path := settings.get("costs_file"):
            costs = Costs.load(path, tokenizer=vocabulary_digest(model_config))
        ngram = NgramConfig(
            min_n=min_n,
            max_n=max_n,
            k=speculative.num_speculative_tokens,
            match_policy=settings.get("match_policy", "latest" if uses_latest_match else None),
            overlap=settings.get("overlap", overlap),
            max_len=None if in_v2 else model_config.max_model_len,
            sizes="ladder" if lookup == "ladder" else "consecutive",
            min_draft_probability=min_probability,
            store=None if device_store else settings.get("store"),
            store_tokens=settings.get("store_tokens", STORE_TOKENS),
            costs=costs,
        )
        engine = settings.get("engine", "auto")
        uses_index(ngram, engine, capacity=0, max_scan=0, device_type="cpu", prefix="")
    except (TypeError, ValueError) as error:
        # Users know vLLM's names only, so the message explains our short ones.
        names = "min_n, max_n, k: prompt_lookup_min, prompt_lookup_max, num_speculative_tokens"
        raise ValueError(f"ngram_npu: {error} ({names})") from error
    for name in STORE_OPTIONS:
        if name in settings and ngram.store is None and not device_store:
            raise ValueError(f"ngram_npu: {name}: expected none without a store")
    min_probability = ngram.min_draft_probability
    if min_probability is not None and verifies_padding:
        ngram = replace(ngram, min_draft_probability=UNCUT)
    if settings.get("store_file") and (number := engine_index(vllm_config.parallel_config)):
        settings["store_file"] += f".{number}"
    # Recurrent layers (Mamba, GDN) keep a state instead of a KV cache. Without vLLM's fix,
    # a step without drafts corrupts this state if the step before had accepted drafts.
    has_state = any(getattr(model_config, name, False) for name in ("has_inner_state", "is_hybrid"))
    option_names = [field.name for field in fields(Options) if field.name in settings]
    values = {name: settings[name] for name in option_names} | {
        "beside": method == "beside",
        "keep_drafting": settings.get("keep_drafting", has_state),
        "min_draft_probability": min_probability,
        "lookup": lookup,
        "device_store": device_store,
        "step_times": step_times,
        "step_times_batch": step_times_batch,
    }
    return Options(
        ngram=ngram,
        ignored_bounds="" if lookup == "ngram" else _format_bounds(speculative, settings),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=model_config.max_model_len,
        sources=sources,
        **values,
    )


def _check_method(method: Method, settings: Mapping[str, Any], model_config: Any) -> None:
    """Raises ValueError for settings that the runner of ``method`` does not support."""
    draft_on = settings.get("draft_on", "auto")
    if draft_on != "auto" and method not in ("v2", "ascend_v2", "beside"):
        raise ValueError(f"ngram_npu: draft_on: expected only in the V2 runner, got {draft_on!r}")
    if "k" in settings and method not in ("v2", "ascend_v2", "beside"):
        raise ValueError(
            "ngram_npu: k: expected only in the V2 runner, got 'auto'; in the V1 runner, end "
            "drafts by their cost: lookup='ladder' with token_cost, the cost of a token"
        )
    if method == "ngram_gpu" and getattr(model_config, "enable_prompt_embeds", False):
        # vLLM's own class has this limit too: docs/guides/vllm-versions.md.
        raise ValueError(
            "ngram_npu: enable_prompt_embeds: expected false, got true, with 'ngram_gpu' in the "
            "V1 runner: its text would be wrong; use method 'ngram' or the V2 runner"
        )
    has_store = settings.get("store") is not None
    if settings.get("prompt_scopes") and method not in ("v2", "ascend_v2", "beside"):
        raise ValueError(
            "ngram_npu: prompt_scopes: expected false, got true: only the V2 runner supports them"
        )
    if settings.get("store_feed") and settings.get("store") == "finish":
        raise ValueError(
            "ngram_npu: store: expected 'live' with store_feed, got 'finish': published text does "
            "not contain the ends of requests"
        )
    if has_store and settings.get("scope") == "required" and method in ("custom_class", "ngram"):
        raise ValueError(
            f"ngram_npu: scope: expected 'shared', got 'required': with {method!r} the V1 runner "
            "does not pass on the scopes of requests; use 'ngram_gpu'"
        )


def _check_value(name: str, value: Any) -> Any:
    if name in MAXIMA and not 0 <= (value := value or 0.0) <= MAXIMA[name]:
        raise ValueError(f"ngram_npu: {name}: expected 0 to {MAXIMA[name]}, got {value}")
    if (choices := CHOICES.get(name)) and value not in choices:
        raise ValueError(f"ngram_npu: {name}: expected one of {', '.join(choices)}, got {value!r}")
    if name == "store_feed" and value:
        parse_publishers(value)  # raises an error
        return value if isinstance(value, str) else ",".join(value)
    if name == "num_threads" and value < 0:
        raise ValueError(f"ngram_npu: num_threads: expected 0 or more, got {value}")
    return value


def vocabulary_digest(model_config: Any) -> str | None:
    """Returns the digest of the model's vocabulary; None if the server runs without a tokenizer.
    Loading the tokenizer takes seconds."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    tokenizers = importlib.import_module("vllm.tokenizers")
    return tokenizer_digest(tokenizers.cached_tokenizer_from_config(model_config).get_vocab())


def read_beside_option(vllm_config: Any) -> bool:
    """Returns the option ``beside``. Raises the errors of :func:`read_options`."""
    return bool(read_settings(vllm_config)[0].get("beside", False))


def read_k_option(vllm_config: Any) -> bool:
    """Returns whether the option ``k`` is ``"auto"``. Raises the errors of :func:`read_options`."""
    settings = read_settings(vllm_config)[0]
    return "k" in settings and _check_value("k", settings["k"]) == "auto"


def publishes_text(vllm_config: Any) -> bool:
    """Returns whether vLLM publishes KV events, which contain the text of requests."""
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(getattr(events, "enable_kv_cache_events", False))


def exchanges_scopes(vllm_config: Any) -> bool:
    """Returns whether other engines may read this engine's text, or this engine reads theirs. The
    scope of a request is then one that all of them compute alike. Raises as :func:`read_options`
    does."""
    feed = read_settings(vllm_config)[0].get("store_feed")
    return publishes_text(vllm_config) or bool(feed)


def engine_index(parallel_config: Any) -> int:
    """Returns the number of this engine in a data-parallel server. vLLM's ``data_parallel_rank`` is
    0 in every engine if the model is dense."""
    return getattr(parallel_config, "data_parallel_index", 0)


def read_settings(vllm_config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the values of all options that are set, and the places where they are set."""
    section = _read_section(getattr(vllm_config, "additional_config", None))
    environment = {}
    for variable, text in os.environ.items():
        if variable.startswith(PREFIX) and variable != CORRECTION:
            name = variable.removeprefix(PREFIX).lower()
            option_type = _find_option_type(name, f"the environment, as {variable}")
            try:
                environment[name] = _PARSERS[option_type](text)
            except (KeyError, ValueError):
                raise ValueError(
                    f"ngram_npu: {variable}: expected {option_type.__name__}, got {text!r}"
                ) from None
    sources = [_SECTION_PATH] if section else []
    sources += ["the environment"] if environment.keys() - section.keys() else []
    return {**environment, **section}, tuple(sources)


def _read_section(additional_config: object) -> Mapping[str, Any]:
    if not isinstance(additional_config, Mapping):  # another platform uses a class
        return {}
    for name in additional_config:
        if name != SECTION and "".join(filter(str.isalnum, str(name))).lower() == "ngramnpu":
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


def _find_option_type(name: str, source: str) -> type:
    if name in OPTION_TYPES:
        return OPTION_TYPES[name]
    hint = suggest_similar(name, OPTION_TYPES)
    if name in ("num_speculative_tokens", "k"):
        hint = "; num_speculative_tokens belongs in speculative_config"
    known = ", ".join(OPTION_TYPES)
    raise ValueError(f"ngram_npu: unknown option {name!r} in {source}; known: {known}{hint}")


def convert_cost_to_probability(token_cost: float) -> float:
    """Returns the ``min_draft_probability`` for a server on which verifying one more token of a
    request takes this share of a step.

    A draft token saves time if its probability exceeds its cost times the speed-up, which depends
    on the traffic. Factor and exponent were fitted on recorded conversations
    (docs/design/draft-length.md, "The limit of a draft's cost").
    """
    probability: float = 1.8 * token_cost**0.86
    return min(1.0, max(UNCUT, probability))


def _choose_lookup(settings: Mapping[str, Any], method: Method) -> str:
    """Returns which n-grams are looked up.

    ``auto`` depends on what the runner verifies. If the runner verifies all positions of a draft,
    the lookup is 1-16, because unlikely tokens cost no more than padding. If the runner verifies
    only the tokens found, and the host drafts, the lookup is a ladder that ends drafts by their
    cost. A store on the host needs a ladder too.
    """
    lookup: str = settings.get("lookup", "ngram")
    if lookup != "auto":
        return lookup
    on_host = method in ("custom_class", "ngram") or settings.get("draft_on") == "host"
    if on_host or "store" in settings:
        return "ladder"
    is_trimmed = method == "ngram_gpu" and settings.get("drafts") == "trimmed"
    return "ngram" if is_trimmed else "1-16"


def _uses_device_store(settings: Mapping[str, Any], method: Method, vllm_config: Any) -> bool:
    """Returns whether there is a store in the device's memory: with ``draft_on='device'``, and on
    CUDA by default if no option needs what only the host's store has, such as costs of draft
    tokens.

    Raises:
        ValueError: ``draft_on='device'`` or ``lookup='1-16'`` with an option, a device or a runner
            that needs the host's store.
    """
    draft_on, lookup = settings.get("draft_on", "auto"), settings.get("lookup", "ngram")
    if settings.get("store") is None or method not in ("v2", "beside"):
        return False
    device_type = getattr(getattr(vllm_config, "device_config", None), "device_type", "")
    speculative = vllm_config.speculative_config
    batches = vllm_config.max_concurrent_batches
    reason = ""
    if lookup not in ("1-16", "auto"):
        reason = f"lookup: expected 'auto' or '1-16', got {lookup!r}"
    elif draft_on == "host":
        reason = "draft_on: expected 'auto' or 'device', got 'host'"
    elif settings["store"] != "live":
        reason = f"store: expected 'live', got {settings['store']!r}"
    elif getattr(speculative, "enable_adaptive_verification", False):
        reason = "store: expected no enable_adaptive_verification, which needs costs"
    elif names := [name for name in COST_OPTIONS if settings.get(name) not in (None, "")]:
        reason = f"{names[0]}: expected none, got {settings[names[0]]!r}"
    elif settings.get("prompt_scopes"):
        reason = "prompt_scopes: expected false, got true"
    elif settings.get("engine") == "index":
        reason = "engine: expected no index, got 'index'"
    elif batches > MAX_DEVICE_BATCHES:
        reason = f"store: expected at most {MAX_DEVICE_BATCHES} batches in flight, got {batches}"
    elif draft_on == "auto" and device_type != "cuda":
        reason = f"draft_on: expected 'device', because the default of {device_type} is the host"
    elif draft_on == "auto" and not _library.has_kernel("device_store_append_", "cuda"):
        reason = "store: expected a build with CUDA kernels"
    if reason and (draft_on == "device" or lookup == "1-16"):
        raise ValueError(
            f"ngram_npu: {reason} for a store on the device; with lookup='auto' and "
            "draft_on='host' the store is on the host"
        )
    return not reason


def _choose_min_probability(settings: Mapping[str, Any], lookup: str) -> float | None:
    """Returns the configured minimum probability of a draft, or its default for this lookup."""
    min_probability: float | None = settings.get("min_draft_probability")
    token_cost = settings.get("token_cost")
    if token_cost is not None:
        if min_probability is not None:
            raise ValueError(
                "ngram_npu: token_cost: expected none with a min_draft_probability, which the cost "
                f"determines, got {token_cost}"
            )
        return convert_cost_to_probability(token_cost)
    is_default = settings.get("lookup") == "auto" and "min_draft_probability" not in settings
    return AUTO_MIN_PROBABILITY if is_default and lookup == "ladder" else min_probability


def _load_step_times(
    settings: Mapping[str, Any], lookup: str, verifies_padding: bool
) -> VerificationCost | None:
    """Returns the step times of the option ``step_times_file``; None without the option.

    Raises:
        ValueError: The file cannot be used, or the option has no effect.
    """
    path = settings.get("step_times_file")
    if not path:
        return None
    if "k" not in settings:
        reason = ""
        if verifies_padding:
            reason = "this runner verifies num_speculative_tokens tokens of every request"
        elif lookup != "ladder":
            reason = f"only drafts of lookup='ladder' end by their cost, got {lookup!r}"
        if reason:
            raise ValueError(
                f"ngram_npu: step_times_file: expected none without k='auto': {reason}"
            )
    try:
        return load_cost(path)
    except InputError as error:
        raise ValueError(f"ngram_npu: step_times_file: {error}") from None


def _format_bounds(speculative: Any, settings: Mapping[str, Any]) -> str:
    """Returns the ``prompt_lookup_*`` that are set, as text. vLLM's own methods always set both."""
    bounds = {name: settings.get(name) or getattr(speculative, name, None) for name in BOUNDS}
    return " ".join(f"{name}={value}" for name, value in bounds.items() if value)


def _choose_range(
    lookup: str, method: Method, speculative: Any, settings: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """Returns ``min_n`` and ``max_n``; None for a ladder, whose sizes are fixed."""
    if lookup != "ngram":
        return (1, 16) if lookup == "1-16" else (None, None)
    min_n: Any = settings.get(BOUNDS[0])
    max_n: Any = settings.get(BOUNDS[1])
    if method not in ("custom_class", "beside"):
        min_n, max_n = (getattr(speculative, name) for name in BOUNDS)
        for name, stock in zip(BOUNDS, (min_n, max_n), strict=True):
            if settings.get(name, stock) != stock:
                raise ValueError(
                    f"ngram_npu: {name}={settings[name]} contradicts speculative_config, which "
                    f"decides for vLLM's own methods and has {stock}"
                )
    elif min_n is None and max_n is None:
        # With a neural drafter, the length of the match decides which draft is used.
        min_n, max_n = 2, 16 if method == "beside" else 5
    else:  # as in vLLM: if only one of the two is set, the other is the same
        min_n, max_n = (max_n if min_n is None else min_n), (min_n if max_n is None else max_n)
    if min_n > max_n:
        raise ValueError(
            f"ngram_npu: prompt_lookup_min={min_n} is greater than prompt_lookup_max={max_n}"
        )
    return min_n, max_n


OPTION_TYPES: dict[str, type] = {
    **dict.fromkeys((*BOUNDS, "num_threads", "store_tokens"), int),
    **dict.fromkeys(("min_draft_probability", "token_cost", "beside_threshold"), float),
    "store_save_minutes": float,
    **dict.fromkeys(("match_policy", "lookup", "store", "store_seed", "store_file"), str),
    **dict.fromkeys(("costs_file", "engine", "drafts", "draft_on", "scope", "k"), str),
    "store_feed": str,
    "step_times_file": str,
    **dict.fromkeys(("overlap", "keep_drafting", "metrics", "beside", "dense_rows"), bool),
    "prompt_scopes": bool,
}
_FLAGS = {"1": True, "true": True, "0": False, "false": False}
_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    str: str,
    float: lambda text: None if text.lower() == "none" else float(text),
    bool: lambda text: _FLAGS[text.lower()],
}
