"""Our options, which every drafter reads: from the environment, or from vLLM's
``additional_config`` under our own key, since other backends use it too."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ngram_npu.config import INDEX_POLICY, MAX_DRAFT_TOKENS, STORE_TOKENS, NgramConfig
from ngram_npu.draft_costs import Costs
from ngram_npu.drafting import uses_index
from ngram_npu.store import tokenizer_digest

SECTION = "ngram_npu"
_WHERE = f"additional_config[{SECTION!r}]"
PREFIX = "NGRAM_NPU_VLLM_"
CORRECTION = PREFIX + "CORRECTION"
"""No option: read where the plugin is loaded, before there is a configuration."""
BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")
SIZES = {"consecutive": "ngram", "ladder": "ladder"}
"""The older spelling of a lookup."""
CHOICES: dict[str, Collection[str]] = {
    "drafts": ("padded", "trimmed"),
    "draft_on": ("auto", "device", "host"),
    "scope": ("shared", "required"),
    "sizes": SIZES,
    "lookup": ("ngram", "1-16", "ladder", "auto"),
}
MOST = {"store_save_minutes": 1_000_000, "beside_threshold": MAX_DRAFT_TOKENS}
STORE_OPTIONS = ("store_tokens", "store_seed", "store_file", "store_save_minutes", "scope")
LEAST_PROBABILITY = 0.177
"""Suits a server on which verifying one more token costs a twentieth of a step."""
UNCUT = sys.float_info.min
"""A ``min_draft_probability`` that cuts no draft: at 2**-1022, 64 tokens of the highest cost,
2**(-255 / 16) each, are likely enough."""

Method = Literal["custom_class", "ngram", "ngram_gpu", "v2", "ascend_v2", "beside"]
"""One of V1's, any n-gram method of the V2 runner (``v2``) or of vLLM-Ascend's (``ascend_v2``), or
a neural drafter of it."""


@dataclass(frozen=True)
class Options:
    """All settings of a proposer in vLLM. docs/guides/vllm.md says what each does."""

    ngram: NgramConfig
    lookup: str
    """``"ngram"``, ``"1-16"`` or ``"ladder"``: which n-grams are looked up."""
    overruled: str
    """What was given of ``prompt_lookup_*`` and has no effect, because ``lookup`` decides."""
    max_num_seqs: int
    max_model_len: int
    min_draft_probability: float | None
    """As given. That of ``ngram`` is ``UNCUT`` where vLLM verifies all draft tokens: a shorter
    draft would be filled up, and its filling tokens cost as much and are seldom accepted."""
    keep_drafting: bool
    beside: bool
    """Whether n-gram drafts are put beside those of a neural drafter."""
    sources: tuple[str, ...]
    """Where options were given; empty: all are defaults."""
    engine: str = "auto"
    draft_on: str = "auto"
    num_threads: int = 1
    drafts: str = "padded"
    """For ``ngram_gpu``: ``"padded"`` or ``"trimmed"``."""
    metrics: bool = False
    store_tokens: int | None = None
    """None: 16 million, or more if its slots need it."""
    store_seed: str = ""
    store_file: str = ""
    """Of this engine; both are empty if there is none."""
    store_save_minutes: float = 1.0
    scope: str = "shared"
    """``"required"``: a request must say to whom it belongs."""
    beside_threshold: float = 0.0
    dense_rows: bool = True

    def uses_index(self, device_type: str = "cpu") -> bool:
        """:func:`ngram_npu.drafting.uses_index` for rows as long as the model's.

        Raises:
            ValueError: an index or a ladder on a device other than the CPU.
        """
        rows: Any = {"capacity": self.max_model_len, "device_type": device_type}
        says = "ngram_npu: "
        return uses_index(self.ngram, self.engine, short=INDEX_POLICY.short_context, prefix=says, **rows)

    def check_device(self, method: Method, device_type: str) -> None:
        """
        Raises:
            ValueError: what is asked for is not on the device where ``method`` drafts; one line.
        """
        if method in ("v2", "ascend_v2", "beside"):
            self.drafts_on_host(device_type)
        else:
            self.uses_index("cpu" if method in ("custom_class", "ngram") else device_type)

    def drafts_on_host(self, device_type: str) -> bool:
        """Whether the V2 runner's drafts are made on the host: ``auto`` does so for a store, which
        is nowhere else, and where the rows are on the host too and an index pays.

        Raises:
            ValueError: what is asked for is not on the device; one line.
        """
        if self.draft_on == "host":
            return True
        store = self.ngram.store is not None
        if self.draft_on == "auto" and (store or device_type == "cpu"):
            return store or self.uses_index(device_type)
        try:
            if store:
                raise ValueError("ngram_npu: store: expected none on the device")
            return self.uses_index("the device")
        except ValueError as error:
            raise ValueError(f"{error}; draft_on='host' drafts there") from None


def method_of(vllm_config: Any) -> Method | None:
    """Which of our drafters this configuration asks for; None: none of them.

    Raises:
        ValueError: an option that is unknown or malformed; one line.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    stock = getattr(speculative, "method", None)
    if stock is None or getattr(vllm_config, "model_config", None) is None:
        return None
    in_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    if stock in ("ngram", "ngram_gpu"):
        v2: Method = "v2" if importlib.util.find_spec("vllm_ascend") is None else "ascend_v2"
        return v2 if in_v2 else stock
    if stock == "custom_class":
        ours = str(getattr(speculative, "model", "")).startswith("ngram_npu.")
        return "custom_class" if ours else None
    return "beside" if in_v2 and wants_beside(vllm_config) else None


