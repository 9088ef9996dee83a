from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from beside_runs import BesideRun
    from v2_runs import Run

HERE = Path(__file__).parent
_vllm = importlib.util.find_spec("vllm")  # the folder above has the same name, but no loader
HAVE_V2 = (
    _vllm is not None
    and _vllm.loader is not None
    and importlib.util.find_spec("triton") is not None
)
if HAVE_V2:
    # Set before vLLM is imported, and only if its V2 runner can run. The processes that tests
    # start inherit all of this.
    paths = [str(HERE / "site"), str(HERE), str(HERE.parent / "engine")]
    sys.path[:0] = paths
    os.environ.update(
        PYTHONPATH=os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        TRITON_INTERPRET="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOG_STATS_INTERVAL="100000",  # keeps the counts until a test asks for them
    )
else:
    collect_ignore_glob = ["*"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAVE_V2:
        terminalreporter.write_line(
            "tests/engines/vllm/engine_v2: left out, vLLM and Triton are not installed here "
            "(make test-vllm-v2)"
        )


@pytest.fixture(scope="session")
def model() -> Path:
    import tiny_model

    folder = HERE.parents[3] / "build" / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    return tiny_model.cached(folder)


@pytest.fixture(scope="session")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(model, tmp_path_factory)


class Runs:
    """Each method's results; each engine is started once, in one of pytest's processes."""

    def __init__(self, model: Path, factory: pytest.TempPathFactory) -> None:
        self._model, self._factory = model, factory

    @cache  # noqa: B019, one object per session
    def __call__(self, method: str) -> Run:
        import v2_runs
        from processes import once

        run = partial(v2_runs.run, self._model, v2_runs.METHODS[method])
        return once(self._factory, method, run)

    @cache  # noqa: B019, one object per session
    def beside(self, method: str) -> BesideRun:
        """The same for a neural drafter with n-gram drafts beside it."""
        import beside_runs
        from processes import once

        run = partial(beside_runs.run, self._model, beside_runs.METHODS[method])
        return once(self._factory, f"beside-{method}", run)
