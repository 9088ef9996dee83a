"""Bad calls are rejected before anything is written, by an error that names op, argument, expected
and got. The calls are derived from the schemas and the OpSpecs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from backends import DEVICE_BACKENDS, FRONT_ENDS, Backend, to_torch
from ngram_npu import _C
from on_device import torch_op
from ops.specs import OPSPECS, BadCall, OpSpec, clone_args, owner, same_bits

SPECS = list(OPSPECS.values())
CALLERS = [*FRONT_ENDS, *DEVICE_BACKENDS]


def _inner_stride_two(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, axis=-1)[..., ::2]


def _derived(spec: OpSpec) -> Iterator[BadCall]:
    """Every tensor with a wrong dtype, rank and inner stride."""
    for name in spec.tensor_names:
        label = spec.sample_with(name).label
        for what, change, message in (
            ("dtype", lambda a: a.astype(np.float32), "got float32"),
            ("rank", lambda a: a[None], "expected rank"),
            ("stride", _inner_stride_two, "inner stride 2"),
        ):
            yield BadCall(f"{name} {what}", {name: change}, message, name, label)


CASES = [
    pytest.param(spec, bad, front_end, id=f"{spec.name}-{bad.label}-{front_end.name}")
    for spec in SPECS
    for bad in (*spec.bad_calls, *_derived(spec))
    for front_end in CALLERS
]


@pytest.mark.parametrize(("spec", "bad", "front_end"), CASES)
def test_refused_before_anything_is_written(spec: OpSpec, bad: BadCall, front_end: Backend) -> None:
    args = spec.replace(clone_args(spec.sample(bad.sample).args), **bad.change)
    before = clone_args(args)
    with pytest.raises(ValueError) as raised:
        front_end.call(spec.name, args)
    message = str(raised.value)
    argument = bad.argument or next(iter(bad.change))
    assert message.startswith(f"{spec.name}: {argument}: expected "), message
    assert ", got " in message
    assert re.search(bad.message, message), message
    for mine, original in zip(args, before, strict=True):
        if isinstance(mine, np.ndarray):
            assert np.array_equal(owner(mine), owner(original))


OF_ANY_SIZE = {
    "index", "store", "workspace", "input_ids", "neural_acceptance", "positions", "block_table",
    "slot_mapping", "num_computed_tokens", "num_accepted_tokens", "num_sampled_prev",
    "num_draft_prev", "correct_spec_state_: seq_lens", "correct_spec_state_: discard",
    "correct_spec_state_: num_tokens",
    "ngram_index_reset_: slot_indices", "ngram_store_finish_: slot_indices",
}  # fmt: skip
"""What may be larger than it must be, or has a size of its own."""


@pytest.mark.parametrize("front_end", CALLERS, ids=lambda b: b.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_sizes_have_to_agree(spec: OpSpec, front_end: Backend) -> None:
    """Each tensor one item shorter; the error may name another one, which then is too long."""
    for name in spec.tensor_names:
        for sample in (spec.sample(), spec.sample_with(name)):
            args = clone_args(sample.args)
            if {name, f"{spec.name}: {name}"} & OF_ANY_SIZE or spec.get(args, name) is None:
                continue
            short = spec.replace(args, **{name: lambda a: a[:-1]})
            with pytest.raises(ValueError, match=rf"^{spec.name}: \w+: expected s\w+ .*, got s"):
                front_end.call(spec.name, short)


@pytest.mark.parametrize("front_end", CALLERS, ids=lambda b: b.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_memory_of_a_written_tensor_is_its_own(spec: OpSpec, front_end: Backend) -> None:
    """Every pair of a written int32 tensor and another one of its rank that share memory."""
    sample = next(spec.samples(np.random.default_rng(1)))
    values = dict(zip([n for n, _ in spec.arguments], clone_args(sample.args), strict=True))
    pairs = 0
    for written in sorted(spec.written):
        for other in spec.tensor_names:
            mine, theirs = values[written], values[other]
            if other == written or mine is None or theirs is None:
                continue
            if (mine.dtype, mine.ndim) != (theirs.dtype, theirs.ndim):
                continue
            if any(m < t for m, t in zip(mine.shape, theirs.shape, strict=True)):
                continue
            shared = mine[tuple(slice(0, n) for n in theirs.shape)]
            pairs += 1
            with pytest.raises(ValueError, match=rf"{spec.name}: \w+: expected memory not shared"):
                front_end.call(spec.name, spec.replace(tuple(values.values()), **{other: shared}))
    assert pairs > 0 or not spec.written - {"workspace"}


OF_EITHER_WIDTH = {
    "row_indices", "slot_indices", "prev_positions", "slot_mapping", "scopes",
    "neural_draft_token_ids", "ngram_propose_: draft_token_ids",
}  # fmt: skip


@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_int64_for_int32_says_how_to_convert(spec: OpSpec, front_end: Backend) -> None:
    """What argmax gives; not for what is written, where the result would go to the copy."""
    for name in spec.tensor_names:
        args = spec.sample_with(name).args
        if spec.get(args, name).dtype != np.int32:
            continue
        wide = spec.replace(clone_args(args), **{name: lambda a: a.astype(np.int64)})
        if {name, f"{spec.name}: {name}"} & OF_EITHER_WIDTH:
            front_end.call(spec.name, wide)
            continue
        with pytest.raises(ValueError, match=f"{name}: expected int32, got int64") as raised:
            front_end.call(spec.name, wide)
        assert (".astype(numpy.int32)" in str(raised.value)) == (name not in spec.written)


DTYPES = "int8 int16 uint8 uint16 uint32 uint64 float16 float32 float64 complex64"


@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", DTYPES.split())
def test_a_wrong_dtype_is_named(dtype: str, front_end: Backend) -> None:
    spec = OPSPECS["ngram_step_"]
    args = spec.replace(spec.sample().args, sampled_token_ids=np.zeros((3, 2), dtype))
    expected = "another dtype" if dtype == "complex64" else dtype
    with pytest.raises(ValueError, match=f"sampled_token_ids: expected int32, got {expected}$"):
        front_end.call(spec.name, args)


def test_bfloat16_is_named() -> None:
    """A dtype that numpy does not have."""
    args = list(to_torch(clone_args(OPSPECS["ngram_step_"].sample().args)))
    args[2] = args[2].bfloat16()
    with pytest.raises(ValueError, match="sampled_token_ids: expected int32, got bfloat16"):
        torch_op("ngram_step_")(*args)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_numpy_wants_arrays(spec: OpSpec) -> None:
    good = next(spec.samples(np.random.default_rng(1))).args
    for name in spec.tensor_names:
        with pytest.raises(ValueError, match=f"{spec.name}: {name}: expected a numpy array"):
            FRONT_ENDS[1].call(spec.name, spec.replace(good, **{name: [1, 2, 3]}))


class NoText:
    def __repr__(self) -> str:
        raise OSError


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_numpy_takes_each_argument_by_place_or_by_name(spec: OpSpec) -> None:
    args, operator = spec.sample().args, getattr(_C, spec.name)
    names = [name for name, _ in spec.arguments]
    given = dict(zip(names, args, strict=True))
    backwards = {name: given[name] for name in reversed(names)}
    returned = operator(*clone_args(args))
    found = operator(**dict(zip(backwards, clone_args([*backwards.values()]), strict=True)))
    for mine, other in zip(found or (), returned or (), strict=True):
        assert same_bits(mine, other)
    for bad, keywords, message in (
        (args, {names[0]: args[0]}, f"{names[0]}: given twice"),
        (args, {"tokens": 1}, "tokens: no such argument"),
        ((*args, 1), {}, f"at most {len(args)} arguments"),
        ((), {}, f"{names[0]}: missing"),
    ):
        with pytest.raises(TypeError, match=f"^{spec.name}: .*{message}"):
            operator(*bad, **keywords)
    for name, kind in spec.arguments:
        if not kind.startswith("Tensor"):
            for bad, said in (("7", "'7'"), (NoText(), ".*NoText")):
                expected = rf"^{spec.name}: {name}: expected (int|bool), got {said}"
                with pytest.raises(TypeError, match=expected):
                    operator(**{**given, name: bad})


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_numpy_layouts_no_kernel_can_take(spec: OpSpec) -> None:
    """Read-only, unaligned and byte-swapped arrays; what is only read may be read-only."""
    fine = spec.sample().args
    for (name, _), value in zip(spec.arguments, fine, strict=True):
        if isinstance(value, np.ndarray) and name not in spec.written:
            value.flags.writeable = False
    FRONT_ENDS[1].call(spec.name, fine)
    for name in spec.tensor_names:
        good = spec.sample_with(name).args
        value = good[[n for n, _ in spec.arguments].index(name)]
        changes = {}
        if value.dtype.itemsize > 1:
            raw = np.zeros(value.nbytes + 1, np.uint8)[1:]
            changes["got another dtype"] = np.zeros(value.shape, np.dtype([]))
            changes["aligned"] = np.ndarray(value.shape, value.dtype, raw)
            changes["got another"] = value.astype(value.dtype.newbyteorder(">"))
        if name in spec.written:
            frozen = value.copy()
            frozen.flags.writeable = False
            changes["writable"] = frozen
        for message, change in changes.items():
            with pytest.raises(ValueError, match=f"{spec.name}: {name}: .*{message}"):
                FRONT_ENDS[1].call(spec.name, spec.replace(clone_args(good), **{name: change}))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_torch_tensors_without_a_place_to_read(spec: OpSpec) -> None:
    """Unaligned ones, and None for what is not optional."""
    call = getattr(torch.ops.ngram_npu, spec.name)
    required = {a.name for a in call.default._schema.arguments if str(a.type) == "Tensor"}
    assert required
    for name in spec.tensor_names:
        good = clone_args(spec.sample_with(name).args)
        args = dict(zip([n for n, _ in spec.arguments], to_torch(good), strict=True))
        value = args[name]
        if value.itemsize > 1:
            raw = bytearray(value.nbytes + 1)
            odd = torch.frombuffer(raw, dtype=value.dtype, offset=1, count=value.numel())
            with pytest.raises(ValueError, match=f"{spec.name}: {name}: expected .* aligned"):
                call(**{**args, name: odd.view(value.shape)})
        if name in required:
            with pytest.raises(ValueError, match=f"{spec.name}: {name}: expected .* got None"):
                call(**{**args, name: None})


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_devices_are_not_mixed(spec: OpSpec) -> None:
    """A real tensor and one without data: torch calls the fake, which must reject them as well."""
    for name in spec.tensor_names:
        args = dict(
            zip(
                [n for n, _ in spec.arguments],
                to_torch(clone_args(spec.sample_with(name).args)),
                strict=True,
            )
        )
        if sum(isinstance(value, torch.Tensor) for value in args.values()) < 2:
            continue
        args[name] = args[name].to("meta")
        with pytest.raises(ValueError, match=rf"{spec.name}: \w+: expected device \w+ as \w+, got"):
            torch_op(spec.name)(*args.values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_fakes_refuse_rank_0(spec: OpSpec) -> None:
    for name in spec.tensor_names:
        args = [
            value.to("meta") if isinstance(value, torch.Tensor) else value
            for value in to_torch(clone_args(spec.sample_with(name).args))
        ]
        at = [n for n, _ in spec.arguments].index(name)
        args[at] = args[at].new_empty(())
        with pytest.raises(ValueError, match=rf"{spec.name}: {name}: expected rank .* got rank 0"):
            torch_op(spec.name)(*args)