def read_options(vllm_config: Any, method: Method) -> Options:
    """The options for ``method``. For the V2 runner ``match_policy`` defaults to ``latest`` (in
    vLLM-Ascend's to ``earliest``), and drafts may exceed ``max_model_len``, as in that runner's own
    methods. Beside a neural drafter ``overlap`` defaults to true, since the runner verifies all
    places of a draft anyway.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """
    speculative = vllm_config.speculative_config
    given, sources = _given(vllm_config)
    given = {name: _checked(name, value) for name, value in given.items()}
    max_model_len = vllm_config.model_config.max_model_len
    lookup, least = _lookup(given, method)
    low, high = _range(lookup, method, speculative, given)
    in_v2 = method in ("v2", "ascend_v2", "beside")
    draft_on = given.get("draft_on", "auto")
    if draft_on != "auto" and not in_v2:
        raise ValueError(f"ngram_npu: draft_on: expected only in the V2 runner, got {draft_on!r}")
    latest = lookup == "1-16" or (in_v2 and method != "ascend_v2")
    costs, model_config = None, vllm_config.model_config
    if method == "ngram_gpu" and getattr(model_config, "enable_prompt_embeds", False):
        # With vLLM's own class too: docs/guides/vllm-versions.md.
        raise ValueError(
            "ngram_npu: enable_prompt_embeds: expected false, got true, with 'ngram_gpu' in the "
            "V1 runner, whose text would be wrong; use method 'ngram' or the V2 runner"
        )
    try:
        if path := given.get("costs_file"):
            costs = Costs.load(path, tokenizer=vocabulary_digest(model_config))
        ngram = NgramConfig(
            prompt_lookup_min=low,
            prompt_lookup_max=high,
            num_speculative_tokens=speculative.num_speculative_tokens,
            match_policy=given.get("match_policy", "latest" if latest else None),
            overlap=given.get("overlap", True if method == "beside" or lookup == "1-16" else None),
            max_len=None if in_v2 else max_model_len,
            sizes="ladder" if lookup == "ladder" else "consecutive",
            min_draft_probability=least,
            store=given.get("store"),
            store_tokens=given.get("store_tokens", STORE_TOKENS),
            costs=costs,
        )
        engine = given.get("engine", "auto")
        uses_index(ngram, engine, capacity=0, short=0, device_type="cpu", prefix="")
    except (TypeError, ValueError) as error:
        # The user knows only vLLM's names, so the message explains our short ones.
        names = "min_n, max_n, k: prompt_lookup_min, prompt_lookup_max, num_speculative_tokens"
        raise ValueError(f"ngram_npu: {error} ({names})") from error
    least = ngram.min_draft_probability
    adaptive = getattr(speculative, "enable_adaptive_verification", False)
    padded = method == "ngram_gpu" and given.get("drafts") != "trimmed"
    if least is not None and (padded or (in_v2 and not adaptive)):
        ngram = replace(ngram, min_draft_probability=UNCUT)
    for name in STORE_OPTIONS:
        if name in given and ngram.store is None:
            raise ValueError(f"ngram_npu: {name}: expected none without a store")
    if given.get("scope") == "required" and method in ("custom_class", "ngram"):
        raise ValueError(
            "ngram_npu: scope: expected 'shared', got 'required': the V1 runner does not tell "
            f"{method!r} the scopes of requests; use 'ngram_gpu'"
        )
    if given.get("store_file") and (number := engine_index(vllm_config.parallel_config)):
        given["store_file"] += f".{number}"
    # Layers that keep a state instead of a KV cache (Mamba, GDN). Without vLLM's fix, a step
    # without drafts after one with accepted drafts corrupts this state.
    recurrent = any(getattr(model_config, name, False) for name in ("has_inner_state", "is_hybrid"))
    decided = {
        "beside": method == "beside",
        "keep_drafting": given.get("keep_drafting", recurrent),
        "min_draft_probability": least,
        "lookup": lookup,
    }
    as_given = {field.name: given[field.name] for field in fields(Options) if field.name in given}
    return Options(
        ngram=ngram,
        overruled="" if lookup == "ngram" else _bounds(speculative, given),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=max_model_len,
        sources=sources,
        **as_given | decided,
    )


