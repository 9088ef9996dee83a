"""Builds the simulated CUDA driver (driver.cpp), and makes torch use one of its streams."""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ngram_npu import host_drafting

SOURCE = Path(__file__).with_name("driver.cpp")


def build_driver(folder: Path) -> ctypes.CDLL:
    library = folder / "libcuda.so.1"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, SOURCE, "-o", library], check=True)
    return load_driver(library)


def load_driver(library: Path) -> ctypes.CDLL:
    driver = ctypes.CDLL(str(library))
    driver.stand_in_create_stream.restype = ctypes.c_void_p
    driver.stand_in_copy.argtypes = *[ctypes.c_void_p] * 3, ctypes.c_size_t
    for name in ("stand_in_wait", "stand_in_fail"):
        getattr(driver, name).argtypes = (ctypes.c_void_p,)
    driver.stand_in_hold.argtypes = ctypes.c_void_p, ctypes.c_bool
    return driver


class LateStream(host_drafting.CudaStream):
    """A ``CudaStream`` that uses the simulated driver, for jobs and for copies."""

    def __init__(self, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        self.handle = driver.stand_in_create_stream()
        self.driver = driver
        self._copied_tensors: list[torch.Tensor] = []  # kept alive until the copies have run
        stream = SimpleNamespace(cuda_stream=self.handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(ctypes, "CDLL", self._open)
        super().__init__()

    def _open(self, name: str) -> Any:
        assert name == "libcuda.so.1"
        return self.driver

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        source = source.contiguous()
        self._copied_tensors += [to, source]
        assert to.is_contiguous()
        assert to.dtype == source.dtype
        size = to.numel() * to.element_size()
        self.driver.stand_in_copy(self.handle, to.data_ptr(), source.data_ptr(), size)

    def wait(self) -> None:
        self.driver.stand_in_wait(self.handle)
        self._copied_tensors.clear()

    def hold(self, is_held: bool) -> None:
        """Stops the stream before its next task, or continues the stream."""
        self.driver.stand_in_hold(self.handle, is_held)

    def fail(self) -> None:
        self.driver.stand_in_fail(self.handle)
