"""Drafts in Hugging Face transformers. Guide: docs/guides/transformers.md.

:func:`drafting` makes `model.generate` use our drafts (one request per call, a limit of
transformers' speculation). The text does not change. If the config asks for a store, all calls
within one `drafting` block share it.
"""

from __future__ import annotations

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

__all__ = ["NgramCandidates", "drafting"]

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
