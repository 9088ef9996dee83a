"""Adds n-gram drafts to Hugging Face transformers (docs/guides/transformers.md).

:func:`drafting` makes `model.generate` use n-gram drafts for one request per call; transformers'
speculation does not support more. The text does not change. Calls may share a store.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.config import NgramConfig
from ngram_npu.proposer import NgramProposer
from ngram_npu.store import NgramStore

__all__ = ["DraftingStatistics", "NgramCandidates", "drafting"]

OLDEST_VERSION, NEWEST_VERSION = "4.57", "5.24"
"""Oldest and newest minor version of transformers that were tested."""


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


_VERSION = importlib.metadata.version("transformers")
if _parse_version(_VERSION) < _parse_version(OLDEST_VERSION):
    raise ImportError(
        f"ngram_npu.engines.transformers: expected transformers {OLDEST_VERSION} or later, "
        f"got {_VERSION}"
    )
if _parse_version(_VERSION) > _parse_version(NEWEST_VERSION):
    warnings.warn(
        f"ngram_npu.engines.transformers: transformers {_VERSION} is newer than {NEWEST_VERSION}, "
        "the newest tested version",
        stacklevel=2,
    )

from transformers import GenerationConfig, GenerationMixin  # noqa: E402
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer  # noqa: E402
from transformers.generation.candidate_generator import CandidateGenerator  # noqa: E402
from transformers.generation.stopping_criteria import StoppingCriteriaList  # noqa: E402

DEFAULT_CONFIG = NgramConfig(k=8, min_draft_probability=0.12)
"""Drafts by cost: text that seldom repeats is then hardly slower than without drafts."""

_ARGUMENTS = {"attention_mask", "generation_config", "input_ids", "inputs", "streamer", "tokenizer"}
"""Arguments of `model.generate` that `drafting` accepts, besides the fields of a config."""
_CONFIG_FIELDS = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "remove_invalid_values"),
    *("repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("decoder_start_token_id",),  # of encoder-decoder models
    *("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"),
    *("output_attentions", "early_stopping", "length_penalty", "disable_compile"),
    "transformers_version",
}
"""Fields of a generation config that may have any value, because drafts then change no token."""
_IMAGE_ARGUMENTS = {
    *("image_grid_thw", "image_sizes", "mm_token_type_ids", "pixel_attention_mask"),
    *("pixel_values", "token_type_ids"),
}
"""Arguments of `model.generate` that `drafting` accepts for `_IMAGE_MODELS`."""
_IMAGE_MODELS = {
    f"{family}ForConditionalGeneration"
    for family in (
        *("Gemma3", "Idefics3", "InternVL", "Llava", "LlavaNext", "Mistral3"),
        *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL"),
    )
}
_TESTED_MODELS = _IMAGE_MODELS | {"BloomForCausalLM", "Phi3ForCausalLM"}
"""Tested models that read more than text or prepare their inputs themselves. Other such models are
rejected, because they may compute wrong logits for several new tokens."""
_REPLACED_METHODS = (
    *("_prepare_generation_config", "_get_stopping_criteria", "_get_candidate_generator"),
)
"""Methods of the model that `drafting` replaces."""
_INHERITED_METHODS = (
    *("generate", "_sample", "_assisted_decoding", "_get_logits_processor"),
    *_REPLACED_METHODS,
)
"""Methods that a model must inherit from transformers; otherwise drafts could change the text."""


class _StoppingCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Never stops at the prompt, which transformers before version 5.17 also checks."""

    prompt_length = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.prompt_length:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        done: torch.Tensor = super().__call__(input_ids, scores, **options)
        return done


