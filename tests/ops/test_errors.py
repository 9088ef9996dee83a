"""Tests that invalid calls are rejected before anything is written. The error must name the
operator, the argument, the expected value and the actual value. The calls are derived from
schemas and OpSpecs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from backends import DEVICE_BACKENDS, FRONT_ENDS, Backend, to_torch
from ngram_npu import _C
from on_device import torch_op
from ops.specs import OPSPECS, Array, BadCall, OpSpec, are_equal, clone_args, find_base

SPECS = list(OPSPECS.values())
CALLERS = [*FRONT_ENDS, *DEVICE_BACKENDS]
NUMPY = FRONT_ENDS[1]

each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
each_caller = pytest.mark.parametrize("caller", CALLERS, ids=lambda b: b.name)
each_front_end = pytest.mark.parametrize("caller", FRONT_ENDS, ids=lambda b: b.name)


def _copy_with_inner_stride_two(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, axis=-1)[..., ::2]


INT32_END = 2**31
SCALAR_RANGES: dict[str, tuple[int, int | None]] = {
    "min_n": (1, None),
    "match_policy": (0, 1),
    "k": (0, 64),
    "min_match_len": (0, INT32_END - 1),
    "threshold": (0, INT32_END - 1),
    "max_new": (1, INT32_END - 1),
    "total_tokens": (0, INT32_END - 1),
    "pad_token": (-INT32_END, INT32_END - 1),
    "block_size": (1, INT32_END - 1),
    "blocks_per_kv_block": (1, None),
    "cp_world": (1, None),
    "cp_rank": (0, None),
    "cp_interleave": (1, INT32_END - 1),
}
"""The first and the last valid value; None if the limit depends on other arguments."""


def _derive_bad_calls(spec: OpSpec) -> Iterator[BadCall]:
    """Yields calls with each integer below and above its range, and calls with a wrong dtype, a
    wrong rank or a wrong inner stride of each tensor."""
    for name, _ in spec.arguments:
        low, high = SCALAR_RANGES.get(name, (None, None))
        for value in (None if low is None else low - 1, None if high is None else high + 1):
            if value is not None:
                yield BadCall({name: value}, f"got {value}")
    for name in spec.tensor_names:
        label = spec.sample_with(name).label
        yield BadCall({name: lambda a: a.astype(np.float32)}, "got float32", sample=label)
        yield BadCall({name: lambda a: a[None]}, "expected rank", sample=label)
        yield BadCall({name: _copy_with_inner_stride_two}, "inner stride 2", sample=label)


BAD_CALLS = [
    pytest.param(spec, bad, caller, id=f"{spec.name}-{bad.argument}-{caller.name}")
    for spec in SPECS
    for bad in (*spec.bad_calls, *_derive_bad_calls(spec))
    for caller in CALLERS
]


@pytest.mark.parametrize(("spec", "bad", "caller"), BAD_CALLS)
def test_bad_call_is_rejected_before_anything_is_written(
    spec: OpSpec, bad: BadCall, caller: Backend
) -> None:
    args = spec.replace(clone_args(spec.sample(bad.sample).args), **bad.change)
    before = clone_args(args)
    with pytest.raises(ValueError) as raised:
        caller.call(spec.name, args)
    message = str(raised.value)
    assert message.startswith(f"{spec.name}: {bad.argument}: expected "), message
    assert ", got " in message
    assert re.search(bad.message, message), message
    for after, original in zip(args, before, strict=True):
        if isinstance(after, np.ndarray):
            assert np.array_equal(find_base(after), find_base(original))


TENSORS_OF_ANY_SIZE = {
    "slots", "workspace", "input_ids", "neural_acceptance", "positions",
    "block_table", "slot_mapping", "num_computed_tokens", "num_accepted_tokens", "num_sampled_prev",
    "num_draft_prev", "correct_spec_state_: seq_lens", "correct_spec_state_: discard",
    "correct_spec_state_: num_tokens",
}  # fmt: skip
"""Tensors that may be larger than necessary, or whose size is not determined by another tensor.
A name may be limited to an operator."""


@each_caller
@each_spec
def test_tensor_that_is_too_short_is_rejected(spec: OpSpec, caller: Backend) -> None:
    """The error may name another tensor, which is then too long in comparison."""
    for name in spec.tensor_names:
        if {name, f"{spec.name}: {name}"} & TENSORS_OF_ANY_SIZE:
            continue
        for sample in (spec.sample(), spec.sample_with(name)):
            args = clone_args(sample.args)
            if spec.get(args, name) is None:
                continue
            short = spec.replace(args, **{name: lambda a: a[:-1]})
            with pytest.raises(ValueError, match=rf"^{spec.name}: \w+: expected s\w+ .*, got s"):
                caller.call(spec.name, short)


@each_caller
@each_spec
def test_written_tensor_that_shares_memory_is_rejected(spec: OpSpec, caller: Backend) -> None:
    """Tests every pair of a written tensor and another tensor with the same dtype and rank."""
    args = clone_args(spec.sample().args)
    values = dict(zip([n for n, _ in spec.arguments], args, strict=True))
    num_pairs = 0
    for written in sorted(spec.written):
        for other in spec.tensor_names:
            target, source = values[written], values[other]
            if other == written or target is None or source is None:
                continue
            if (target.dtype, target.ndim) != (source.dtype, source.ndim):
                continue
            if any(t < s for t, s in zip(target.shape, source.shape, strict=True)):
                continue
            shared = target[tuple(slice(0, n) for n in source.shape)]
            num_pairs += 1
            with pytest.raises(ValueError, match=rf"{spec.name}: \w+: expected memory not shared"):
                caller.call(spec.name, spec.replace(args, **{other: shared}))
    assert num_pairs > 0 or not spec.written - {"workspace"}


INT32_OR_INT64_TENSORS = {
    "row_indices", "slot_indices", "prev_positions", "slot_mapping", "scopes",
    "neural_draft_token_ids", "ngram_propose_: draft_token_ids",
    "store_propose_: draft_token_ids",
}  # fmt: skip


@each_front_end
@each_spec
def test_error_for_int64_suggests_conversion(spec: OpSpec, caller: Backend) -> None:
    """argmax returns int64, so callers often pass int64. For a written tensor, the error must
    not suggest a conversion, because the results would be written to the copy."""
    for name in spec.tensor_names:
        args = spec.sample_with(name).args
        if spec.get(args, name).dtype != np.int32:
            continue
        int64_args = spec.replace(clone_args(args), **{name: lambda a: a.astype(np.int64)})
        if {name, f"{spec.name}: {name}"} & INT32_OR_INT64_TENSORS:
            caller.call(spec.name, int64_args)
            continue
        with pytest.raises(ValueError, match=f"{name}: expected int32, got int64") as raised:
            caller.call(spec.name, int64_args)
        assert (".astype(numpy.int32)" in str(raised.value)) == (name not in spec.written)


DTYPES = "int8 int16 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 bfloat16"


@each_front_end
@pytest.mark.parametrize("dtype", DTYPES.split())
def test_error_names_wrong_dtype(dtype: str, caller: Backend) -> None:
    if dtype == "bfloat16":  # numpy does not have it
        call, tensor = torch_op("ngram_step_"), torch.zeros((3, 2), dtype=torch.bfloat16)
        args = to_torch(OPSPECS["ngram_step_"].sample().args)
    else:
        call, tensor = lambda *args: caller.call("ngram_step_", args), np.zeros((3, 2), dtype)
        args = OPSPECS["ngram_step_"].sample().args
    args = OPSPECS["ngram_step_"].replace(args, sampled_token_ids=tensor)
    expected = "an unsupported dtype" if dtype == "complex64" else dtype
    with pytest.raises(ValueError, match=f"sampled_token_ids: expected int32, got {expected}$"):
        call(*args)


class ObjectWithoutRepr:
    def __repr__(self) -> str:
        raise OSError


@each_spec
def test_numpy_binds_arguments_by_position_and_name(spec: OpSpec) -> None:
    args, operator = spec.sample().args, getattr(_C, spec.name)
    names = [name for name, _ in spec.arguments]
    by_name = dict(zip(names, args, strict=True))
    reverse = reversed(list(zip(names, clone_args(args), strict=True)))
    expected = operator(*clone_args(args)) or ()
    for result, reference in zip(operator(**dict(reverse)) or (), expected, strict=True):
        assert are_equal(result, reference)
    for positional, keywords, message in (
        (args, {names[0]: args[0]}, f"{names[0]}: expected one value, got two"),
        (args, {"tokens": 1}, "tokens: not an argument of this operator"),
        ((*args, 1), {}, f"at most {len(args)} arguments"),
        ((), {}, f"{names[0]}: expected a value, got none"),
    ):
        with pytest.raises(TypeError, match=f"^{spec.name}: .*{message}"):
            operator(*positional, **keywords)
    for name, kind in spec.arguments:
        if kind.startswith("Tensor"):
            with pytest.raises(ValueError, match=f"{spec.name}: {name}: expected a numpy array"):
                operator(**{**by_name, name: [1, 2, 3]})
            continue
        for value, shown_text in (("7", "'7'"), (ObjectWithoutRepr(), ".*ObjectWithoutRepr")):
            expected_text = rf"^{spec.name}: {name}: expected (int|bool), got {shown_text}"
            with pytest.raises(TypeError, match=expected_text):
                operator(**{**by_name, name: value})


@each_spec
def test_numpy_layout_that_kernels_cannot_read_is_rejected(spec: OpSpec) -> None:
    """Tests arrays that are not aligned, byte-swapped or structured, and read-only arrays that
    the operator would write. Read-only arrays that the operator only reads are accepted."""
    args = spec.sample().args
    for (name, _), value in zip(spec.arguments, args, strict=True):
        if isinstance(value, np.ndarray) and name not in spec.written:
            value.flags.writeable = False
    NUMPY.call(spec.name, args)
    for name in spec.tensor_names:
        valid_args = spec.sample_with(name).args
        value = spec.get(valid_args, name)
        changes = {}
        if value.dtype.itemsize > 1:
            raw = np.zeros(value.nbytes + 1, np.uint8)[1:]
            changes["got an unsupported dtype"] = np.zeros(value.shape, np.dtype([]))
            changes["aligned"] = np.ndarray(value.shape, value.dtype, raw)
            changes["got an unsupported"] = value.astype(value.dtype.newbyteorder(">"))
        if name in spec.written:
            changes["writable"] = value.copy()
            changes["writable"].flags.writeable = False
        for message, change in changes.items():
            with pytest.raises(ValueError, match=f"{spec.name}: {name}: .*{message}"):
                NUMPY.call(spec.name, spec.replace(clone_args(valid_args), **{name: change}))


@each_spec
def test_torch_tensor_that_kernels_cannot_read_is_rejected(spec: OpSpec) -> None:
    """Tests tensors that are not aligned, None for required tensors, meta tensors together with
    other tensors, and meta tensors of rank 0."""
    call = getattr(torch.ops.ngram_npu, spec.name)
    required = {a.name for a in call.default._schema.arguments if str(a.type) == "Tensor"}
    assert required
    for name in spec.tensor_names:
        args = to_torch(clone_args(spec.sample_with(name).args))
        value = spec.get(args, name)
        error = rf"{spec.name}: {name}: expected"
        if value.itemsize > 1:
            raw = bytearray(value.nbytes + 1)
            unaligned = torch.frombuffer(raw, dtype=value.dtype, offset=1, count=value.numel())
            with pytest.raises(ValueError, match=f"{error} .* aligned"):
                torch_op(spec.name)(*spec.replace(args, **{name: unaligned.view(value.shape)}))
        if name in required:
            with pytest.raises(ValueError, match=f"{error} .* got None"):
                torch_op(spec.name)(*spec.replace(args, **{name: None}))
        if sum(isinstance(other, torch.Tensor) for other in args) > 1:
            mixed_args = spec.replace(args, **{name: value.to("meta")})
            with pytest.raises(
                ValueError, match=rf"{spec.name}: \w+: expected device \w+, like \w+"
            ):
                torch_op(spec.name)(*mixed_args)
        meta_args = tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)
        scalar_args = spec.replace(meta_args, **{name: spec.get(meta_args, name).new_empty(())})
        with pytest.raises(ValueError, match=f"{error} rank .* got rank 0"):
            torch_op(spec.name)(*scalar_args)


# Layouts, most of which torch cannot express, and memory that two arguments of ngram_step_ share.

ROWS, CAPACITY, WIDTH = 4, 10, 3
NO_ERROR = "no error"
Change = dict[str, Any]


def _view(memory: Array, columns: int, stride: int, rows: int = ROWS) -> Array:
    return np.lib.stride_tricks.as_strided(memory, (rows, columns), (4 * stride, 4))


def _call_step(make_change: Callable[[Array, Array], Change]) -> str:
    """Calls ngram_step_ with valid arguments, of which the arguments of ``make_change(memory,
    num_tokens)`` are replaced. The tokens are at the beginning of the memory.

    Returns:
        The error message without the operator's name, or "no error".
    """
    memory, num_tokens = np.full(160, 6, np.int32), np.full(ROWS + 4, 2, np.int32)[:ROWS]
    arguments = {
        "token_ids": _view(memory, CAPACITY, CAPACITY),
        "num_tokens": num_tokens,
        "sampled_token_ids": np.ones((ROWS, WIDTH), np.int32),
        "discard": np.ones(ROWS, np.bool_),
        "row_indices": np.arange(ROWS, dtype=np.int32),
        "workspace": np.zeros(8, np.int32),
        **make_change(memory, num_tokens),
    }
    step = OPSPECS["ngram_step_"]
    try:
        NUMPY.call(step.name, step.replace(step.sample().args, **arguments))
    except ValueError as error:
        return str(error).removeprefix("ngram_step_: ")
    return NO_ERROR


def _make_overlap_error(stride: int) -> str:
    return (
        "token_ids: expected rows that do not overlap (the tensor is an output), "
        f"got outer stride {stride}"
    )


def _make_sharing_error(written: str, other: str) -> str:
    return (
        f"{written}: expected memory not shared with another argument (the tensor is an output), "
        f"got memory shared with {other}"
    )


SHARED_WITH_SAMPLES = _make_sharing_error("token_ids", "sampled_token_ids")


def _slice_columns(tokens_begin: int, samples_begin: int) -> Callable[[Array, Array], Change]:
    """Returns a change to slices of columns of the same rows, which begin at these items."""

    def make_change(memory: Array, _: Array) -> Change:
        return {
            "token_ids": _view(memory[tokens_begin:], CAPACITY, CAPACITY + WIDTH),
            "sampled_token_ids": _view(memory[samples_begin:], WIDTH, CAPACITY + WIDTH),
        }

    return make_change


INNER_STRIDE = "expected a contiguous inner dimension, got inner stride"
LAYOUTS: dict[str, tuple[Callable[[Array, Array], Change], str]] = {
    "inner stride 0": (
        lambda m, _: {"token_ids": np.broadcast_to(m[:ROWS, None], (ROWS, CAPACITY))},
        f"token_ids: {INNER_STRIDE} 0",
    ),
    "inner stride -1": (lambda _, n: {"num_tokens": n[::-1]}, f"num_tokens: {INNER_STRIDE} -1"),
    "outer stride -10": (
        lambda m, _: {"token_ids": _view(m, CAPACITY, CAPACITY)[::-1]},
        "token_ids: expected outer stride >= 0, got outer stride -10",
    ),
    "strides of single items": (
        lambda m, _: {
            "token_ids": _view(m, CAPACITY, -7, rows=1),
            "num_tokens": np.lib.stride_tricks.as_strided(m[60:], (1,), (36,)),
            "sampled_token_ids": np.lib.stride_tricks.as_strided(m[50:], (1, 1), (0, 20)),
            "discard": None,
            "row_indices": None,
        },
        NO_ERROR,
    ),
    "2**31 columns": (
        lambda m, _: {"token_ids": _view(m, 2**31, CAPACITY)},
        "token_ids: expected at most 2**31 - 1 columns, got 2147483648",
    ),
    "width 66": (
        lambda *_: {"sampled_token_ids": np.zeros((ROWS, 66), np.int32)},
        "sampled_token_ids width: expected 1 to 65, got 66",
    ),
    "policy that is valid in its lower 32 bits": (
        lambda *_: {"match_policy": 2**32 + 1},
        "match_policy: expected 0 to 1, got 4294967297",
    ),
    "overlapping rows": (
        lambda m, _: {"token_ids": _view(m, CAPACITY, CAPACITY - 1)},
        _make_overlap_error(CAPACITY - 1),
    ),
    "equal rows": (
        lambda m, _: {"token_ids": _view(m, CAPACITY, 0)},
        _make_overlap_error(0),
    ),
    "gaps between rows": (
        lambda m, _: {"token_ids": _view(m, CAPACITY, CAPACITY + 1)},
        NO_ERROR,
    ),
    "equal rows that are only read": (
        lambda m, _: {"sampled_token_ids": _view(m[50:], WIDTH, 0)},
        NO_ERROR,
    ),
    "samples begin at the last token": (
        lambda m, _: {"sampled_token_ids": _view(m[ROWS * CAPACITY - 1 :], WIDTH, WIDTH)},
        SHARED_WITH_SAMPLES,
    ),
    "bools begin at the last byte": (
        lambda _, n: {"discard": find_base(n).view(np.bool_)[4 * ROWS - 1 :][:ROWS]},
        _make_sharing_error("num_tokens", "discard"),
    ),
    "lengths begin after the last token": (
        lambda m, _: {"num_tokens": m[ROWS * CAPACITY :][:ROWS]},
        NO_ERROR,
    ),
    "arguments that are only read": (
        lambda m, _: {
            "sampled_token_ids": _view(m[50:], WIDTH, 4),
            "row_indices": m[50 : 50 + ROWS],
        },
        NO_ERROR,
    ),
    "samples after the tokens of each row": (_slice_columns(0, CAPACITY), NO_ERROR),
    "samples before the tokens of the next row": (
        _slice_columns(CAPACITY + 2 * WIDTH, 0),
        NO_ERROR,
    ),
    "samples in the last token's column": (_slice_columns(0, CAPACITY - 1), SHARED_WITH_SAMPLES),
    "samples in the next row's first column": (
        _slice_columns(0, CAPACITY + 1),
        SHARED_WITH_SAMPLES,
    ),
    "tokens in the last sample's column": (_slice_columns(WIDTH - 1, 0), SHARED_WITH_SAMPLES),
    "empty samples inside the tokens": (
        lambda m, _: {
            "sampled_token_ids": _view(m[3:], WIDTH, WIDTH, rows=0),
            "row_indices": m[4:4],
            "discard": m.view(np.bool_)[8:8],
            "workspace": m[5:5],
        },
        NO_ERROR,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_or_shared_memory_of_arguments_is_accepted_or_rejected(layout: str) -> None:
    make_change, message = LAYOUTS[layout]
    assert _call_step(make_change) == message
