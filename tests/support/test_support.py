"""Tests that arguments are copied to a device and back. The CPU replaces the device, because the
tests only need a copy of the arguments in other memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import Backend
from on_device import DeviceArguments, StrayWriteError, make_device_call, run_on
from ops.parity import check_parity
from ops.specs import OPSPECS, OpSpec, find_base
from ops.specs.spec import in_buffer

EACH_SPEC = pytest.mark.parametrize("spec", OPSPECS.values(), ids=lambda s: s.name)


@EACH_SPEC
def test_copies_keep_layout_and_values(spec: OpSpec) -> None:
    for sample in spec.samples:
        copies = DeviceArguments(sample.args, "cpu").args
        for value, copy in zip(sample.args, copies, strict=True):
            if not isinstance(value, np.ndarray):
                assert value is copy
                continue
            assert tuple(copy.shape) == value.shape
            assert [step * value.itemsize for step in copy.stride()] == list(value.strides)
            assert np.array_equal(copy.numpy(), value)
            assert not np.shares_memory(copy.numpy(), value)


@EACH_SPEC
def test_operator_on_copies_equals_reference(spec: OpSpec) -> None:
    check_parity(spec, Backend("device-cpu", make_device_call("cpu")), spec.sample())


def test_views_of_one_array_share_memory_on_the_device() -> None:
    buffer = np.arange(20, dtype=np.int32)
    first_view, second_view = DeviceArguments((buffer[2:9], buffer[5:]), "cpu").args
    first_view[3] = -5
    assert second_view[0] == -5


def test_mask_bytes_other_than_0_and_1_are_copied_unchanged() -> None:
    mask = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    (copy,) = DeviceArguments((mask,), "cpu").args
    assert copy.dtype == torch.bool
    assert copy.numpy().view(np.uint8).tolist() == [0, 1, 2, 255]


def test_writes_inside_and_around_a_view_are_copied_back() -> None:
    # In a larger buffer, with two items before each row and one after it.
    rows = in_buffer(np.zeros((3, 4), np.int32), before=2, gap=1)

    def write(tensor: torch.Tensor) -> None:
        tensor.fill_(7)
        tensor.as_strided((1,), (1,), tensor.storage_offset() - 1).fill_(8)

    assert run_on("cpu", write, (rows,)) == ()
    assert (rows == 7).all()
    assert find_base(rows)[0, 1] == 8


@pytest.mark.parametrize("offset", [-1, 12], ids=["before", "after"])
def test_write_outside_the_base_array_raises_error(offset: int) -> None:
    values = np.zeros(12, np.int32)

    def write(tensor: torch.Tensor) -> None:
        tensor.as_strided((1,), (1,), tensor.storage_offset() + offset).fill_(3)

    with pytest.raises(StrayWriteError):
        run_on("cpu", write, (values,))
    assert not values.any()


def test_array_in_column_order_is_rejected() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        DeviceArguments((np.zeros((3, 4), np.int32, order="F"),), "cpu")
