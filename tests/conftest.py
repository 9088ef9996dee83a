from __future__ import annotations

import gc
import os

import pytest


@pytest.fixture
def no_torch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Processes that the test starts find no torch, which takes seconds to import. Returns the
    folder that does it, for those that do not inherit PYTHONPATH."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise ImportError('hidden')")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return str(folder)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay, so collections of garbage need not walk them each time."""
    gc.collect()
    gc.freeze()
