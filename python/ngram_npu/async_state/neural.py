"""A neural drafter (a draft model, EAGLE, MTP) beside the lookup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch

from ngram_npu.async_state.results import StepOutputs

UNIT = 65536
_MOST_ACCEPTED = (2**31 - 1) // UNIT


@dataclass(frozen=True)
class MergeConfig:
    """When n-gram drafts replace a neural drafter's (docs/ops/merge_drafts.md): where they promise
    more accepted tokens than it has achieved on the request.

    Raises:
        ValueError: a value out of its range; the message names it.
    """

    min_match_len: int = 1
    """Tokens; n-grams of a shorter match leave the neural draft."""
    min_accepted: float = 0.0
    """Accepted tokens per step, 0 to 32767; n-grams that promise fewer leave the neural draft."""
    extend: bool = False
    """Whether n-grams continue a shorter neural draft that they begin with."""
    match_costs: Sequence[int] | None = None
    """[16] what an n-gram draft token costs by the length of its match, in sixteenths of a bit, 0
    to 255; None: fitted ones. Not read where the lookup knows the cost of each token: a ladder with
    a `min_draft_probability`."""

    def __post_init__(self) -> None:
        length = self.min_match_len
        if not isinstance(length, Integral) or not 0 <= length < 2**31:
            raise ValueError(f"MergeConfig: min_match_len: expected 0 to 2**31 - 1, got {length!r}")
        if not 0 <= self.min_accepted <= _MOST_ACCEPTED:
            raise ValueError(
                f"MergeConfig: min_accepted: expected 0 to {_MOST_ACCEPTED}, "
                f"got {self.min_accepted!r}"
            )
        if self.match_costs is not None:
            costs = np.asarray(self.match_costs)
            if costs.shape != (16,) or costs.dtype.kind not in "iu" or (costs & ~255).any():
                raise ValueError(
                    "MergeConfig: match_costs: expected 16 integers from 0 to 255, "
                    f"got {self.match_costs!r}"
                )


@dataclass(frozen=True)
class NeuralDrafts:
    """A neural drafter's drafts for a step's requests; on the device."""

    token_ids: torch.Tensor
    """[B,Kn] int32 or int64, Kn at most k."""
    num_tokens: torch.Tensor | None = None
    """[B] int32, how many each request has, 0 to Kn; None: Kn each. It must not depend on sampled
    drafts."""
    costs: torch.Tensor | None = None
    """[B,Kn] uint8, the drafter's own costs in sixteenths of a bit, for greedy drafts; None: their
    worth follows from the drafts that the request has accepted so far."""


NeuralDrafter = Callable[[StepOutputs], NeuralDrafts]
"""Drafts from the newest tokens and the drafter batch of a step, whose drafts are the n-grams'."""


def check_drafter(draft: NeuralDrafter | None, merge: MergeConfig | None) -> None:
    """
    Raises:
        ValueError: a drafter that the state has no room for, or none where it has.
    """
    if (draft is not None) != (merge is not None):
        wanted = "None without AsyncConfig.merge" if merge is None else "a neural drafter"
        raise ValueError(f"end_step: draft: expected {wanted}, got {draft!r}")
    if draft is not None and not callable(draft):
        raise ValueError(f"end_step: draft: expected a callable, got {type(draft).__name__}")
