"""The round trip to a device keeps layouts and shows stray writes. The CPU stands in for the
device: only a copy of the arguments in other memory is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import Backend
from on_device import OnDevice, StrayWriteError, call_on, run_on
from ops.parity import check_parity
from ops.specs import OPSPECS, OpSpec, owner
from ops.specs.spec import in_buffer

SPECS = list(OPSPECS.values())
BACKEND = Backend("device-cpu", call_on("cpu"))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_layouts_and_values_arrive(spec: OpSpec) -> None:
    for sample in spec.samples(np.random.default_rng(11)):
        there = OnDevice(sample.args, "cpu")
        for mine, theirs in zip(sample.args, there.args, strict=True):
            if not isinstance(mine, np.ndarray):
                assert mine is theirs
                continue
            assert tuple(theirs.shape) == mine.shape
            assert [s * mine.itemsize for s in theirs.stride()] == list(mine.strides)
            assert np.array_equal(theirs.numpy(), mine)
            assert not np.shares_memory(theirs.numpy(), mine)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_parity_through_the_round_trip(spec: OpSpec) -> None:
    check_parity(spec, BACKEND, spec.sample())


def test_views_of_one_owner_share_its_memory_there() -> None:
    buffer = np.arange(20, dtype=np.int32)
    first, second = OnDevice((buffer[2:9], buffer[5:]), "cpu").args
    first[3] = -5
    assert second[0] == -5


def test_what_is_written_comes_back_with_its_surroundings() -> None:
    rows = in_buffer(np.zeros((3, 4), np.int32), before=2, gap=1)

    def write(tensor: torch.Tensor) -> None:
        tensor.fill_(7)
        tensor.as_strided((1,), (1,), tensor.storage_offset() - 1).fill_(8)

    assert run_on("cpu", write, (rows,)) == ()
    assert (rows == 7).all()
    assert owner(rows)[0, 1] == 8


@pytest.mark.parametrize("at", [-1, 12], ids=["before", "behind"])
def test_a_write_into_the_guards_is_an_error(at: int) -> None:
    values = np.zeros(12, np.int32)

    def write(tensor: torch.Tensor) -> None:
        tensor.as_strided((1,), (1,), tensor.storage_offset() + at).fill_(3)

    with pytest.raises(StrayWriteError):
        run_on("cpu", write, (values,))
    assert not values.any()


def test_views_of_other_dtypes_keep_their_bytes() -> None:
    """Masks with bytes that are neither 0 nor 1 are among the hostile samples."""
    mask = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    (there,) = OnDevice((mask,), "cpu").args
    assert there.dtype == torch.bool
    assert there.numpy().view(np.uint8).tolist() == [0, 1, 2, 255]


def test_an_owner_in_another_order_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        OnDevice((np.zeros((3, 4), np.int32, order="F"),), "cpu")
