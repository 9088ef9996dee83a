"""For a machine with an NPU: builds the package, runs the parity suite on the device, measures.
Each stage has a limited time, and its result is recorded.

    python -m tools.npu

It needs an environment with torch, torch_npu, CANN's variables (set_env.sh), scikit-build-core,
pybind11, ninja, pytest and hypothesis. If vllm-ascend is installed, the bench compares with it. See
docs/guides/ascend.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("1x1k", "1x32k", "1x128k", "16x8k", "128x8k", "128x32k")
_PACKAGES = {"numpy", "torch", "torch_npu", "torch-npu", "vllm", "vllm-ascend", "triton-ascend"}
_BENCH = "ngram_step_-npu.json"
_HOUR = 3600
RESULTS = ROOT / "tools" / "bench" / "results"
LOGS = ROOT / "build" / "logs"
_KEPT_CHARACTERS = 16_000
"""Of a failed stage's output in the document; its log, which git ignores, has all."""


@dataclass(frozen=True)
class Stage:
    """One command, which may fail or hang without affecting the others."""

    name: str
    command: tuple[str, ...]
    seconds: float
    """Time limit, after which it is ended."""
    required: bool = False
    """Whether the later stages need it."""
    read: Callable[[str], Any] = lambda output: {}
    """What its output says. ValueError: that it came to nothing, whatever its exit status."""


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def pytest(*arguments: str) -> tuple[str, ...]:
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def counts(output: str) -> dict[str, int]:
    """pytest's last line."""
    last = (output.strip().splitlines() or [""])[-1]
    found = re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?)", last)
    if not any(what == "passed" for _, what in found):
        raise ValueError("no test passed")
    return {what: int(number) for number, what in found}


def run(stages: Sequence[Stage], out: Path) -> Iterator[dict[str, Any]]:
    """A stage that fails takes along only those behind a required one."""
    broken = ""
    for stage in stages:
        print(f"{stage.name:<26}", end="", flush=True)
        env = {**os.environ, "CI": "1", "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        status, reason, output = "left out", "", ""
        if broken:
            reason = f"needs {broken}"
        elif shutil.which(stage.command[0], path=env.get("PATH")) is None:
            reason = f"{stage.command[0]} is not here"
        else:
            LOGS.mkdir(parents=True, exist_ok=True)
            log = LOGS / f"{stage.name}.log"
            status, reason = _execute(stage, log, env)
            output = log.read_text(errors="replace")
        outcome: dict[str, Any] = {
            "stage": stage.name,
            "command": _command(stage),
            "status": status,
            "seconds": round(time.monotonic() - began, 1),
        }
        try:
            if result := stage.read(output):
                outcome["result"] = result
        except ValueError as error:
            if status == "passed":
                outcome["status"], reason = "failed", str(error)
        if outcome["status"] != "passed":
            outcome["reason"] = reason
            broken = broken or (stage.name if stage.required else "")
        if outcome["status"] in ("failed", "timed out"):
            for place, name in ((f"{ROOT}/", ""), (str(ROOT), "."), (str(out), "$OUT")):
                output = output.replace(place, name)
            outcome["output"] = output[-_KEPT_CHARACTERS:]
        yield outcome


def _execute(stage: Stage, log: Path, env: Mapping[str, str]) -> tuple[str, str]:
    """Runs a stage; ending it also ends its child processes."""
    with log.open("w") as file, subprocess.Popen(
        stage.command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            rc = process.wait(stage.seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return "timed out", f"after {stage.seconds:g} s"
    return ("passed", "") if rc == 0 else ("failed", f"exit status {rc}")


def _command(stage: Stage) -> str:
    """The command without paths of this machine."""
    words = ["python3" if word == sys.executable else word for word in stage.command]
    return shlex.join(Path(w).name if w.startswith("/") else w for w in words)


def plan(out: Path) -> list[Stage]:
    bench = python(
        "-m", "tools.bench", "ngram_step_", "--device", "npu", "--data-kind", "zipf",
        "--sizes", *SIZES, "--peer", "vllm-ascend", "--json", str(out / _BENCH),
    )  # fmt: skip
    return [
        Stage("build", python("-m", "tools.npu.build"), 2 * _HOUR, required=True),
        Stage("doctor", python("-m", "ngram_npu_cli", "doctor"), 300, read=str.splitlines),
        # The names of the parity suite's tests end in the backend's: "[<op>-device-npu]".
        Stage(
            "parity", pytest("-k", "npu]", "tests/ops/test_parity.py"), _HOUR,
            required=True, read=counts,
        ),
        Stage("bench", bench, _HOUR),
    ]  # fmt: skip


def findings(out: Path, begun: float) -> dict[str, Any]:
    """The bench's figures, so that one file holds all results. A file from before ``begun``, a time
    of day, is another run's."""
    here = {found.metadata["Name"]: found.version for found in distributions()}
    versions = {name: version for name, version in here.items() if name in _PACKAGES}
    file = out / _BENCH
    if not file.is_file() or file.stat().st_mtime < begun:
        return {"versions": versions}
    return {"versions": versions, "bench": json.loads(file.read_text(encoding="utf-8"))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.npu")
    add = parser.add_argument
    add("--out", type=Path, help="for the files (default: $OUT, else tools/bench/results)")
    add("--only", nargs="+", metavar="STAGE", help="instead of all")
    add("--dry-run", action="store_true", help="only print what would be run")
    given = parser.parse_args(arguments)
    out = (given.out or Path(os.environ.get("OUT") or RESULTS)).resolve()
    stages = plan(out)
    if unknown := set(given.only or ()) - {stage.name for stage in stages}:
        parser.error(f"no stage {', '.join(unknown)}; there are: {[s.name for s in stages]}")
    stages = [stage for stage in stages if given.only is None or stage.name in given.only]
    if given.dry_run:
        for stage in stages:
            print(f"{stage.name:<26}{stage.seconds:>6g} s  {_command(stage)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    outcomes: list[dict[str, Any]] = []
    for outcome in run(stages, out):
        reason = f": {outcome['reason']}" if outcome.get("reason") else ""
        print(f"{outcome['seconds']:>6.1f} s  {outcome['status']}{reason}")
        print(outcome.get("output", "")[-2500:], end="", flush=True)
        outcomes.append(outcome)
        document = {  # after each stage: what was found is kept, whatever comes
            "command": "python -m tools.npu",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "stages": outcomes,
            **findings(out, begun),
        }
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        (out / "npu-run.json").write_text(text, encoding="utf-8")
    return 0 if all(outcome["status"] == "passed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
