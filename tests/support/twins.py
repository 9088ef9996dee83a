"""Loads the host twins: device kernels compiled for this machine, on strict models of the devices.

Each twin is a backend library with the entry points of its device. ``make twins`` builds the twins.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ngram_npu import _library

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("NGRAM_NPU_TWINS", ROOT / "build" / "twins" / "lib"))


@dataclass(frozen=True)
class Twin:
    name: str
    """Name of the library, and of the backend in the parity suite."""
    device: str
    """"cuda" or "npu"."""
    prefix: str
    """Prefix of the entry points: ``ngram_npu_<prefix>_<op>``."""
    folder: Path = FOLDER

    @property
    def path(self) -> Path:
        path = self.folder / f"libngram_npu_{self.name}.so"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: `make twins` builds it")
        return path

    def allow_races(self, is_allowed: bool) -> None:
        """Sets whether calls may race, if the model detects races."""
        allow = getattr(_load_library(self.path), f"ngram_npu_{self.prefix}_twin_allow_races", None)
        if allow is not None:
            allow(is_allowed)

    def get_fault(self) -> str:
        """Returns the message of the model's last failed check; empty if no check has failed."""
        function = getattr(_load_library(self.path), f"ngram_npu_{self.prefix}_twin_fault", None)
        if function is None:
            return ""
        function.restype = ctypes.c_char_p
        return str(function().decode())

    @contextmanager
    def use_cores(self, num_cores: int) -> Iterator[None]:
        """Gives the model of an NPU this number of cores within a `with` block. Otherwise, launches
        alternate between several numbers."""
        set_cores = _load_library(self.path).ngram_npu_ascendc_twin_set_cores
        set_cores(ctypes.c_int64(num_cores))
        try:
            yield
        finally:
            set_cores(ctypes.c_int64(0))


TWINS = (
    Twin("cuda_fast", "cuda", "cuda"),
    Twin("cuda_resident", "cuda", "cuda"),
    Twin("ascendc_twin", "npu", "ascendc"),
    Twin("ascendc_twin_950", "npu", "ascendc"),
)


def load_kernels(prefix: str, device: str, path: Path) -> _library.Backend:
    """Registers the kernels ``ngram_npu_<prefix>_<op>`` of a library for a device. Operators must
    not run at the same time."""
    _library.load()
    state = _library._state
    assert state is not None
    assert state.library is not None, state.reason
    return _library._load_backend(state.library, prefix, device, path)


@functools.cache
def _load_library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
