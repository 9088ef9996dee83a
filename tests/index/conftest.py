from __future__ import annotations

from collections.abc import Iterator

import pytest
from backends import in_place_of_the_cpu
from twins import FAST_CUDA


@pytest.fixture(scope="module")
def on_the_cuda_twin() -> Iterator[None]:
    with in_place_of_the_cpu(FAST_CUDA):
        yield
