"""Fixtures of the engine tests, which run on the V2 runner if Triton is installed, and otherwise on
V1's runner.

`make test-vllm` has an environment for each runner. Files named test_v1_* or
test_v2_* need that runner, test_neural_* needs V2, and the other files run on both runners.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _is_installed(name: str) -> bool:
    # find_spec may find the folder tests/engines/vllm as a namespace package, which has no loader.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.loader is not None


RUNNER = "none"
if _is_installed("vllm"):
    RUNNER = "v2" if _is_installed("triton") else "v1"

IGNORED_FILES = {"none": ["*"], "v1": ["test_v2_*", "test_neural_*"], "v2": ["test_v1_*"]}
collect_ignore_glob = IGNORED_FILES[RUNNER]  # read by pytest

# vLLM reads these variables on import, and the processes that tests start inherit them. Every test
# session loads this file, so it changes nothing if vLLM is not installed.
if RUNNER != "none":
    paths = [str(HERE / "site"), str(HERE)]
    sys.path[:0] = paths
    os.environ.update(
        PYTHONPATH=os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        TORCHDYNAMO_DISABLE="1",
        # With one thread, no thread waits for a busy core, and sums have a fixed order.
        OMP_NUM_THREADS="1",
        NUMBA_NUM_THREADS="1",  # numba's first call sets torch's number of threads to its own
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
    )
if RUNNER == "v2":
    os.environ.update(
        TRITON_INTERPRET="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_LOG_STATS_INTERVAL="100000",  # keeps the counts until a test reads them
    )


FIRST_FILES = ["test_server.py", "test_v1_symbols.py"]
"""Files that the two test processes run first. The first one takes longest and trains the model,
without which other files wait; the second one needs no model."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ([*FIRST_FILES, item.path.name]).index(item.path.name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if RUNNER == "none":
        terminalreporter.write_line(
            "tests/engines/vllm/engine: skipped, because vLLM is not installed (make test-vllm)"
        )


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of the tiny target model."""
    import tiny_model

    folder = HERE.parents[3] / "build" / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    return tiny_model.get_model_folder(folder)


@pytest.fixture(scope="session")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(model, tmp_path_factory)


class Runs:
    """Results by drafting method. Each method runs once, in one of pytest's processes."""

    def __init__(self, model: Path, factory: pytest.TempPathFactory) -> None:
        self._model, self._folder = model, factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            self._folder = self._folder.parent

    @functools.cache  # noqa: B019, lives as long as the session
    def __call__(self, method: str) -> Any:
        """Returns the results of a method."""
        from filelock import FileLock
        from runs import METHODS, run_method

        file = self._folder / f"{method}.pickle"
        with FileLock(file.with_suffix(".lock")):
            if not file.exists():
                file.write_bytes(pickle.dumps(run_method(self._model, METHODS[method])))
        return pickle.loads(file.read_bytes())
