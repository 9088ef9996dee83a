"""Machine and versions of a measurement, for its record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import ngram_npu._C as _C


def machine(threads: int | None) -> dict[str, Any]:
    """CPU model, cores that this process may use, requested thread limit (None: the default)."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": _usable_cores(),
        "threads": threads,
    }


def versions() -> dict[str, str | None]:
    """Versions by package; torch is None if it has not been loaded."""
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "numpy": package_version("numpy"),
        "torch": None if torch is None else str(torch.__version__),
        "ngram_npu": _C.__version__,
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in cpuinfo.splitlines():
            # x86 says "model name"; some ARM kernels say "Model" or "Hardware" only.
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
