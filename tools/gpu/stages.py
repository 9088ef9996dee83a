"""What is done on a GPU machine, in what order, and how long each part may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PREFIX = ROOT / "build" / "gpu" / "stage"
"""Where the package is installed: nothing is put into the machine's own Python."""
PEERS = ROOT / "build" / "gpu-peers"
"""vLLM's files, where `python -m tools.gpu.peers` has put them and nothing else is said."""
NCU = ROOT / "build" / "gpu" / "ncu.csv"

DEADLINE_SECONDS = 460
"""For all stages together: under eight minutes with the start of the program."""


@dataclass(frozen=True)
class Stage:
    """One command, which may fail, or not come to an end, without harm to the others."""

    name: str
    command: tuple[str, ...]
    seconds: int
    """It is ended after this long."""
    needs: tuple[str, ...] = ("build", "doctor")
    """Stages without which it makes no sense."""
    tool: str = ""
    """A program that has to be on the path."""
    environment: dict[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    """Files it leaves in the output folder."""


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def bench(name: str, op: str, seconds: int, out: Path, *options: str) -> Stage:
    file = f"{name}.json"
    return Stage(
        f"bench {name}",
        python(
            "-m", "tools.bench", op, "--device", "cuda", "--data-kind", "nomatch", *options,
            "--json", str(out / file),
        ),
        seconds,
        writes=(file,),
    )  # fmt: skip


def stages(out: Path) -> list[Stage]:
    """In the order in which they run: what everything needs, then what would be missed most."""
    # Each tensor is an allocation of its own, so that memcheck sees where it ends.
    unpooled = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    pytest = python("-m", "pytest", "-q", "-p", "no:cacheprovider")
    checked = python("-m", "tools.gpu.parity", "--seconds", "25")
    return [
        Stage("build", python("-m", "tools.gpu.build"), 150, needs=()),
        Stage("doctor", python("-m", "tools.gpu.presence"), 30, needs=("build",)),
        Stage("tests", (*pytest, "tests/gpu"), 90),
        Stage("parity", (*pytest, "tests/ops", "-k", "device-cuda"), 90),
        bench("ngram_step_-cuda", "ngram_step_", 60, out),
        bench("correct_spec_state_-cuda", "correct_spec_state_", 60, out),
        Stage("rows", python("-m", "tools.gpu.rows", "--rows", "1000000"), 80),
        # Hot, its figures would be of what the restored index leaves in the L2.
        bench("ngram_index_step_-cuda", "ngram_index_step_", 60, out, "--cache", "l2-cold"),
        bench(
            "ngram_step_-cuda-v1", "ngram_step_", 120, out,
            "--sizes", "128x32k", "--peer", "vllm-v1", "--peer", "vllm-v1-kernel",
        ),
        Stage(
            "memcheck",
            (
                "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9",
                "--report-api-errors", "no", *checked,
            ),
            75, tool="compute-sanitizer", environment=unpooled,
        ),
        Stage(
            "racecheck",
            ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9", *checked),
            75, tool="compute-sanitizer",
        ),
        Stage(
            "ncu",
            (
                "ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv",
                "--log-file", str(NCU), "--metrics", ",".join(METRICS),
                *python("-m", "tools.gpu.lookups"),
            ),
            60, tool="ncu",
        ),
        bench("ngram_propose-cuda", "ngram_propose", 40, out),
        bench(
            "ngram_step_-cuda-cold", "ngram_step_", 40, out,
            "--cache", "l2-cold", "--peer", "vllm-v2",
        ),
    ]  # fmt: skip


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
