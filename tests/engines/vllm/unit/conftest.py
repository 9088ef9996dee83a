"""Fixtures of the unit tests of the vLLM adapter, and a fake package `vllm`."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_engine import V2
from ngram_npu import set_num_threads
from ngram_npu.engines.vllm import plugin
from ngram_npu.engines.vllm.v2 import RowDrafter


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """Restores the process's number of threads, which a drafter sets."""
    yield
    set_num_threads(0)


@pytest.fixture(autouse=True, scope="module")
def _end_engines() -> Iterator[None]:
    """Ends a module's engines, so that these log their counts before another module's tests."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _record_log(caplog: pytest.LogCaptureFixture) -> None:
    """Records the lines that an engine logs at its start and at its end."""
    caplog.set_level("INFO", "vllm.ngram_npu")


@pytest.fixture
def plugin_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Records what the plugin logs, and removes the plugin's import hooks after the test."""
    caplog.set_level("DEBUG", "vllm.ngram_npu")
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders


@pytest.fixture(autouse=True)
def _wrap_add_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the plugin's wrapper of ``add_requests`` in the V2 runner."""
    module: Any = ModuleType(plugin.V2_RUNNER)
    module.GPUModelRunner = V2
    monkeypatch.setattr(V2, "add_requests", V2.add_requests)
    monkeypatch.setattr(RowDrafter, "has_request_data", False)
    plugin.install_request_data(module)
    assert RowDrafter.has_request_data


class FakeVLLM:
    """A fake package `vllm` that hides an installed vLLM. Tests write the package's modules."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_module(self, name: str, text: str) -> None:
        path = self._folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def install_and_import(self, name: str) -> Any:
        """Installs the plugin, which must not import the module, and then imports the module."""
        plugin.install()
        plugin.install()
        assert name not in sys.modules
        return importlib.import_module(name)


@pytest.fixture
def vllm(plugin_log: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVLLM]:
    def list_loaded_modules() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_ascend")]

    hidden_modules = {name: sys.modules.pop(name) for name in list_loaded_modules()}
    fake = FakeVLLM(tmp_path)
    for package in ("vllm", "vllm.v1", "vllm.v1.spec_decode", "vllm.v1.worker"):
        fake.write_module(f"{package}.__init__", "")
    fake.write_module(plugin.MODULE, "")
    monkeypatch.syspath_prepend(tmp_path)
    yield fake
    for name in list_loaded_modules():
        del sys.modules[name]
    sys.modules.update(hidden_modules)
