from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine_runs import Run

# The search may find the folder `vllm` above, which has no loader; the real package has one.
_found = importlib.util.find_spec("vllm")
HAVE_VLLM = _found is not None and _found.loader is not None
if HAVE_VLLM:
    # Set before vLLM is imported, and only if it is installed: every test session loads this file.
    # One thread: no waiting for threads on a busy core, and sums always in the same order.
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS="1",
        NUMBA_NUM_THREADS="1",  # numba's threads are torch's, from its first call on
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
    )
else:
    collect_ignore_glob = ["*"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAVE_VLLM:
        terminalreporter.write_line(
            "tests/engines/vllm/engine: left out, vLLM is not installed here (make test-vllm)"
        )


@pytest.fixture(scope="session")
def model() -> Path:
    import tiny_model

    folder = Path(__file__).parents[4] / "build" / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    return tiny_model.cached(folder)


@pytest.fixture(scope="session")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(model, tmp_path_factory)


# Seeded requests crash vLLM's CPU runner (0.32.0) if one of them is prefilled in chunks, with or
# without speculation, so they get an engine without chunked prefill.
ENGINES: dict[tuple[str, ...], dict[str, Any]] = {
    ("greedy", "structured", "logprobs"): {},
    ("sampled",): {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 400,
    },
}


class Runs:
    """Each method's results for each set of requests; each engine is started once, in one of
    pytest's processes."""

    def __init__(self, model: Path, factory: pytest.TempPathFactory) -> None:
        self._model, self._factory = model, factory

    def __call__(self, method: str, requests: str) -> Run:
        return self._of_engine(method, next(names for names in ENGINES if requests in names))[
            requests
        ]

    @cache  # noqa: B019, one object per session
    def _of_engine(self, method: str, names: tuple[str, ...]) -> dict[str, Run]:
        import request_sets
        from engine_runs import METHODS, engine
        from processes import once
        from transformers import AutoTokenizer

        def run() -> dict[str, Run]:
            prompts = request_sets.Prompts(AutoTokenizer.from_pretrained(self._model))
            with engine(self._model, METHODS[method], **ENGINES[names]) as running:
                return {name: running.run(getattr(request_sets, name)(prompts)) for name in names}

        return once(self._factory, f"{method}-{names[0]}", run)
