"""Measures the choice between neural and n-gram drafts: one operator, compared with eager torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tools.bench.data import SEED, Workload
from tools.bench.measure import Drafts, Implementation
from tools.bench.ops.base import Maker, Op
from tools.bench.ops.lookup import find_converter, find_op
from tools.bench.options import Options, Size

UNIT = 65536
"""The fixed-point representation of one accepted token."""


def make_batch(size: Size, k: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the arguments for a batch of requests that have generated tokens before. Each request
    has k neural drafts and up to k n-gram drafts."""
    rng = np.random.default_rng(SEED)
    batch = size.batch
    acceptance = np.stack([rng.integers(0, k * UNIT, batch), rng.integers(1, k + 2, batch)], axis=1)
    return {
        "neural_draft_token_ids": rng.integers(0, 32000, (batch, k)),
        "ngram_draft_token_ids": rng.integers(0, 32000, (batch, k), dtype=np.int32),
        "num_ngram_draft_tokens": rng.integers(0, k + 1, batch).astype(np.int32),
        "match_len": rng.integers(0, 17, batch).astype(np.int32),
        "draft_costs": rng.integers(0, 20, (batch, k)).astype(np.uint8),
        "row_indices": rng.permutation(batch).astype(np.int32),
        "num_sampled": rng.integers(1, k + 2, batch).astype(np.int32),
        "neural_acceptance": acceptance.astype(np.int32),
    }


class Merge(Implementation):
    """Each step merges the same drafts, with the means that the previous step wrote."""

    semantics = ("merged",)

    def __init__(self, workload: Workload, options: Options) -> None:
        arrays = make_batch(workload.size, options.k)
        convert = find_converter(options)
        self.tensors = {name: convert(values) for name, values in arrays.items()}
        self._acceptance = convert(arrays["neural_acceptance"].copy())

    def reset(self) -> None:
        self.tensors["neural_acceptance"][...] = self._acceptance

    def get_drafts(self, result: Any) -> Drafts:
        """Returns per request a list of the draft's source, the draft and the new means."""
        means = self.tensors["neural_acceptance"][self.tensors["row_indices"]]
        rows = zip(*(tensor.tolist() for tensor in (*result, means)), strict=True)
        return [[source, *draft[:count], *mean] for draft, count, source, mean in rows]


class Operator(Merge):
    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        op, self.detail = find_op("merge_drafts_", options)
        self.function = lambda: op(**self.tensors)


class Eager(Merge):
    """The same computation in eager torch."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, replace(options, frontend="torch"))
        import torch

        powers = [UNIT]
        while len(powers) < 256:
            powers.append(powers[-1] * 62757 // UNIT)
        self._powers = torch.tensor(powers, device=options.device)
        self._positions = torch.arange(options.k, device=options.device)
        self.function = self.run
        self.detail = "eager torch, without data-dependent control flow"

    def run(self) -> tuple[Any, ...]:
        import torch

        tensors = self.tensors
        neural_drafts = tensors["neural_draft_token_ids"]
        ngram_drafts = tensors["ngram_draft_token_ids"]
        num_ngram, num_neural = tensors["num_ngram_draft_tokens"], neural_drafts.shape[1]
        total_costs = tensors["draft_costs"].cumsum(1).clamp_(max=255)
        promise = (self._powers[total_costs] * (self._positions < num_ngram[:, None])).sum(1)
        old_acceptance = tensors["neural_acceptance"][tensors["row_indices"]]
        # max_sampled: 1 plus the number of neural draft tokens of the last step; 0: a new request.
        mean, max_sampled = old_acceptance.unbind(1)
        accepted = torch.minimum(tensors["num_sampled"], max_sampled) - 1
        step = torch.div(accepted * UNIT - mean, 8, rounding_mode="trunc")
        # If all tokens of a shortened draft were accepted, the mean must not decrease.
        is_cut = (accepted == max_sampled - 1) & (max_sampled <= num_neural)
        step = torch.where(is_cut, step.clamp(min=0), step)
        mean = torch.where((max_sampled > 1) & (tensors["num_sampled"] > 0), mean + step, mean)
        mean = torch.where(max_sampled > 0, mean, num_neural * UNIT)
        takes_ngram = (num_ngram > 0) & (tensors["match_len"] >= 1)
        takes_ngram &= promise > mean.clamp(max=num_neural * UNIT)
        new_acceptance = torch.stack((mean, torch.where(takes_ngram, 1, 1 + num_neural).int()), 1)
        tensors["neural_acceptance"][tensors["row_indices"]] = torch.where(
            tensors["num_sampled"][:, None] > 0, new_acceptance, old_acceptance
        )
        return (
            torch.where(takes_ngram[:, None], ngram_drafts, neural_drafts),
            torch.where(takes_ngram, num_ngram, num_neural),
            1 + takes_ngram.int(),
        )


class MergeDrafts(Op):
    name = "merge_drafts_"
    help = "the choice between neural and n-gram drafts; the context has no effect"
    sizes = ("1x4k", "32x4k", "256x4k")
    peers = device_peers = ("eager",)
    peer_makers: ClassVar[Mapping[str, Maker]] = {"eager": Eager}

    def prepare_workload(self, size: Size, options: Options) -> Workload:
        return super().prepare_workload(size, replace(options, data_kind="periodic"))

    make = Operator
