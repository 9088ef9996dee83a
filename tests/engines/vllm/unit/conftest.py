from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ngram_npu import set_num_threads
from ngram_npu.config import INDEX_POLICY


@pytest.fixture(autouse=True)
def _index_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have few tokens, which would be scanned instead."""
    monkeypatch.setattr(INDEX_POLICY, "max_scan_tokens", -1)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """A drafter sets the number of threads of the process."""
    yield
    set_num_threads(0)


@pytest.fixture(autouse=True, scope="module")
def _end_engines() -> Iterator[None]:
    """A module's engines log their counts when they end, not during another module's test."""
    yield
    gc.collect()


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Records what the plugin logs, and removes its import hooks after the test."""
    caplog.set_level("DEBUG", "vllm.ngram_npu")
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder vllm/v1 of a vLLM without modules, in place of the one that is installed."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "vllm"]

    hidden = {name: sys.modules.pop(name) for name in loaded()}
    finders = list(sys.meta_path)
    for folder in ("vllm", "vllm/v1", "vllm/v1/spec_decode", "vllm/v1/worker"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "vllm" / "v1"
    sys.meta_path[:] = finders
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(hidden)
