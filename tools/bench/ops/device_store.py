"""Measures a step with a device store, compared with the lookup in the requests' own rows and with
a step of the host's store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from ngram_npu import _C, NgramStore
from ngram_npu.config import default_match_costs, default_store_costs
from ngram_npu.store.device_store import DeviceStore

from tools.bench.data import SEED, VOCAB_SIZE, Int32Array, Workload
from tools.bench.measure import Implementation
from tools.bench.ops.base import Maker, Op
from tools.bench.ops.lookup import find_converter, find_op
from tools.bench.options import Options

STORE_TOKENS = 2**20
LOOKUP, HOST = "ngram_propose_", "ngram_store_step_"


class RowLookup(Implementation):
    """A lookup in the requests' own rows."""

    def __init__(self, workload: Workload, options: Options) -> None:
        self._threads = options.threads
        convert = find_converter(options)
        self._token_ids = convert(workload.token_ids)
        self._lengths = [convert(lengths) for lengths in workload.lengths[1:]]
        self._num_sampled = [convert(new) for new in np.diff(workload.lengths, axis=0)]
        batch = workload.size.batch
        self._limits = {"max_len": workload.capacity, "fill": True}
        self._drafts = {
            "draft_token_ids": convert(np.zeros((batch, options.k), np.int32)),
            "num_draft_tokens": convert(np.zeros(batch, np.int32)),
            "match_len": convert(np.zeros(batch, np.int32)),
        }
        self._look_up, self.detail = find_op(LOOKUP, options)
        self.function = self.look_up

    def activate(self) -> None:
        _C.set_num_threads(self._threads)

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return self._lengths[step], self._num_sampled[step]

    def look_up(self, num_tokens: Any, num_sampled: Any, **costs: Any) -> None:
        self._look_up(
            self._token_ids,
            num_tokens,
            num_sampled=num_sampled,
            min_n=1,
            max_n=16,
            match_policy=1,
            overlap=True,
            **self._limits,
            **self._drafts,
            **costs,
        )


class DeviceStoreStep(RowLookup):
    """Append and propose. The lookup, which comes between them in a step, runs before the timed
    call: it reads all rows, so they take the store's place in the caches."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        batch, convert = workload.size.batch, find_converter(options)
        store = DeviceStore(batch, STORE_TOKENS, max_batch=batch)
        for text in make_texts(workload):
            store.warm(text)
        names = ("slots", "text", "blocks", "table", "allocator")
        tensors = {name: convert(getattr(store, name).numpy()) for name in names}
        contents = {name: tensors[name] for name in ("text", "blocks", "table")}
        append, append_name = find_op("device_store_append_", options)
        propose, propose_name = find_op("device_store_propose_", options)

        def run(num_tokens: Any, num_sampled: Any) -> None:
            rows = self._token_ids, num_tokens, num_sampled
            append(*rows, **tensors, max_new=options.k + 1)
            propose(*rows, **contents, **self._drafts, **self._limits)

        self.function = run
        self.detail = f"{append_name}, {propose_name}"

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        arguments = super().get_arguments(step)
        self.look_up(*arguments)
        return arguments


class HostStoreStep(RowLookup):
    """A step of the host's store with the same texts, after a lookup that also writes the costs."""

    def __init__(self, workload: Workload, options: Options) -> None:
        super().__init__(workload, options)
        batch, convert = workload.size.batch, find_converter(options)
        store = NgramStore(batch, STORE_TOKENS)
        for text in make_texts(workload):
            store.warm(text)
        step, self.detail = find_op(HOST, options)
        self._costs = {
            "match_costs": convert(default_match_costs().copy()),
            "draft_costs": convert(np.zeros((batch, options.k), np.uint8)),
        }
        tensor, store_costs = convert(store.tensor), convert(default_store_costs().copy())

        def run(num_tokens: Any, num_sampled: Any) -> None:
            step(
                self._token_ids,
                num_tokens,
                num_sampled,
                tensor,
                draft_costs=self._costs["draft_costs"],
                costs=store_costs,
                **self._drafts,
                **self._limits,
            )

        self.function = run

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        arguments = super().get_arguments(step)
        self.look_up(*arguments, **self._costs)
        return arguments


def make_texts(workload: Workload) -> list[Int32Array]:
    """Returns rows of text that fill a store, and then the text of the requests before the first
    step."""
    batch = workload.size.batch
    shape = batch, STORE_TOKENS // batch
    filler = np.random.default_rng(SEED).integers(0, VOCAB_SIZE, shape, np.int32)
    return [filler, workload.token_ids[:, : workload.size.context]]


class DeviceStoreOp(Op):
    name = "device-store"
    help = "append the sampled tokens to a device store, then draft from it"
    sizes = ("128x8k",)
    peers = (LOOKUP, HOST)
    peer_makers: ClassVar[Mapping[str, Maker]] = {LOOKUP: RowLookup, HOST: HostStoreStep}
    assumptions: Mapping[str, Any] = {
        "store": f"{STORE_TOKENS} tokens, full; it contains the rows' text before the first step",
        "time": "the lookup in the rows, which a step with a store also needs, is not included: "
        f"it is the peer {LOOKUP}",
    }

    make = DeviceStoreStep