def _checked(name: str, value: Any) -> Any:
    if name in MOST and not 0 <= (value := value or 0.0) <= MOST[name]:
        raise ValueError(f"ngram_npu: {name}: expected 0 to {MOST[name]}, got {value}")
    if (known := CHOICES.get(name)) and value not in known:
        raise ValueError(f"ngram_npu: {name}: expected one of {', '.join(known)}, got {value!r}")
    if name == "num_threads" and value < 0:
        raise ValueError(f"ngram_npu: num_threads: expected 0 or more, got {value}")
    return value


def vocabulary_digest(model_config: Any) -> str | None:
    """The digest of the model's vocabulary; None if the server runs without a tokenizer. Loading it
    takes seconds."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    tokenizers = importlib.import_module("vllm.tokenizers")
    return tokenizer_digest(tokenizers.cached_tokenizer_from_config(model_config).get_vocab())


def wants_beside(vllm_config: Any) -> bool:
    """The option ``beside``. Raises as :func:`read_options`."""
    return bool(_given(vllm_config)[0].get("beside", False))


def scope_option(vllm_config: Any) -> str | None:
    """The option ``scope``; None without a store. Raises as :func:`read_options`."""
    given = _given(vllm_config)[0]
    return str(given.get("scope", "shared")) if given.get("store") else None


def engine_index(parallel_config: Any) -> int:
    """The number of this engine in a data-parallel server. vLLM's ``data_parallel_rank`` is 0 in
    every engine if the model is dense."""
    return getattr(parallel_config, "data_parallel_index", 0)


def _given(vllm_config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    section = _section(getattr(vllm_config, "additional_config", None))
    environment = {}
    for variable, text in os.environ.items():
        if variable.startswith(PREFIX) and variable != CORRECTION:
            name = variable.removeprefix(PREFIX).lower()
            kind = _kind_of(name, f"the environment, as {variable}")
            try:
                environment[name] = _PARSERS[kind](text)
            except (KeyError, ValueError):
                raise ValueError(
                    f"ngram_npu: {variable}: expected {kind.__name__}, got {text!r}"
                ) from None
    sources = [_WHERE] if section else []
    sources += ["the environment"] if environment.keys() - section.keys() else []
    return {**environment, **section}, tuple(sources)


def _section(additional_config: object) -> Mapping[str, Any]:
    if not isinstance(additional_config, Mapping):  # another platform's own class
        return {}
    for name in additional_config:
        if name != SECTION and "".join(filter(str.isalnum, str(name))).lower() == "ngramnpu":
            raise ValueError(
                f"ngram_npu: unknown section {name!r} in additional_config; did you mean "
                f"{SECTION!r}?"
            )
    section: Any = additional_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"ngram_npu: {_WHERE}: expected a mapping of options, got {section!r}")
    for name, value in section.items():
        kind = _kind_of(str(name), _WHERE)
        fits = isinstance(value, (int, float, type(None)) if kind is float else kind)
        if not fits or (kind is not bool and isinstance(value, bool)):
            raise ValueError(
                f"ngram_npu: {name} in {_WHERE}: expected {kind.__name__}, got {value!r}"
            )
    return section


def _kind_of(name: str, where: str) -> type:
    if name in _KINDS:
        return _KINDS[name]
    hint = ""
    if name in ("num_speculative_tokens", "k"):
        hint = "; num_speculative_tokens belongs in speculative_config"
    elif similar := difflib.get_close_matches(name, _KINDS, n=1):
        hint = f"; did you mean {similar[0]!r}?"
    known = ", ".join(_KINDS)
    raise ValueError(f"ngram_npu: unknown option {name!r} in {where}; known: {known}{hint}")


def _lookup(given: Mapping[str, Any], method: Method) -> tuple[str, float | None]:
    """Which n-grams are looked up, and the least probability of a draft.

    ``auto`` goes by what the runner verifies. Where that is all of a draft, 1-16: a worse guess
    costs no more than a filling token. Where it is what was found and the host drafts, a ladder
    whose drafts end by their cost; so too with a store, which needs one.
    """
    least = given.get("min_draft_probability")
    older = SIZES[given.get("sizes", "consecutive")]
    lookup = given.get("lookup", older)
    if "sizes" in given and older != lookup:
        raise ValueError(
            f"ngram_npu: lookup={lookup!r} contradicts sizes={given['sizes']!r}, its older spelling"
        )
    if lookup != "auto":
        return lookup, least
    on_host = method in ("custom_class", "ngram") or given.get("draft_on") == "host"
    if on_host or "store" in given:
        return "ladder", given.get("min_draft_probability", LEAST_PROBABILITY)
    trimmed = method == "ngram_gpu" and given.get("drafts") == "trimmed"
    return ("ngram" if trimmed else "1-16"), least


def _bounds(speculative: Any, given: Mapping[str, Any]) -> str:
    """What was given of ``prompt_lookup_*``; for vLLM's own methods they are always set."""
    found = {name: given.get(name) or getattr(speculative, name, None) for name in BOUNDS}
    return " ".join(f"{name}={value}" for name, value in found.items() if value)


