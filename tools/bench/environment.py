"""What a measurement was taken with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ngram_npu
from ngram_npu import _C
from ngram_npu.replay import environment

from tools.bench import vllm_peer

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def machine(device: str = "cpu") -> dict[str, Any]:
    """CPU model, cores this process may use, caches, instruction set in force; and the GPU."""
    found = environment.machine(None)
    del found["threads"]  # a contestant's own affair
    found |= {"caches": caches(), "instruction_set": _C.instruction_set()}
    if device == "cuda":
        from tools.bench.gpu.runtime import Cuda

        found["gpu"] = Cuda().describe()
    return found


def caches(folder: Path = _CACHES) -> dict[str, str]:
    """Data caches by level as the system reports them: size, and how many cores share one."""
    found: dict[str, str] = {}
    for index in sorted(folder.glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level = (index / "level").read_text().strip()
            size = (index / "size").read_text().strip()
            cores = _count((index / "shared_cpu_list").read_text().strip())
        except (OSError, ValueError):
            continue
        if kind != "Instruction":
            found[f"L{level}{'d' if kind == 'Data' else ''}"] = f"{size}, shared by {cores}"
    return found


def versions(device: str = "cpu") -> dict[str, str | None]:
    """Versions by package; None for what is not there or took no part."""
    vllm = vllm_peer.loaded_version()
    if device == "cuda":
        from tools.bench.gpu import vllm_files

        vllm = vllm_files.loaded_version()
    return {
        **environment.versions(),
        "ngram_npu": ngram_npu.__version__,
        "numba": environment.package_version("numba"),
        "triton": environment.package_version("triton"),
        "vllm": vllm,
    }


def _count(cpu_list: str) -> int:
    """How many cpus "0-3,8" names."""
    total = 0
    for part in cpu_list.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not bounds:
            raise ValueError(cpu_list)
        total += int(bounds[2] or bounds[1]) - int(bounds[1]) + 1
    return total
