"""The machine and the software of a measurement."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngram_npu import _C
from ngram_npu_cli import report as environment

from tools.bench import vllm_peer

ROOT = Path(__file__).parents[2]


def machine(device: str = "cpu") -> dict[str, Any]:
    """Returns CPU model, usable cores, caches, the instruction set in use, and the device."""
    description = environment.machine(None)
    del description["threads"]  # each contestant records its own
    description |= {"caches": caches(), "instruction_set": _C.instruction_set()}
    if device != "cpu":
        from tools.bench.device import describe

        description[device] = describe(device)
    return description


def caches() -> dict[str, str]:
    """Returns the data caches by level as the system reports them: size, and the sharing cores."""
    sizes: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError):
            names = ("type", "level", "size", "shared_cpu_list")
            kind, level, size, cores = ((index / name).read_text().strip() for name in names)
            if kind != "Instruction":
                sizes[f"L{level}{'d' if kind == 'Data' else ''}"] = f"{size}, of cores {cores}"
    return sizes


def versions() -> dict[str, str | None]:
    """Returns the versions of installed packages, the checkout's commit, and vLLM's if it took
    part."""
    others = ("numba", "triton", "torch_npu", "vllm-ascend", "triton-ascend", "transformers")
    packages = environment.versions()
    packages |= {name: environment.package_version(name) for name in others}
    packages |= {"vllm": vllm_peer.loaded_version(), "commit": _find_commit()}
    return {name: version for name, version in packages.items() if version is not None}


def _find_commit() -> str | None:
    """Returns the commit that is checked out, with "-dirty" if a file differs from it; None without
    git. Results do not count, or the first of several would make the others' commit dirty."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!tools/bench/results")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
