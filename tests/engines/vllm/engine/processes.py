"""Scripts in processes of their own, and what tests share between the processes that run them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from filelock import FileLock
from ngram_npu import NgramStore

T = TypeVar("T")

SERVE = Path(__file__).with_name("serve_offline.py")
ONE_ENGINE = {
    "NGRAM_NPU_VLLM": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # fewer NUMA nodes than ranks
}
"""Environment of an engine that has several ranks below it."""


class Process:
    """A script with arguments, those that are no strings as JSON."""

    def __init__(
        self, log: Path, script: Path | str, model: Path, *arguments: Any, **environment: str
    ) -> None:
        self._log = log
        words = [each if isinstance(each, str) else json.dumps(each) for each in arguments]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(model), *words],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> tuple[int, str]:
        """Its exit status and its log."""
        return self._process.wait(900), self._log.read_text()

    def result(self) -> tuple[dict[str, Any], str]:
        """What it printed as its result, and its log."""
        status, log = self.end()
        assert status == 0, log[-4000:]
        (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
        return json.loads(line.removeprefix("RESULT ")), log


def once(factory: pytest.TempPathFactory, name: str, run: Callable[[], T]) -> T:
    """What ``run`` returns, made by the first of pytest's processes that needs it."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / f"{name}.pickle"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            file.write_bytes(pickle.dumps(run()))
    made: T = pickle.loads(file.read_bytes())
    return made


def saved_often(store: Path) -> dict[str, str]:
    """The environment of an engine that saves its store in each step."""
    return {
        "NGRAM_NPU_VLLM_STORE_FILE": str(store),
        "NGRAM_NPU_VLLM_STORE_SAVE_MINUTES": "0.0001",
    }


def assert_died_and_left(process: Process, store: Path) -> None:
    """The engine said in one line that its second rank was killed, and left a whole file."""
    status, log = process.end()
    assert status != 0
    (line,) = [line for line in log.splitlines() if "died unexpectedly" in line]
    assert "VllmWorker-1" in line
    assert "EngineDeadError" in log
    assert "RESULT " not in log
    saved = NgramStore.load(store)
    saved.check_integrity()
    assert saved.statistics.tokens_held > 0
