"""The whole cost of one small call: arguments, checks, outputs, and a very short lookup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ngram_npu import _C, NgramConfig, NgramProposer
from ngram_npu.config import ANY_TOKEN

from tools.bench.data import Workload
from tools.bench.measure import Contestant
from tools.bench.ops.base import Make, Op
from tools.bench.ops.lookup import torch_op
from tools.bench.options import Options

CALLS = 1000


class _Call(Contestant):
    """Repeats the same call; lengths stay the same, so that each does the same work."""

    calls = CALLS

    def __init__(self, workload: Workload, options: Options) -> None:
        self.token_ids = workload.token_ids
        self.num_tokens = workload.lengths[0].copy()
        self.sampled = workload.sampled[0]
        self.options = options

    def activate(self) -> None:
        _C.set_num_threads(self.options.threads)


class Operator(_Call):
    """The bare call: numpy arrays by position, tensors as in the schema."""

    def __init__(self, workload: Workload, options: Options, frontend: str) -> None:
        super().__init__(workload, options)
        arrays: tuple[Any, ...] = (self.token_ids, self.num_tokens, self.sampled)
        op: Callable[..., Any] = _C.ngram_step_
        self.detail = "_C.ngram_step_, positional"
        if frontend == "torch":
            op = torch_op("ngram_step_")
            import torch

            arrays = tuple(torch.from_numpy(array) for array in arrays)
            self.detail = "torch.ops.ngram_npu.ngram_step_.default"
        tokens, lengths, sampled = arrays
        lookup = options.lookup | {"advance": False, "max_len": workload.capacity}
        tail = (None, None, False, ANY_TOKEN, *options.lookup.values(), workload.capacity)

        def by_keyword() -> None:
            for _ in range(CALLS):
                op(tokens, lengths, sampled, **lookup)

        def by_position() -> None:
            for _ in range(CALLS):
                op(tokens, lengths, sampled, *tail)

        self.function = by_keyword if frontend == "torch" else by_position


class Proposer(_Call):
    """Through ``NgramProposer.step``, as a runner would call it."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        config = NgramConfig(
            min_n=options.min_n, max_n=options.max_n, k=options.k, max_len=workload.capacity
        )
        step = NgramProposer(config).step
        tokens, lengths, sampled = self.token_ids, self.num_tokens, self.sampled
        self.detail = "NgramProposer.step on numpy arrays"

        def run() -> None:
            for _ in range(CALLS):
                step(tokens, lengths, sampled, advance=False)

        self.function = run


class NoOp(_Call):
    """A Python function that does nothing, called the same way: the cost of the loop itself."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        self.detail = "an empty Python function with one argument"

        def nothing(argument: object) -> None:
            pass

        def run() -> None:
            for _ in range(CALLS):
                nothing(None)

        self.function = run


class CallOverhead(Op):
    name = "call-overhead"
    help = "one call of ngram_step_ on a small batch"
    sizes = ("1x1k",)
    peers = ("torch", "proposer", "no-op")
    peer_makers: ClassVar[Mapping[str, Make]] = {
        "torch": lambda workload, options: Operator(workload, options, "torch"),
        "proposer": Proposer,
        "no-op": NoOp,
    }

    def make(self, workload: Workload, options: Options) -> Contestant:
        return Operator(workload, options, "numpy")
