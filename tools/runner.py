"""Runs the stages for a machine with a device in order, each for a limited time, and records the
result of each: ``python -m tools.gpu``, ``python -m tools.npu``."""

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
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "bench" / "results"
LOGS = ROOT / "build" / "logs"
"""Not in the folder of results, because a lent machine returns only a few files."""
_LEAST_SECONDS = 5.0
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
    environment: Mapping[str, str] = field(default_factory=dict)


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def pytest(*arguments: str) -> tuple[str, ...]:
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def said(output: str) -> Any:
    """What a line ``RESULT {json}`` says."""
    found = re.findall(r"^RESULT (\{.*\})$", output, re.MULTILINE)
    if not found:
        raise ValueError("no result was printed")
    return json.loads(found[-1])


def counts(output: str) -> dict[str, int]:
    """pytest's last line."""
    last = (output.strip().splitlines() or [""])[-1]
    found = re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?)", last)
    if not any(what == "passed" for _, what in found):
        raise ValueError("no test passed")
    return {what: int(number) for number, what in found}


def run(
    stages: Sequence[Stage], seconds: float, out: Path, environment: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Each stage gets its own time or what is left of all. One that fails takes along only those
    behind a required one."""
    end = time.monotonic() + seconds
    broken = ""
    for stage in stages:
        print(f"{stage.name:<26}", end="", flush=True)
        env = {**os.environ, "CI": "1", "PYTHONUNBUFFERED": "1", **environment, **stage.environment}
        began = time.monotonic()
        status, reason, output = "left out", "", ""
        if broken:
            reason = f"needs {broken}"
        elif shutil.which(stage.command[0], path=env.get("PATH")) is None:
            reason = f"{stage.command[0]} is not here"
        elif end - began < _LEAST_SECONDS:
            reason = "no time was left"
        else:
            LOGS.mkdir(parents=True, exist_ok=True)
            log = LOGS / f"{stage.name}.log"
            status, reason = _execute(stage, min(stage.seconds, end - began), log, env)
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


def _execute(stage: Stage, seconds: float, log: Path, env: Mapping[str, str]) -> tuple[str, str]:
    """Runs a stage; ending it also ends its child processes."""
    with log.open("w") as file, subprocess.Popen(
        stage.command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            rc = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return "timed out", f"after {seconds:g} s"
    return ("passed", "") if rc == 0 else ("failed", f"exit status {rc}")


def _command(stage: Stage) -> str:
    """The command without paths of this machine."""
    words = ["python3" if word == sys.executable else word for word in stage.command]
    return shlex.join(Path(w).name if w.startswith("/") else w for w in words)


def main(
    name: str,
    plan: Callable[[Path], list[Stage]],
    findings: Callable[[Path, float], dict[str, Any]],
    *,
    arguments: Sequence[str] | None = None,
    seconds: float,
    environment: Mapping[str, str],
) -> int:
    """
    Args:
        name: of the program, ``tools.NAME``, and of what it writes, ``NAME-run.json``.
        plan: the stages, for the folder that their files go into.
        findings: what else the document says, from that folder and the time of day of the
            beginning: files that are older are another run's.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.{name}")
    add = parser.add_argument
    add("--out", type=Path, help="for the files (default: $OUT, else tools/bench/results)")
    add("--only", nargs="+", metavar="STAGE", help="instead of all")
    add("--seconds", type=float, default=seconds, help="for all of it (default: %(default)g)")
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
    document: dict[str, Any] = {}
    for outcome in run(stages, given.seconds, out, environment):
        reason = f": {outcome['reason']}" if outcome.get("reason") else ""
        print(f"{outcome['seconds']:>6.1f} s  {outcome['status']}{reason}")
        print(outcome.get("output", "")[-2500:], end="", flush=True)
        outcomes.append(outcome)
        document = {  # after each stage: what was found is kept, whatever comes
            "command": f"python -m tools.{name}",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "stages": outcomes,
            **findings(out, begun),
        }
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        (out / f"{name}-run.json").write_text(text, encoding="utf-8")
    for target in document.get("targets", ()):
        print(*target.values(), sep=", ")
    return 0 if all(outcome["status"] == "passed" for outcome in outcomes) else 1
