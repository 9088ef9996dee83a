"""Drafts in Hugging Face transformers. Guide: docs/guides/transformers.md.

:func:`drafting` makes `model.generate` use our drafts (one request per call, a limit of
transformers' speculation); :func:`generate` speculates for a whole batch. Neither changes the text.
If the config asks for a store, all calls within one `drafting` block share a store, and so do the
requests of one `generate`.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ngram_npu.config import NgramConfig
from ngram_npu.drafting import make_store
from ngram_npu.proposer import NgramProposer
from ngram_npu.store import NgramStore

__all__ = ["NgramCandidates", "drafting", "generate"]

OLDEST, NEWEST = "4.57", "5.23"
"""Oldest and newest minor version of transformers that the tests have run with."""


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


_VERSION = importlib.metadata.version("transformers")
if _parsed(_VERSION) < _parsed(OLDEST):
    raise ImportError(
        f"ngram_npu.transformers: expected transformers {OLDEST} or later, got {_VERSION}"
    )
if _parsed(_VERSION) > _parsed(NEWEST):
    warnings.warn(
        f"ngram_npu.transformers: transformers {_VERSION} is newer than {NEWEST}, the last one "
        "that was tried",
        stacklevel=2,
    )

from transformers.generation.candidate_generator import CandidateGenerator  # noqa: E402


class NgramCandidates(CandidateGenerator):  # type: ignore[misc]
    """A candidate generator for transformers that drafts with :class:`NgramProposer`.

    Use one per call of `generate`: tokens that it has seen must not change.
    """

    def __init__(
        self,
        config: NgramConfig,
        max_length: int,
        stop_token_ids: Iterable[int] = (),
        *,
        store: NgramStore | None = None,
    ) -> None:
        """
        Args:
            max_length: tokens of prompt and output together.
            stop_token_ids: a draft ends before these tokens, as transformers' own drafts do.
            store: a store that several calls of `generate` share, one after the other.
        """
        self._proposer = NgramProposer(config, store=store)
        self._proposer.reset(np.zeros(1, np.int32))  # the previous call has ended
        self._tokens: npt.NDArray[np.int32] = np.zeros((1, max_length), np.int32)
        self._count: npt.NDArray[np.int32] = np.zeros(1, np.int32)
        self._stops = np.array(list(stop_token_ids), np.int32)

    def get_candidates(
        self, input_ids: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[1, T] the tokens so far -> [1, T+D] with drafts, and None instead of draft logits."""
        known, length = int(self._count[0]), input_ids.shape[1]
        self._tokens[0, known:length] = input_ids[0, known:].cpu().numpy()
        self._count[0] = length
        # The last token counts as sampled, also for a prompt; a store adds tokens as the row grows.
        drafts = self._proposer.propose(self._tokens, self._count, num_sampled=np.ones(1, np.int32))
        # One more token follows the drafts, within max_length.
        room = max(0, self._tokens.shape[1] - length - 1)
        found = drafts.draft_token_ids[0, : min(int(drafts.num_draft_tokens[0]), room)]
        stops = np.flatnonzero(np.isin(found, self._stops))
        if len(stops):
            found = found[: stops[0]]
        tail = torch.from_numpy(found.astype(np.int64)).to(input_ids.device)
        return torch.cat([input_ids, tail[None]], 1), None

    def update_candidate_strategy(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the next call sees the accepted tokens."""


@contextmanager
def drafting(model: Any, config: NgramConfig | None = None) -> Iterator[None]:
    """Within the block, `model.generate` speculates with our drafts::

        with drafting(model, NgramConfig(k=5)):
            model.generate(**inputs)

    Args:
        model: a causal LM of transformers.
        config: None: `NgramConfig()`. Its `k` is the number of draft tokens. With a store, later
            calls within the block also draft from the output of earlier ones, except for the tokens
            of its last step.

    Raises:
        RuntimeError: a block within a block, or a transformers whose generation has other parts.
    """
    ngram = config or NgramConfig()
    store = make_store(ngram, 1, kind="numpy") if ngram.store else None

    def candidates(*, generation_config: Any, **_: Any) -> NgramCandidates:
        stops = generation_config._eos_token_tensor
        return NgramCandidates(
            ngram,
            generation_config.max_length,
            [] if stops is None else stops.tolist(),
            store=store,
        )

    if "_get_candidate_generator" in vars(model):
        raise RuntimeError("drafting: already active for this model; do not nest the blocks")
    stock = getattr(model, "_get_candidate_generator", None)
    if stock is None or "generation_config" not in inspect.signature(stock).parameters:
        raise RuntimeError(
            "drafting: expected _get_candidate_generator(generation_config, ...) of the model, "
            f"which transformers {_VERSION} lacks; the last version tried is {NEWEST}"
        )
    generate = model.generate

    @functools.wraps(generate)
    def speculating(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("prompt_lookup_num_tokens", ngram.k)  # turns speculation on
        return generate(*args, **kwargs)

    model._get_candidate_generator, model.generate = candidates, speculating
    try:
        yield
    finally:
        del model._get_candidate_generator, model.generate


_READ = {
    "do_sample",
    "eos_token_id",
    "max_new_tokens",
    "pad_token_id",
    "temperature",
    "top_k",
    "top_p",
}
_IGNORED = {"_from_model_config", "bos_token_id", "transformers_version"}
_WITHOUT_EFFECT = {
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "typical_p": 1.0,
    "use_cache": True,
}
"""Values with which `generate` does what `model.generate` does; others are None, 0 and False."""
_TOP_K = 50
"""Of transformers, where a sampling config has none."""


def _settings(model: Any, given: Any, options: dict[str, Any]) -> Any:
    """The generation config with the options, checked for what the runner lacks."""
    settings = copy.deepcopy(model.generation_config if given is None else given)
    for name in ("eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:
            setattr(settings, name, getattr(model.generation_config, name))
    other = settings.update(**options)
    usual = type(settings)()
    for name, value in settings.to_diff_dict().items():
        without = (None, False, getattr(usual, name, None), _WITHOUT_EFFECT.get(name))
        if name not in _READ | _IGNORED and value not in without:
            other[name] = value
    if other:
        raise ValueError(
            f"generate: not supported: {', '.join(f'{n}={v!r:.60}' for n, v in other.items())}; "
            f"supported of a generation config: {', '.join(sorted(_READ))}"
        )
    if settings.max_new_tokens is None:
        raise ValueError("generate: max_new_tokens: expected a number, got None")
    return settings


def generate(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    generation_config: Any = None,
    streamer: Any = None,
    ngram: NgramConfig | None = None,
    seed: int = 0,
    max_rows: int = 64,
    store: NgramStore | None = None,
    **options: Any,
) -> torch.Tensor:
    """Generates for a batch, with speculation, which `model.generate` supports only for a single
    request.

    The batch runs on :mod:`ngram_npu.runner` with a paged KV cache: prompts may have any lengths,
    and finished requests take no time. The model's attention is replaced during the call, so
    nothing else may use the model meanwhile.

    Args:
        model: a causal LM of transformers, in evaluation mode.
        input_ids: [B, P] integer; prompts padded on either side.
        attention_mask: [B, P], 0 at padding; None: no padding.
        generation_config: of transformers; None: the model's. It and the `options` say
            `max_new_tokens` per request, `do_sample`, `temperature`, `top_k`, `top_p`,
            `eos_token_id` and `pad_token_id` (without one: the first end token), as in
            `model.generate`.
        streamer: of transformers, for a single request.
        ngram: settings of the drafter; None: `NgramConfig()`. If it asks for a store, the requests
            of this call share one.
        seed: of sampling. It alone decides the text, not torch's generator.
        max_rows: requests that run at once.
        store: a store shared by several calls, of ``kind="torch"``; needs a
            `min_draft_probability`.
        options: fields of `generation_config` to change.

    Returns:
        [B, P+N] as from `model.generate`: the prompts as they were given, then the generated
        tokens, then padding; N is the length of the longest output.

    Raises:
        ValueError: shapes that do not fit, an empty prompt, no padding token, a setting that is not
            supported, a streamer for several requests, or a store that the config or the device
            cannot use.
    """
    from ngram_npu.runner import Runner, RunnerConfig, Sampling, paged

    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if input_ids.ndim != 2 or mask.shape != input_ids.shape:
        raise ValueError(
            "generate: attention_mask: expected the shape of input_ids, [B, P], got "
            f"{list(mask.shape)} with {list(input_ids.shape)}"
        )
    if streamer is not None and len(input_ids) != 1:
        raise ValueError(f"generate: streamer: expected 1 request, got {len(input_ids)}")
    settings = _settings(model, generation_config, options)
    eos, pad = settings.eos_token_id, settings.pad_token_id
    stops = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if pad is None and stops:
        pad = stops[0]
    sampling = Sampling()
    if settings.do_sample:
        sampling = Sampling(
            1.0 if settings.temperature is None else settings.temperature,
            seed,
            _TOP_K if settings.top_k is None else settings.top_k,
            1.0 if settings.top_p is None else settings.top_p,
        )
    prompts = [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask, strict=True)]
    config = RunnerConfig(
        ngram=ngram or NgramConfig(),
        padded=False,
        asynchronous=False,
        max_rows=max(1, min(max_rows, len(prompts))),
        row_capacity=max(map(len, prompts), default=0) + settings.max_new_tokens,
        sampling=sampling,
    )

    def tell(_: int, tokens: list[int]) -> None:
        streamer.put(torch.tensor(tokens, device="cpu"))

    if streamer is not None:
        streamer.put(input_ids.cpu())
    with paged(model):
        runner = Runner(model, config, store=store)
        texts = runner.generate(
            prompts,
            settings.max_new_tokens,
            stop_token_ids=stops,
            on_tokens=None if streamer is None else tell,
        )
    if streamer is not None:
        streamer.end()
    longest = max(map(len, texts), default=0)
    if pad is None and any(len(text) < longest for text in texts):
        raise ValueError("generate: pad_token_id: expected one (the model has none), got None")
    padded = [text + [pad] * (longest - len(text)) for text in texts]
    return torch.cat([input_ids, input_ids.new_tensor(padded).reshape(len(texts), longest)], 1)
