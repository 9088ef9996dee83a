"""The host twins: device kernels compiled for this machine, against strict models of the devices.

Each is one more backend library with the entry points of its device, made by ``make twins``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("NGRAM_NPU_TWINS", ROOT / "build" / "twins" / "lib"))


@dataclass(frozen=True)
class Twin:
    name: str
    """Of the library, and of the backend in the parity suite."""
    device: str
    """"cuda" or "npu"."""
    prefix: str
    """Of the entry points: ``ngram_npu_<prefix>_<op>``."""
    folder: Path = FOLDER

    @property
    def path(self) -> Path:
        path = self.folder / f"libngram_npu_{self.name}.so"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: `make twins` builds it")
        return path

    def serves(self, op: str) -> bool:
        return hasattr(_library(self.path), f"ngram_npu_{self.prefix}_{op}")

    def allow_races(self, allowed: bool) -> None:
        """Whether calls may break the rules on who writes what, where the model watches that."""
        allow = getattr(_library(self.path), f"ngram_npu_{self.prefix}_twin_allow_races", None)
        if allow is not None:
            allow(allowed)

    def fault(self) -> str:
        """What the model's last check that failed said; empty where none did or it does not say."""
        said = getattr(_library(self.path), f"ngram_npu_{self.prefix}_twin_fault", None)
        if said is None:
            return ""
        said.restype = ctypes.c_char_p
        return str(said().decode())


TWINS = (
    Twin("cuda_fast", "cuda", "cuda"),
    Twin("cuda_resident", "cuda", "cuda"),
    Twin("ascendc_twin", "npu", "ascendc"),
    Twin("ascendc_twin_950", "npu", "ascendc"),
)
FAST_CUDA = TWINS[0]


def kernel_exists(op: str, device: str) -> bool:
    return any(twin.serves(op) for twin in TWINS if twin.device == device)


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
