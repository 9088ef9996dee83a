"""Builds the package on a machine with an NPU, runs the parity suite on the NPU, and runs the
benchmark. npu-run.json contains the results.

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
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("1x1k", "1x32k", "1x128k", "16x8k", "128x8k", "128x32k")
RESULTS = ROOT / "tools" / "bench" / "results"
_PACKAGES = {"numpy", "torch", "torch_npu", "torch-npu", "vllm", "vllm-ascend", "triton-ascend"}
_RECORDED_CHARACTERS = 16_000
"""Maximum number of characters from the end of a stage's output that npu-run.json contains."""
STAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "build": (7200, ("-m", "tools.npu", "--build")),
    "doctor": (300, ("-m", "ngram_npu_cli", "doctor")),
    # The id of each parity test ends with the backend's name: "[<op>-device-npu]".
    "parity": (
        3600,
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "npu]", "tests/ops/test_parity.py"),
    ),
    "bench": (3600, ("-m", "tools.bench.lookup", "--device", "npu", "--sizes", *SIZES)),
}
"""The time limit in seconds and the arguments of Python, by name. After this time, the
stage's processes are killed, because a kernel may hang."""


def run_stage(name: str, *further_arguments: str) -> dict[str, Any]:
    """Runs a stage, prints its output, and returns its entry for npu-run.json."""
    seconds, arguments = STAGES[name]
    print(f"== {name}: python3 {shlex.join(arguments)}", flush=True)
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *arguments, *further_arguments],
        cwd=ROOT,
        env={**os.environ, "CI": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output, _ = process.communicate()
    print(output, flush=True)
    status = "passed" if process.returncode == 0 else f"failed (exit status {process.returncode})"
    if time.monotonic() - start >= seconds:
        status = f"failed (more than {seconds} s)"
    # Without an NPU, pytest deselects or skips all tests.
    elif name == "parity" and not re.search(r"\d+ passed", output):
        status = "failed (no test passed)"
    entry = {
        "stage": name,
        "command": shlex.join(["python3", *arguments]),
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "output": output[-_RECORDED_CHARACTERS:].replace(str(ROOT), "."),
    }
    print(f"== {name}: {entry['status']} in {entry['seconds']} s", flush=True)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.npu")
    add = parser.add_argument
    add("--out", type=Path, help="output folder (default: $OUT, else tools/bench/results)")
    add("--only", nargs="+", choices=[*STAGES], help="run only these stages (default: all)")
    add("--build", action="store_true", help="only build and install; write no npu-run.json")
    options = parser.parse_args(arguments)
    if options.build:
        return subprocess.run(make_build_command(), check=False).returncode
    out = (options.out or Path(os.environ.get("OUT") or RESULTS)).resolve()
    out.mkdir(parents=True, exist_ok=True)
    bench_file = out / "lookup-npu.json"
    installed = {d.metadata["Name"]: d.version for d in distributions()}
    document: dict[str, Any] = {
        "command": "python -m tools.npu",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: v for name, v in installed.items() if name in _PACKAGES},
        "stages": [],
    }
    for name in [stage for stage in STAGES if stage in (options.only or STAGES)]:
        entry = run_stage(name, *(("--json", str(bench_file)) if name == "bench" else ()))
        document["stages"].append(entry)
        if name == "bench" and entry["status"] == "passed":
            document["bench"] = json.loads(bench_file.read_text(encoding="utf-8"))
        # Written after each stage, so that no result is lost if a later one fails.
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        (out / "npu-run.json").write_text(text, encoding="utf-8")
        if name in ("build", "parity") and entry["status"] != "passed":
            print(f"the stages after {name} were not run")
            break
    return 0 if all(entry["status"] == "passed" for entry in document["stages"]) else 1


if __name__ == "__main__":
    sys.exit(main())