def _range(
    lookup: str, method: Method, speculative: Any, given: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """``min_n`` and ``max_n``. None: the ladder's own."""
    if lookup != "ngram":
        return (1, 16) if lookup == "1-16" else (None, None)
    low: Any = given.get(BOUNDS[0])
    high: Any = given.get(BOUNDS[1])
    if method not in ("custom_class", "beside"):
        low, high = (getattr(speculative, name) for name in BOUNDS)
        for name, stock in zip(BOUNDS, (low, high), strict=True):
            if given.get(name, stock) != stock:
                raise ValueError(
                    f"ngram_npu: {name}={given[name]} contradicts speculative_config, which "
                    f"decides for vLLM's own methods and says {stock}"
                )
    elif low is None and high is None:
        # Beside a neural drafter the length of the match decides.
        low, high = 2, 16 if method == "beside" else 5
    else:  # vLLM's rule: if only one of the two is given, the other is the same
        low, high = (high if low is None else low), (low if high is None else high)
    if low > high:
        raise ValueError(
            f"ngram_npu: prompt_lookup_min={low} is greater than prompt_lookup_max={high}"
        )
    return low, high


_KINDS: dict[str, type] = {
    **dict.fromkeys((*BOUNDS, "num_threads", "store_tokens"), int),
    **dict.fromkeys(("min_draft_probability", "beside_threshold", "store_save_minutes"), float),
    **dict.fromkeys(("match_policy", "lookup", "sizes", "store", "store_seed", "store_file"), str),
    **dict.fromkeys(("costs_file", "engine", "drafts", "draft_on", "scope"), str),
    **dict.fromkeys(("overlap", "keep_drafting", "metrics", "beside", "dense_rows"), bool),
}
_FLAGS = {"1": True, "true": True, "0": False, "false": False}
_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    str: str,
    float: lambda text: None if text.lower() == "none" else float(text),
    bool: lambda text: _FLAGS[text.lower()],
}
