"""Builds the package on a machine with an NPU, runs the parity suite on the NPU, and runs the
benchmark. Each stage has a time limit, and npu-run.json contains its result.

    python -m tools.npu

Requires an environment with torch, torch_npu, CANN's variables (set_env.sh), scikit-build-core,
pybind11, ninja and pytest. See docs/guides/ascend.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("1x1k", "1x32k", "1x128k", "16x8k", "128x8k", "128x32k")
RESULTS = ROOT / "tools" / "bench" / "results"
LOGS = ROOT / "build" / "logs"
_PACKAGES = {"numpy", "torch", "torch_npu", "torch-npu", "vllm", "vllm-ascend", "triton-ascend"}
_BENCH_FILE = "lookup-npu.json"
_HOUR = 3600
_RECORDED_CHARACTERS = 16_000
"""Maximum number of characters from the end of a failed stage's output that npu-run.json contains.
The stage's log in build/logs has the whole output."""


@dataclass(frozen=True)
class Stage:
    """A Python command, which may fail or hang without affecting other stages."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    """Time limit."""
    required: bool = False
    """If True, no further stage runs after a failure of this one."""
    parse_output: Callable[[str], Any] = lambda output: {}
    """Returns the stage's result from its output. Raises ValueError if the stage failed although
    its exit status is 0."""

    @property
    def command(self) -> str:
        """The command without paths of this machine."""
        words = (Path(w).name if w.startswith("/") else w for w in self.arguments)
        return shlex.join(["python3", *words])


def parse_counts(output: str) -> dict[str, int]:
    """Returns the numbers of tests by outcome from the last line of pytest's output."""
    last = (output.strip().splitlines() or [""])[-1]
    counts = re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?)", last)
    if not any(outcome == "passed" for _, outcome in counts):
        raise ValueError("expected at least one test that passed, got none")
    return {outcome: int(number) for number, outcome in counts}


def run_stage(stage: Stage, out: Path) -> dict[str, Any]:
    """Runs a stage and returns its entry for npu-run.json. After a timeout or an interrupt, kills
    the stage and its child processes."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log, start = LOGS / f"{stage.name}.log", time.monotonic()
    with log.open("w") as file, subprocess.Popen(
        [sys.executable, *stage.arguments],
        cwd=ROOT,
        env={**os.environ, "CI": "1", "PYTHONUNBUFFERED": "1"},
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        reason = ""
        try:
            if status := process.wait(stage.seconds):
                reason = f"exit status {status}"
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            reason = f"timed out after {stage.seconds:g} s"
    output = log.read_text(errors="replace")
    result = {}
    try:
        result = stage.parse_output(output)
    except ValueError as error:
        reason = reason or str(error)
    entry: dict[str, Any] = {
        "stage": stage.name,
        "command": stage.command,
        "status": "failed" if reason else "passed",
        "seconds": round(time.monotonic() - start, 1),
        **({"result": result} if result else {}),
    }
    if reason:
        for path, name in ((f"{ROOT}/", ""), (str(ROOT), "."), (str(out), "$OUT")):
            output = output.replace(path, name)
        entry |= {"reason": reason, "output": output[-_RECORDED_CHARACTERS:]}
    return entry


def make_build_command() -> list[str]:
    """Returns the command that builds and installs the package for the chip in SOC_VERSION
    (default: this machine's NPU)."""
    if not (chip := os.environ.get("SOC_VERSION")):
        import torch
        import torch_npu  # noqa: F401

        chip = torch.npu.get_device_name(0)
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    defined = ("NGRAM_NPU_ASCENDC=ON", f"SOC_VERSION={chip}")
    settings = [f"--config-settings=cmake.define.{setting}" for setting in defined]
    return [*pip, "--force-reinstall", *settings, str(ROOT)]


def plan_stages(out: Path) -> list[Stage]:
    bench = (
        "-m", "tools.bench.lookup", "--device", "npu", "--sizes", *SIZES,
        "--json", str(out / _BENCH_FILE),
    )  # fmt: skip
    # The id of each parity test ends with the backend's name: "[<op>-device-npu]".
    parity = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "npu]")
    return [
        Stage("build", ("-m", "tools.npu", "--build"), 2 * _HOUR, required=True),
        Stage("doctor", ("-m", "ngram_npu_cli", "doctor"), 300, parse_output=str.splitlines),
        Stage("parity", (*parity, "tests/ops/test_parity.py"), _HOUR, True, parse_counts),
        Stage("bench", bench, _HOUR),
    ]


def collect_results(out: Path, start: float) -> dict[str, Any]:
    """Returns the package versions and the benchmark's results, so that npu-run.json contains all
    results. Ignores a results file that is older than ``start``: it is from an earlier run."""
    installed = {d.metadata["Name"]: d.version for d in distributions()}
    versions = {name: version for name, version in installed.items() if name in _PACKAGES}
    file = out / _BENCH_FILE
    if not file.is_file() or file.stat().st_mtime < start:
        return {"versions": versions}
    return {"versions": versions, "bench": json.loads(file.read_text(encoding="utf-8"))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.npu")
    add = parser.add_argument
    add("--out", type=Path, help="output folder (default: $OUT, else tools/bench/results)")
    stage_names = ("build", "doctor", "parity", "bench")
    add("--only", nargs="+", choices=stage_names, help="run only these stages (default: all)")
    add("--build", action="store_true", help="only build and install; write no npu-run.json")
    add("--dry-run", action="store_true", help="only print what would be run")
    options = parser.parse_args(arguments)
    if options.build:
        return subprocess.run(make_build_command(), check=False).returncode
    out = (options.out or Path(os.environ.get("OUT") or RESULTS)).resolve()
    stages = [s for s in plan_stages(out) if options.only is None or s.name in options.only]
    if options.dry_run:
        print(*(f"{s.name:<8}{s.seconds:>6g} s  {s.command}" for s in stages), sep="\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    start, entries = time.time(), []
    for stage in stages:
        entry = run_stage(stage, out)
        entries.append(entry)
        reason = entry.get("reason", "")
        print(f"{stage.name:<8}{entry['seconds']:>6.1f} s  {entry['status']} {reason}")
        print(entry.get("output", "")[-2500:], end="", flush=True)
        document = {  # written after each stage, so that no result is lost if a later stage fails
            "command": "python -m tools.npu",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "stages": entries,
            **collect_results(out, start),
        }
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        (out / "npu-run.json").write_text(text, encoding="utf-8")
        if reason and stage.required:
            print(f"the stages after {stage.name} were not run")
            break
    return 0 if all(entry["status"] == "passed" for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
