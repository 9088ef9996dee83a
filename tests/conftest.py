from __future__ import annotations

import gc
import importlib.util
import os

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # GPU machines may lack it
    from hypothesis import HealthCheck, settings

    # CI repeats the same examples; a developer's machine tries new ones in each run.
    settings.register_profile(
        "ci",
        derandomize=bool(os.environ.get("CI")),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("ci")


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
