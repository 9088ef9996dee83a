"""Measures the lookups without an index, compared with vLLM's lookups and with an operation that
only reads the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from ngram_npu import _C
from ngram_npu.config import ANY_TOKEN

from tools.bench.data import Int32Array, Workload
from tools.bench.device import make_workspace
from tools.bench.device_peers import (
    Eager,
    PlainScan,
    TokenReader,
    VllmAscend,
    VllmNgramGpu,
    VllmV2,
)
from tools.bench.measure import Drafts, Implementation
from tools.bench.ops.base import Maker, Op
from tools.bench.options import Options
from tools.bench.vllm_peer import VllmNumba


def find_torch_op(name: str) -> Any:
    """Returns ``torch.ops.ngram_npu.<name>.default``."""
    import torch

    return getattr(torch.ops.ngram_npu, name).default


def find_op(name: str, options: Options) -> tuple[Any, str]:
    """Returns our operator in the front end of the options, and a description of the operator."""
    if options.frontend == "torch":
        return find_torch_op(name), f"torch.ops.ngram_npu.{name}.default"
    return getattr(_C, name), f"_C.{name}"


def find_converter(options: Options) -> Callable[[Any], Any]:
    """Returns a function that converts numpy arrays to the front end's type, if possible without a
    copy."""
    if options.frontend == "numpy":
        return lambda array: array
    import torch

    return lambda array: torch.from_numpy(array).to(options.device)


class _LookupImplementation(Implementation):
    """Calls our operator ``op`` in the front end of the options."""

    op: str
    draft_index: int
    """Index of the drafts among the operator's results; the next result is their counts."""
    leading_arguments: tuple[Any, ...]
    """Values of the arguments between the tensors and min_n in the operator's schema."""

    def __init__(self, workload: Workload, options: Options) -> None:
        self._workload = workload
        self._threads = options.threads
        self.function, name = find_op(self.op, options)
        self._convert = find_converter(options)
        self._token_ids = self._convert(workload.token_ids)
        lookup = options.lookup | {"max_len": workload.capacity}
        # The numpy front end gets positional arguments, as in a hot loop.
        self._other_arguments: tuple[Any, ...] = ()
        if options.frontend == "torch":
            ladder = options.ladder
            if "costs" in ladder:
                ladder["costs"] = self._convert(ladder["costs"].copy())
            self.function = partial(self.function, **lookup, **ladder)
        else:
            self._other_arguments = (
                *self.leading_arguments,
                *lookup.values(),
                *options.ladder.values(),
            )
        if options.is_ladder:
            probability = options.min_draft_probability
            self.semantics = ("ladder", options.k, probability)
            description = f"a ladder, min_draft_probability: {probability or None}"
        else:
            self.semantics = (options.min_n, options.max_n, options.k, options.match_policy)
            description = f"match_policy: {options.match_policy}"
        self.detail = f"{name}, threads: at most {options.threads}, {description}"

    def activate(self) -> None:
        _C.set_num_threads(self._threads)

    def get_drafts(self, result: Any) -> Drafts:
        ids, counts = (r.tolist() for r in result[self.draft_index : self.draft_index + 2])
        return [row[:count] for row, count in zip(ids, counts, strict=True)]


class ProposeImplementation(_LookupImplementation):
    op = "ngram_propose"
    draft_index = 0
    leading_arguments = (None, None)

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._lengths = [self._convert(lengths) for lengths in workload.lengths]

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return (self._token_ids, self._lengths[step + 1], *self._other_arguments)


class StepImplementation(_LookupImplementation):
    op = "ngram_step_"
    draft_index = 2
    leading_arguments = (None, None, True, ANY_TOKEN)

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self._own_lengths: Int32Array = workload.lengths[0].copy()
        self._num_tokens = self._convert(self._own_lengths)
        self._initial_lengths = self._convert(workload.lengths[0])
        self._sampled = [self._convert(sampled) for sampled in workload.sampled]
        if options.device != "cpu":
            workspace = make_workspace(self.op, workload.size.batch, options.device)
            self.function = partial(self.function, workspace=workspace)

    def reset(self) -> None:
        self._num_tokens[:] = self._initial_lengths

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return (self._token_ids, self._num_tokens, self._sampled[step], *self._other_arguments)


class NgramPropose(Op):
    name = "ngram_propose"
    help = "draft from the rows without appending"
    sizes = ("1x1k", "32x1k", "128x1k", "128x8k", "128x32k", "256x128k")
    peers = ("vllm-numba", "read")
    device_peers = ("vllm-v2", "vllm-ngram-gpu", "plain-scan", "eager", "read")
    peer_makers: ClassVar[Mapping[str, Maker]] = {
        "vllm-numba": VllmNumba,
        "read": TokenReader,
        "eager": Eager,
        "vllm-v2": VllmV2,
        "vllm-ngram-gpu": VllmNgramGpu,
        "plain-scan": PlainScan,
        "vllm-ascend": VllmAscend,
    }

    make = ProposeImplementation


class NgramStep(NgramPropose):
    name = "ngram_step_"
    help = "append the sampled tokens, then draft"

    make = StepImplementation
