"""The machine and the software of a measurement."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngram_npu import _C
from ngram_npu_cli.replay import environment

from tools.bench import vllm_peer

ROOT = Path(__file__).parents[2]


def machine(device: str = "cpu") -> dict[str, Any]:
    """CPU model, cores this process may use, caches, instruction set in force; and the device."""
    found = environment.machine(None)
    del found["threads"]  # each contestant records its own
    found |= {"caches": caches(), "instruction_set": _C.instruction_set()}
    if device != "cpu":
        from tools.bench.device import describe

        found[device] = describe(device)
    return found


def caches() -> dict[str, str]:
    """Data caches by level as the system reports them: size, and which cores share one."""
    found: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError):
            kind, level, size, cores = (
                (index / name).read_text().strip()
                for name in ("type", "level", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                found[f"L{level}{'d' if kind == 'Data' else ''}"] = f"{size}, of cores {cores}"
    return found


def versions() -> dict[str, str | None]:
    """Versions of the installed packages, and the checkout's commit; vLLM's if it took part."""
    others = ("numba", "triton", "torch_npu", "vllm-ascend", "triton-ascend", "transformers")
    found = environment.versions() | {name: environment.package_version(name) for name in others}
    found |= {"vllm": vllm_peer.loaded_version(), "commit": _commit()}
    return {name: version for name, version in found.items() if version is not None}


def _commit() -> str | None:
    """The commit that is checked out, with "-dirty" if a file differs from it. Results do not
    count, or the first of several would change what the others say. None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!tools/bench/results")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