@dataclass
class DraftingStatistics:
    """Counts of all calls of `model.generate` within one `drafting` block."""

    steps: int = 0
    """Forward passes of the model. Each generates the accepted tokens and one more."""
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per draft token, 0 to 1."""
        return self.accepted_tokens / max(1, self.draft_tokens)

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.accepted_tokens / max(1, self.steps)


class NgramCandidates(CandidateGenerator):  # type: ignore[misc]
    """A candidate generator for transformers that drafts with :class:`NgramProposer`.

    Use one instance per call of `generate`, because earlier tokens must not change. The first call,
    with the prompt, drafts nothing, so its forward pass, also with images, is as without drafts.
    """

    def __init__(
        self,
        config: NgramConfig,
        max_length: int,
        stopping_criteria: Callable[[torch.Tensor, None], torch.Tensor],
        *,
        store: NgramStore | None = None,
        statistics: DraftingStatistics | None = None,
    ) -> None:
        """
        Args:
            max_length: maximum number of tokens of prompt and output.
            stopping_criteria: criteria that are checked for each draft token. A draft ends before
                the first token that would end the output, because transformers checks only the last
                token that it accepts in a step.
            store: a store in host memory that several calls of `generate` share, one after the
                other.
            statistics: counts to add to.
        """
        self._proposer = NgramProposer(config, store=store)
        self._statistics = statistics or DraftingStatistics()
        if store is not None:
            store.begin_requests(0)
        self._tokens: npt.NDArray[np.int32] = np.zeros((1, max_length), np.int32)
        self._count: npt.NDArray[np.int32] = np.zeros(1, np.int32)
        self._stopping_criteria = stopping_criteria

    def get_candidates(
        self, input_ids: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns [1, T+D], the tokens [1, T] with drafts, and None instead of draft logits."""
        num_known, length = int(self._count[0]), input_ids.shape[1]
        self._tokens[0, num_known:length] = input_ids[0, num_known:].cpu().numpy()
        self._count[0] = length
        if num_known == 0:
            return input_ids, None
        num_sampled = np.array([length - num_known], np.int32)
        drafts = self._proposer.propose(self._tokens, self._count, num_sampled=num_sampled)
        draft = drafts.draft_token_ids[0, : int(drafts.num_draft_tokens[0])]
        draft_ids = torch.from_numpy(draft.astype(np.int64)).to(input_ids.device)
        candidates = torch.cat([input_ids, draft_ids[None]], 1)
        for end in range(length, candidates.shape[1]):
            if self._stopping_criteria(candidates[:, : end + 1], None).all():
                candidates = candidates[:, :end]
                break
        self._statistics.draft_tokens += candidates.shape[1] - length
        return candidates, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> None:
        """Counts the tokens that a step has accepted. The next call of `get_candidates` receives
        them."""
        self._statistics.steps += 1
        self._statistics.accepted_tokens += input_ids.shape[1] - int(self._count[0]) - 1


