"""Compares the results of every operator on the devices of this machine with those of the scalar
CPU kernels, bit for bit. The instruction sets of the CPU are tested in the same way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import ngram_npu._C as _C
from ngram_npu import _library
from ngram_npu.store import NgramStore

INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "neon")
SIZES = ((100, 500), (3, 20_000))
"""Rows, and tokens per row: more rows than an NPU has cores, and rows that several cores search."""
LOOKUPS: tuple[dict[str, Any], ...] = (
    {"min_n": 2, "max_n": 5},
    {"min_n": 1, "max_n": 16, "match_policy": 1, "overlap": True, "fill": True, "vocab_size": 90},
)
DRAFTS = ("draft_token_ids", "num_draft_tokens", "match_len")
STORE_ARRAYS = ("slots", "text", "blocks", "table", "allocator")

Array = npt.NDArray[Any]
Values = dict[str, Any]
"""The arguments of a call, or the arrays after it, by name."""
Run = Callable[[str, Values], Values]
"""Calls an operator with copies of the arguments. Returns its results and the written arguments."""


@dataclass(frozen=True)
class OperatorResult:
    """Result of the self-test of an operator."""

    operator: str
    device: str
    """A device of torch, or an instruction set of the CPU."""
    num_calls: int
    problem: str
    """The first difference or error; empty: all results are equal."""


def run_self_test() -> list[OperatorResult]:
    """Tests the operators on the CPU, and on the current CUDA device and NPU if there are kernels.
    The instruction set of the process changes meanwhile."""
    instruction_set = _C.instruction_set()
    results = []
    try:
        _C.set_instruction_set("scalar")
        calls = list(make_calls())
        expected = [run_on_host(*call) for call in calls]
        for name in INSTRUCTION_SETS:
            try:
                _C.set_instruction_set(name)
            except ValueError:  # this machine does not have it
                continue
            results += compare_results(name, run_on_host, calls, expected)
    finally:
        _C.set_instruction_set(instruction_set)
    for device in list_devices():
        results += compare_results(
            device, functools.partial(run_on_device, device), calls, expected
        )
    return results


def list_devices() -> list[str]:
    """Returns the devices other than the CPU that exist and have kernels."""
    backends = _library.backends() | {"npu": _library.open_npu()}
    names = [b.name for b in backends.values() if b.kernels and not b.reason and b.name != "cpu"]
    if names:
        import torch
    return [name for name in names if getattr(torch, name).is_available()]


def compare_results(
    device: str, run: Run, calls: list[tuple[str, Values]], expected: list[Values]
) -> list[OperatorResult]:
    """Runs all calls. Returns one result per operator."""
    num_calls, problems = dict.fromkeys((op for op, _ in calls), 0), dict[str, str]()
    for (op, arguments), right in zip(calls, expected, strict=True):
        num_calls[op] += 1
        try:
            problem = describe_difference(run(op, arguments), right)
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        if problem:
            problems.setdefault(op, f"call {num_calls[op]}: {problem}")
    return [OperatorResult(op, device, n, problems.get(op, "")) for op, n in num_calls.items()]


def describe_difference(got: Values, expected: Values) -> str:
    for name, right in expected.items():
        is_different = got[name] != right
        if np.any(is_different):
            count = np.count_nonzero(is_different)
            return f"{name}: {count} of {right.size} values differ from the scalar CPU kernel's"
    return ""


def run_on_host(op: str, arguments: Values) -> Values:
    values = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in arguments.items()}
    results = dict(enumerate(getattr(_C, op)(**values) or ()))
    arrays = {n: v for n, v in values.items() if isinstance(v, np.ndarray)}
    return {f"result {i}": result for i, result in results.items()} | arrays


def run_on_device(device: str, op: str, arguments: Values) -> Values:
    import torch

    values = {
        n: torch.from_numpy(v).to(device, copy=True) if isinstance(v, np.ndarray) else v
        for n, v in arguments.items()
    }
    results = dict(enumerate(getattr(torch.ops.ngram_npu, op)(**values) or ()))
    named = {f"result {i}": result for i, result in results.items()} | values
    return {n: v.cpu().numpy() for n, v in named.items() if isinstance(v, torch.Tensor)}


def make_calls() -> Iterator[tuple[str, Values]]:
    """Yields calls of every operator, in every process the same ones."""
    rng = np.random.default_rng(1)
    for batch, capacity in SIZES:
        phrase = rng.integers(0, 100, 60)
        tokens = phrase[(rng.integers(0, 60, (batch, 1)) + np.arange(capacity)) % 60]
        is_random = rng.random(tokens.shape) < 0.05
        tokens[is_random] = rng.integers(0, 100, is_random.sum())
        yield from make_drafting_calls(rng, int32(tokens))
        yield from make_store_calls(rng, int32(tokens))
        yield from make_runner_calls(rng, batch)


def int32(values: Any) -> Array:
    return np.asarray(values, np.int32)


def make_drafting_calls(rng: np.random.Generator, tokens: Array) -> Iterator[tuple[str, Values]]:
    batch, capacity = tokens.shape
    rows: Values = {"token_ids": tokens}
    rows["num_tokens"] = int32(rng.integers(capacity // 2, capacity - 8, batch))
    order, new_tokens = rng.permutation(batch), tokens[:, :6].copy()
    new_tokens[rng.random(new_tokens.shape) < 0.1] = -1
    sampled = {"sampled_token_ids": new_tokens, "discard": rng.random(batch) < 0.2}
    for lookup in LOOKUPS:
        num_sampled = int32(rng.integers(0, 3, batch))
        yield "ngram_propose", {**rows, **lookup, "num_sampled": num_sampled, "k": 7}
        outputs = np.zeros((batch, 5), np.int64), *int32(np.zeros((2, batch)))
        drafts = dict(zip(DRAFTS, outputs, strict=True))
        yield "ngram_propose_", {**rows, **lookup, **drafts, "row_indices": order}
        yield "ngram_step_", {**rows, **lookup, **sampled, "row_indices": order, "k": 5}
    yield "prepare_next_token_ids", {**rows, **sampled, "row_indices": order, "vocab_size": 90}


def make_store_calls(rng: np.random.Generator, tokens: Array) -> Iterator[tuple[str, Values]]:
    """Yields the calls of four steps, which replace blocks of the store. Of four scopes, one is
    private."""
    batch = len(tokens)
    store = NgramStore(40 * 256, num_slots=batch)
    arrays = {name: getattr(store, name) for name in STORE_ARRAYS}
    lengths = int32(np.zeros(batch))
    for step in range(4):
        order, num_sampled = rng.permutation(batch), int32(rng.integers(0, 120, batch))
        lengths[order] += num_sampled
        rows = {"token_ids": tokens, "num_tokens": lengths.copy(), "num_sampled": num_sampled}
        rows |= {"row_indices": order, "scopes": order % 4 - 1}
        append = {**rows, "max_new": 200, "hold_back": step < 2}
        yield "store_append_", append | {name: array.copy() for name, array in arrays.items()}
        _C.store_append_(**append, **arrays)
        lookup = {"min_n": 3, "max_n": 5, "k": 6, "row_indices": order}
        drafts = _C.ngram_propose(tokens, lengths, **lookup)
        propose = dict(zip(DRAFTS, drafts, strict=True)) | {"agreement": int32(np.zeros(batch))}
        contents = {name: arrays[name].copy() for name in ("text", "blocks", "table")}
        yield "store_propose_", {**rows, **propose, **contents, "fill": step % 2 == 0}


def make_runner_calls(rng: np.random.Generator, batch: int) -> Iterator[tuple[str, Values]]:
    """Yields calls of the operators that merge drafts, and that prepare or correct inputs."""

    def draw(low: Any, high: Any, *shape: int) -> Array:
        return int32(rng.integers(low, high, (batch, *shape)))

    order = rng.permutation(batch)
    costs = {
        "draft_costs": np.uint8(draw(0, 60, 6)),
        "neural_draft_costs": np.uint8(draw(0, 60, 4)),
    }
    counts = {"num_ngram_draft_tokens": draw(0, 7), "match_len": draw(0, 9)}
    drafts = {"neural_draft_token_ids": draw(0, 100, 4), "ngram_draft_token_ids": draw(0, 100, 6)}
    more = {"neural_acceptance": draw(0, 5 << 16, 2), "num_sampled": draw(0, 5), "extend": True}
    yield "merge_drafts_", {**drafts, **counts, **costs, **more, "row_indices": order}

    num_drafts, lengths = draw(0, 7), draw(30, 900)
    num_sampled = draw(0, num_drafts + 2)
    starts = {"query_start_loc": int32(np.cumsum([0, *(num_drafts + draw(1, 20))]))}
    num_tokens = int(starts["query_start_loc"][-1])
    previous = {"prev_positions": np.where(rng.random(batch) < 0.2, -1, order)}
    padded = {"cu_num_draft_tokens": int32(np.cumsum(num_drafts)), "num_sampled": num_sampled}
    yield "prepare_inputs_padded", {**starts, **padded}
    kept = {"seq_lens": lengths, "num_rejected": draw(0, 6), "total_tokens": num_tokens}
    yield "prepare_inputs", {**starts, **kept}
    ids = {"next_token_ids": draw(0, 100), "draft_token_ids": draw(-1, 100, 6)}
    ids |= {"input_ids": int32(np.arange(num_tokens)), "num_scheduled_drafts": num_drafts}
    yield "prepare_input_ids_", {**starts, **previous, **ids}
    counts = {"num_computed_tokens": lengths, "num_accepted_tokens": draw(1, 2), **previous}
    counts |= {"num_sampled_prev": num_sampled, "num_draft_prev": num_drafts}
    counts |= {"host_num_computed_tokens": lengths + num_drafts}
    yield "correct_num_computed_tokens_", counts
    blocks = int32(rng.permutation(batch * 70).reshape(batch, 70))
    slots = {"block_table": blocks, "block_size": 16, "row_indices": order, **starts}
    slots["slot_mapping"] = np.zeros(num_tokens + 9, np.int64)
    slots["positions"] = np.arange(num_tokens) % 1000
    yield "compute_slot_mapping_", slots
    state = {"seq_lens": int32(np.zeros(batch + 3)), "discard": np.zeros(batch, np.bool_)}
    yield "correct_spec_state_", {**counts, **slots, **state, "num_tokens": lengths + 9}
