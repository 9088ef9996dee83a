"""Builds, tests, checks and measures on a machine with an NVIDIA GPU: ``make gpu``. It uses only
installed tools and no network. See docs/design/gpu-targets.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tools.gpu.build import PREFIX
from tools.gpu.targets import launches, targets
from tools.runner import Stage, counts, main, pytest, python, said

DEADLINE_SECONDS = 540
"""Time limit of all stages together: under ten minutes including start-up."""
CUDA_PROGRAMS = "/usr/local/cuda/bin"
"""Where an installer puts nvcc, compute-sanitizer and ncu; it may not be on the path."""
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
    "launch__grid_size",
)


def bench(
    name: str, op: str, seconds: int, out: Path, *options: str, kind: str = "nomatch"
) -> Stage:
    command = python(
        "-m", "tools.bench", op, "--device", "cuda", "--data-kind", kind, *options,
        "--json", str(out / f"{name}.json"),
    )  # fmt: skip
    return Stage(name, command, seconds)


def first_stages() -> list[Stage]:
    return [
        Stage("build", python("-m", "tools.gpu.build"), 110, required=True),
        Stage(
            "presence", pytest("tests/gpu/test_devices.py", "-k", "takes_part"), 30,
            required=True, read=counts,
        ),
    ]  # fmt: skip


def plan(out: Path) -> list[Stage]:
    """The stages in the order in which they run: what all others need, then the most important. The
    sum of their times fits the deadline, so that the last one runs too."""
    return [
        *first_stages(),
        # The twins are not built here.
        Stage("tests", pytest("tests/gpu", "-k", "not on_twin"), 70, read=counts),
        Stage("parity", pytest("tests/ops", "-k", "device-cuda"), 60, read=counts),
        bench("ngram_step_-cuda", "ngram_step_", 70, out),
        bench("correct_spec_state_-cuda", "correct_spec_state_", 40, out),
        Stage(
            "ncu",
            (
                "ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv",
                "--metrics", ",".join(METRICS), *python("-m", "tools.gpu.watched", "lookups"),
            ),
            50, read=launches,
        ),
        # With a hot cache, restoring the index would decide what is in the L2.
        bench("ngram_index_step_-cuda", "ngram_index_step_", 80, out, "--cache", "l2-cold"),
        bench("index-build-cuda", "index-build", 30, out, kind="zipf"),
    ]  # fmt: skip


def rest(out: Path) -> list[Stage]:
    """The stages of a second run: ``make gpu-rest``."""
    # Each tensor gets its own allocation, so that memcheck knows its bounds.
    unpooled = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    sanitizer = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
    checked = python("-m", "tools.gpu.watched", "parity")
    shapes = ("--sizes", "1x128k", "1024x4k", "256x128k-ragged", "256x1m-one-long")
    return [
        *first_stages(),
        Stage("rows", python("-m", "tools.gpu.rows"), 50, read=said),
        Stage(
            "memcheck", (*sanitizer, "memcheck", "--report-api-errors", "no", *checked), 50,
            read=said, environment=unpooled,
        ),
        Stage("racecheck", (*sanitizer, "racecheck", *checked), 50, read=said),
        bench("ngram_step_-cuda-shapes", "ngram_step_", 50, out, *shapes),
        bench(
            "ngram_step_-cuda-zipf", "ngram_step_", 50, out, *shapes[:-1], "128x32k", kind="zipf"
        ),
        bench(
            "ngram_index_step_-cuda-shapes", "ngram_index_step_", 40, out, *shapes[:-1],
            "--cache", "l2-cold", kind="zipf",
        ),
        bench(
            "ngram_step_-cuda-v1", "ngram_step_", 50, out,
            "--sizes", "128x32k", "--peer", "vllm-v1", "--peer", "vllm-v1-kernel",
        ),
        bench("ngram_propose-cuda", "ngram_propose", 30, out),
        bench(
            "ngram_step_-cuda-cold", "ngram_step_", 30, out,
            "--cache", "l2-cold", "--peer", "vllm-v2",
        ),
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """The environment, with the installed package first on the path."""
    return {
        "NGRAM_NPU_REQUIRE_GPU": str(PREFIX),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PREFIX), os.environ.get("PYTHONPATH")))),
        "PATH": os.pathsep.join((os.environ.get("PATH", os.defpath), CUDA_PROGRAMS)),
    }


def findings(out: Path, begun: float) -> dict[str, Any]:
    """This run's result files and the targets. An interrupted bench may leave partial figures."""
    written = [file for file in out.glob("*-cuda*.json") if file.stat().st_mtime >= begun]
    files = sorted(file.name for file in written)
    return {"files": files, "targets": targets(out, files)}


if __name__ == "__main__":
    sys.exit(main("gpu", plan, findings, seconds=DEADLINE_SECONDS, environment=environment()))
