"""Results do not depend on torch's default device: here it is ``meta``, whose tensors have no
values."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ngram_npu
import numpy as np
import pytest
import torch
from async_state.small import admit, batch_of, ints, small_state
from ngram_npu import NgramConfig, NgramProposer, NgramStore
from ngram_npu.async_state import MergeConfig, NeuralDrafts, verify_greedy
from ngram_npu.host_drafting import HostDrafting
from ngram_npu.index import make_index

CPU = torch.device("cpu")
SCAN = NgramConfig(min_n=1, max_n=3, k=2)
COSTS = NgramConfig(min_n=1, max_n=3, k=2, min_draft_probability=0.01)
STORE = NgramConfig(
    k=2, sizes="ladder", min_draft_probability=0.01, store="live", store_tokens=8192
)
SAID = [[5, 6, 7], [5, 6, -1], [8, 5, 6], [5, 6, -1]]


def tensor(values: Any, dtype: Any = np.int32) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype))


def values(*tensors: Any) -> list[Any]:
    return [None if one is None else one.tolist() for one in tensors]


def of_proposer(config: NgramConfig, engine: Any, advance: bool) -> list[Any]:
    proposer = NgramProposer(config, engine, num_slots=2)
    tokens, lengths = tensor(np.zeros((2, 64))), tensor([0, 0])
    found: list[Any] = []
    for said in SAID:
        step = proposer.step(tokens, lengths, tensor([said, said[::-1]]), advance=advance)
        if not advance:
            lengths += step.num_sampled
        found += values(*step)
    found += values(*proposer.propose(tokens, lengths, num_sampled=tensor([1, 1])))
    proposer.append(tokens, lengths)
    proposer.reset(tensor([0, 1]))
    return found


def of_async_state(ngram: NgramConfig, draft_on: str, merged: bool) -> list[Any]:
    merge = MergeConfig(match_costs=[1] * 16) if merged else None
    state = small_state(ngram=ngram, draft_on=draft_on, merge=merge, row_capacity=64,
                        kv_groups=(ngram_npu.async_state.KVGroup(32, 2),))  # fmt: skip

    def drafter(outputs: Any) -> NeuralDrafts:
        return NeuralDrafts(tensor([[1, 2]] * 2))

    found: list[Any] = []
    new = [admit(row, token_ids=ints(1, 2)) for row in range(2)]
    for at, said in enumerate(SAID):
        inputs = state.begin_step(
            batch_of([0, 1], [1 if at else 2] * 2, [0, 0], new=() if at else new)
        )
        found += values(inputs.input_ids, inputs.positions, inputs.seq_lens)
        sampled = tensor([[said[0], -1, -1], [said[1], -1, -1]])
        outputs = state.end_step(sampled, drafter if merged else None)
        drafts = state.wait_drafts()
        found += values(outputs.num_sampled, drafts.num_draft_tokens, drafts.draft_token_ids)
        found += values(state.reconcile().num_tokens)
    state.rebuild(new)
    return found + values(state.token_ids, state.num_tokens_on_device)


def of_host_drafting(config: NgramConfig) -> list[Any]:
    index = make_index(config, 2, 128, kind="numpy")
    store = None if config.store is None else NgramStore(2, 8192)
    drafting = HostDrafting(
        config, num_rows=2, capacity=64, most_sampled=3, device=CPU, index=index, store=store
    )
    for row in range(2):
        drafting.begin(row, [1, 2, 3])
    return [
        values(*drafting.propose(ints(0, 1), tensor([[3, *said], [1, *said]]))[:3]) for said in SAID
    ]


def of_verification() -> list[Any]:
    logits = tensor([[0, 1], [1, 0], [0, 1]], np.float32)
    return values(verify_greedy(logits, tensor([1]), tensor([1, 1]), 2))


CASES: dict[str, Callable[[], list[Any]]] = {
    "scan": lambda: of_proposer(SCAN, "scan", True),
    "index": lambda: of_proposer(SCAN, "index", True),
    "costs": lambda: of_proposer(COSTS, "scan", True),
    "store": lambda: of_proposer(STORE, "auto", True),
    "store without advance": lambda: of_proposer(STORE, "auto", False),
    "async": lambda: of_async_state(SCAN, "device", False),
    "async on the host": lambda: of_async_state(SCAN, "host", False),
    "async with a store": lambda: of_async_state(STORE, "device", False),
    "async with a store on the host": lambda: of_async_state(STORE, "host", False),
    "async with a neural drafter": lambda: of_async_state(SCAN, "device", True),
    "async with costs and a neural drafter": lambda: of_async_state(STORE, "host", True),
    "host": lambda: of_host_drafting(SCAN),
    "host with a store": lambda: of_host_drafting(STORE),
    "verification": of_verification,
}


@contextmanager
def set_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("context", [set_default_device, lambda: torch.device("meta")])
@pytest.mark.parametrize("name", CASES)
def test_results_under_another_default_device_equal_those_on_cpu(
    name: str, context: Callable[[], Any]
) -> None:
    expected = CASES[name]()
    with context():
        assert torch.empty(0).device.type == "meta"
        found = CASES[name]()
    assert found == expected


FACTORIES = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand"}
FACTORIES |= {"randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}


def calls_without_device(source: str) -> list[str]:
    """Calls of torch that make a tensor on the default device."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and ast.unparse(node.func.value) in ("torch", "sys.modules['torch']")
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_calls_without_device_are_found() -> None:
    assert calls_without_device("torch.zeros(2); torch.zeros(2, device=x)") == ["torch.zeros(2)"]
    assert calls_without_device("torch.zeros(2, pin_memory=True); np.zeros(2)")


def test_every_tensor_is_made_on_a_named_device() -> None:
    files = Path(ngram_npu.__file__).parent.rglob("*.py")
    found = {file.name: calls_without_device(file.read_text()) for file in files}
    assert {name: calls for name, calls in found.items() if calls} == {}
