from __future__ import annotations

import pytest

from npu.npu_process import Npu, make_npu


@pytest.fixture(scope="session")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Npu:
    return make_npu(tmp_path_factory.mktemp("stage"))