@contextmanager
def drafting(
    model: Any, config: NgramConfig = DEFAULT_CONFIG, *, store: NgramStore | None = None
) -> Iterator[DraftingStatistics]:
    """Makes `model.generate` use n-gram drafts within the block, and yields their counts::

        with drafting(model) as statistics:
            model.generate(**inputs)
        print(statistics.tokens_per_step, statistics.acceptance_rate)

    The text is the same as without drafts. `model.generate` raises a ValueError that names any
    argument or option for which this was not tested.

    Args:
        model: a causal LM of transformers, with transformers' text generation and attention cache.
        config: drafting options; by default, drafts end by their cost (`DEFAULT_CONFIG`).
        store: a store in host memory. Later calls also draft from the output of earlier calls,
            except for the tokens of their last step.

    Raises:
        TypeError: drafts could change the model's text, or the model is a wrapper (PeftModel).
        RuntimeError: blocks are nested, or this version of transformers has another interface.
    """
    _check_model(model)
    if config.vocab_size is None:
        # A store may contain the text of a model with a larger vocabulary.
        config = replace(config, vocab_size=model.config.get_text_config().vocab_size)
    statistics = DraftingStatistics()
    generate, prepare_config = model.generate, model._prepare_generation_config
    get_stopping_criteria = model._get_stopping_criteria
    parameters = inspect.signature(generate)

    @functools.wraps(generate)
    def checked_generate(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(model, parameters.bind(*args, **kwargs).arguments)
        return generate(*args, **kwargs)

    def prepare_checked_config(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        settings, inputs = prepare_config(*args, **kwargs)
        _check_fields(settings)
        settings.prompt_lookup_num_tokens = config.k  # turns speculation on
        return settings, inputs

    def keep_stopping_criteria(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        criteria = get_stopping_criteria(*args, generation_config=generation_config, **kwargs)
        generation_config._stopping_criteria = _StoppingCriteria(criteria)
        return generation_config._stopping_criteria

    def make_candidates(
        *, generation_config: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], **_: Any
    ) -> NgramCandidates:
        if "cache" in model_kwargs:  # since version 5.24
            cache = model_kwargs["cache"]
        else:  # in version 5.0 the model chooses the cache, maybe of another type
            cache = model_kwargs.setdefault("past_key_values", DynamicCache())
        _check_cache(cache)
        criteria = generation_config._stopping_criteria
        criteria.prompt_length = input_ids.shape[1]
        length = generation_config.max_length
        return NgramCandidates(config, length, criteria, store=store, statistics=statistics)

    replacements = {
        "generate": checked_generate,
        "_prepare_generation_config": prepare_checked_config,
        "_get_stopping_criteria": keep_stopping_criteria,
        "_get_candidate_generator": make_candidates,
    }
    vars(model).update(replacements)
    try:
        yield statistics
    finally:
        for name in replacements:
            delattr(model, name)


def _check_model(model: Any) -> None:
    """Raises an error if drafts could change the model's text."""
    model_class = type(model)
    if "_get_candidate_generator" in vars(model):
        raise RuntimeError("drafting: already active for this model; do not nest the blocks")
    for name in _REPLACED_METHODS:
        method = getattr(GenerationMixin, name, None)
        if method is None or "generation_config" not in inspect.signature(method).parameters:
            raise RuntimeError(
                f"drafting: expected a method {name}(generation_config, ...) of the model, which "
                f"transformers {_VERSION} does not have; newest tested version: {NEWEST_VERSION}"
            )

    def inherits(name: str) -> bool:
        stock = vars(GenerationMixin)[name]
        return getattr(model_class, name, None) is stock and name not in vars(model)

    overridden = [name for name in _INHERITED_METHODS if not inherits(name)]
    reason = ""
    if overridden:
        reason = (
            f"its {overridden[0]} is not transformers' own (of a PeftModel, pass get_base_model())"
        )
    elif model.config.is_encoder_decoder:
        reason = "it has an encoder"
    elif model._is_stateful or not model._supports_default_dynamic_cache():
        reason = "rejected drafts can be removed only from a cache of attention"
    elif model_class.__name__ not in _TESTED_MODELS and (
        model.config.sub_configs or not inherits("prepare_inputs_for_generation")
    ):
        reason = "it reads more than text or prepares its inputs itself, and was not tested"
    elif any(
        word in str(getattr(part, "rope_type", ""))
        for part in model.modules()
        for word in ("dynamic", "longrope")
    ):
        reason = "its rotary embeddings depend on the length of the text, drafts included"
    elif any("quantized.dynamic" in type(part).__module__ for part in model.modules()):
        reason = "it quantizes activations per call, so tokens depend on the drafts beside them"
    if reason:
        raise TypeError(f"drafting: model: not supported: {model_class.__name__}: {reason}")


def _check_arguments(model: Any, arguments: dict[str, Any]) -> None:
    values = {**arguments, **arguments.get("kwargs", {})}
    known_arguments = _ARGUMENTS | vars(GenerationConfig()).keys() | {"kwargs"}
    if type(model).__name__ in _IMAGE_MODELS:
        known_arguments |= _IMAGE_ARGUMENTS
    _raise_if_any({name: value for name, value in values.items() if name not in known_arguments})
    if "prepare_inputs_for_generation" in vars(model):
        raise ValueError("drafting: prompt learning of a PeftModel is not supported")
    ids = values.get("inputs", values.get("input_ids"))
    if ids is not None and len(ids) != 1:
        raise ValueError(f"drafting: input_ids: expected one request per call, got {len(ids)}")


def _check_fields(settings: Any) -> None:
    default = GenerationConfig()
    defaults = vars(default) | getattr(default, "_get_default_generation_params", dict)()
    unsupported = {}
    for name, value in vars(settings).items():
        if name[0] == "_" or name in _CONFIG_FIELDS or value == defaults.get(name):
            continue
        # False is the same as None, but must not disable an option that is on by default.
        if value is False and defaults.get(name) is None:
            continue
        unsupported[name] = value
    _raise_if_any(unsupported)


def _raise_if_any(unsupported: dict[str, Any]) -> None:
    """Raises an error that names the values that are not None."""
    options = [f"{name}={value!r:.60}" for name, value in unsupported.items() if value is not None]
    if options:
        raise ValueError(
            f"drafting: not supported, because drafts could change the text: {', '.join(options)}; "
            "call generate outside of the block"
        )


def _check_cache(cache: Any) -> None:
    """Raises an error if keys and values of rejected drafts cannot be removed from the cache."""
    unsupported = [type(cache)]
    if type(cache) is DynamicCache:
        unsupported = [
            type(layer)
            for layer in cache.layers
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
        ]
    if unsupported:
        raise ValueError(
            "drafting: model: expected a cache of full or sliding attention, from which rejected "
            f"drafts can be removed, got {unsupported[0].__name__}"
        )
