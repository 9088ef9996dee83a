"""Tests that arguments are copied to a device and back. The CPU replaces the device, because the
tests only need a copy of the arguments in other memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from on_device import StrayWriteError, run_on
from ops.specs import find_base
from ops.specs.spec import in_buffer


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
