"""The engines of a data-parallel server, as vLLM configures them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import v2_runs
from ngram_npu.vllm.options import read_options
from ngram_npu.vllm.stats import Stats
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCoreProc


def _engine(model: str, store_file: str, index: int, test: Connection) -> None:
    """Begins an engine as vLLM's process does, up to the point where the engine is made."""

    def told(self: Any, vllm_config: Any, **kwargs: Any) -> None:
        options = read_options(vllm_config, "v2")
        label = Stats(self, vllm_config, options)._labels["engine"]
        rank = vllm_config.parallel_config.data_parallel_rank
        test.send((rank, label, options.store_file))
        raise SystemExit

    EngineCoreProc.__init__ = told  # type: ignore[method-assign]
    arguments = v2_runs.METHODS["store"].arguments
    arguments["additional_config"]["ngram_npu"] |= {"store_file": store_file}
    config = EngineArgs(model, data_parallel_size=2, **arguments).create_engine_config()
    EngineCoreProc.run_engine_core(vllm_config=config, dp_rank=index, local_dp_rank=index)


@pytest.mark.parametrize(("index", "file"), [(0, "store"), (1, "store.1")])
def test_each_engine_of_a_dense_model_has_its_file_and_its_label(
    model: Path, tmp_path: Path, index: int, file: str
) -> None:
    here, there = multiprocessing.Pipe()
    arguments = str(model), str(tmp_path / "store"), index, there
    process = multiprocessing.get_context("fork").Process(target=_engine, args=arguments)
    process.start()
    assert here.poll(200)
    assert here.recv() == (0, str(index), str(tmp_path / file))  # vLLM's rank is always 0
    process.join()
