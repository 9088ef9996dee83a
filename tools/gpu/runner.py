"""Runs the stages one after the other within a time, and keeps what each came to."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.gpu.stages import PEERS, PREFIX, ROOT, Stage

_TAIL_CHARACTERS = 60_000
_LEAST_SECONDS = 5.0
CUDA_PROGRAMS = Path("/usr/local/cuda/bin")
"""Where an installer puts nvcc, compute-sanitizer and ncu, on the path or not."""
_VLLM = "NGRAM_NPU_BENCH_VLLM_PATH"

Clock = Callable[[], float]
Which = Callable[..., str | None]
"""`shutil.which`."""


@dataclass
class Outcome:
    name: str
    status: str
    """passed, failed, timed out, or left out."""
    seconds: float = 0.0
    rc: int | None = None
    reason: str = ""
    tail: str = ""
    """The end of what it printed."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Execute = Callable[[Stage, float, Mapping[str, str]], tuple[int | None, str]]
"""Runs a stage for at most so many seconds -> exit status, None if it was ended; its output."""


def run_all(
    stages: Sequence[Stage],
    deadline_seconds: float,
    execute: Execute,
    report: Callable[[Outcome], None],
    clock: Clock = time.monotonic,
    which: Which = shutil.which,
) -> list[Outcome]:
    """Each stage gets its own time or what is left of all. One that fails takes along only those
    that need it."""
    begun = clock()
    outcomes: dict[str, Outcome] = {}
    for stage in stages:
        left = deadline_seconds - (clock() - begun)
        missing = [n for n in stage.needs if n not in outcomes or outcomes[n].status != "passed"]
        if missing:
            outcome = Outcome(stage.name, "left out", reason=f"needs {', '.join(missing)}")
        elif stage.tool and which(stage.tool, path=environment(stage)["PATH"]) is None:
            outcome = Outcome(stage.name, "left out", reason=f"{stage.tool} is not here")
        elif left < _LEAST_SECONDS:
            outcome = Outcome(stage.name, "left out", reason="no time was left")
        else:
            outcome = _run(stage, min(stage.seconds, left), execute, clock)
        outcomes[stage.name] = outcome
        report(outcome)
    return list(outcomes.values())


def _run(stage: Stage, seconds: float, execute: Execute, clock: Clock) -> Outcome:
    start = clock()
    try:
        rc, output = execute(stage, seconds, environment(stage))
    except OSError as error:
        return Outcome(stage.name, "failed", reason=str(error))
    outcome = Outcome(stage.name, "passed", round(clock() - start, 1), rc)
    outcome.tail = output[-_TAIL_CHARACTERS:]
    if rc is None:
        outcome.status, outcome.reason = "timed out", f"after {seconds:.0f} s"
    elif rc != 0:
        outcome.status, outcome.reason = "failed", f"exit status {rc}"
    return outcome


def environment(stage: Stage) -> dict[str, str]:
    """The machine's, with the installed package in front and the peers where they are."""
    found = {**os.environ, "CI": "1", "NGRAM_NPU_REQUIRE_GPU": "1", **stage.environment}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PREFIX), found.get("PYTHONPATH"))))
    if _VLLM not in found and PEERS.is_dir():
        found[_VLLM] = str(PEERS)
    found["PYTHONUNBUFFERED"] = "1"  # both streams go into one, in order
    found["PATH"] = os.pathsep.join(filter(None, (found.get("PATH"), str(CUDA_PROGRAMS))))
    return found


def execute(stage: Stage, seconds: float, env: Mapping[str, str]) -> tuple[int | None, str]:
    """For real. A stage that is ended takes its children with it."""
    with subprocess.Popen(
        stage.command, cwd=ROOT, env=dict(env), text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        return process.returncode, output
