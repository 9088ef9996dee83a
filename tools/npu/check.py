"""The steps of ``python -m tools.npu``: build, parity, bench; what they find, as one JSON file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 1
STEPS = ("build", "parity", "bench")
PACKAGES = (
    "ngram-npu", "numpy", "torch", "torch_npu", "vllm", "vllm-ascend", "triton-ascend",
)  # fmt: skip
KEPT = 16_000
"""Characters of what a failing command said last."""
SIZES = "1x1k,1x32k,1x128k,16x8k,128x8k,128x32k"
BACKEND = "import ngram_npu, json; print(json.dumps(ngram_npu.doctor().to_dict()['backends']))"


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 where a step failed (the file says which and how), 2 for wrong arguments."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command_line(argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": arguments.device,
    }
    steps = [step for step in STEPS if step in arguments.steps]
    if arguments.dry_run:
        for step in steps:
            print(f"== {step}", *map(shlex.join, _COMMANDS[step](arguments)), sep="\n")
        return 0
    try:
        return 0 if _run_steps(steps, arguments, found) else 1
    finally:  # interrupted as well
        found["machine"] = machine(arguments.device)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _run_steps(steps: Sequence[str], arguments: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Up to the first that fails; what each found goes into ``found``."""
    for step in steps:
        print(f"== {step}", flush=True)
        found[step] = {"ok": False, "error": "interrupted"}
        try:
            found[step] = _RUN[step](arguments)
        except Exception as error:  # the file is worth having all the same
            found[step] = {"ok": False, "error": _text(error)}
        if not found[step]["ok"]:
            print(f"{step} FAILED: {found[step].get('error', 'see above')}", flush=True)
            return False
    return True


def _text(error: BaseException) -> str:
    """With its causes: torch says of torch_npu only that it does not load."""
    text = f"{type(error).__name__}: {error}"
    return text if error.__cause__ is None else f"{text} (from {_text(error.__cause__)})"


def _run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Shows what a command says while it runs, and keeps it, both streams in one."""
    said = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},  # the streams keep their order
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line)
    return subprocess.CompletedProcess(command, process.returncode, "".join(said))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.npu", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        default=STEPS,
        metavar="LIST",
        help=f"which of {','.join(STEPS)} (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was found")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument(
        "--soc-version",
        metavar="NAME",
        default=os.environ.get("SOC_VERSION"),
        help="the chip to compile for (default: SOC_VERSION, else the device's own name)",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes(SIZES),
        metavar="LIST",
        help="of the bench: BATCHxCONTEXT,... (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=_count, default=15, help="(default: %(default)s)")
    parser.add_argument("--min-n", type=_count, default=2, help="(default: %(default)s)")
    parser.add_argument("--max-n", type=_count, default=4, help="(default: %(default)s)")
    parser.add_argument("--k", type=_count, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--data-kind",
        choices=("text", "random", "periodic", "nomatch"),
        default="nomatch",
        help="what the rows hold, as in tools/bench (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=("npu", "cpu"), default="npu", help="cpu: to try this script"
    )
    return parser


def _steps(text: str) -> tuple[str, ...]:
    steps = tuple(text.split(","))
    for step in steps:
        if step not in STEPS:
            raise argparse.ArgumentTypeError(f"{step!r} is none of {', '.join(STEPS)}")
    return steps


def _sizes(text: str) -> tuple[str, ...]:
    sizes = tuple(text.split(","))
    for size in sizes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*[km]?", size):
            raise argparse.ArgumentTypeError(f"{size!r}: expected BATCHxCONTEXT, e.g. 128x32k")
    return sizes


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


_count.__name__ = "integer"  # argparse names the type in its messages


def command_line(argv: Sequence[str]) -> str:
    """The command without where its result went."""
    kept, drop = [], False
    for argument in argv:
        if not drop and argument.partition("=")[0] != "--json":
            kept.append(argument)
        drop = argument == "--json"
    return shlex.join(["python", "-m", "tools.npu", *kept])


def _build_commands(arguments: argparse.Namespace) -> list[list[str]]:
    chip = arguments.soc_version or ("CHIP" if arguments.dry_run else device_name())
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    defined = ("NGRAM_NPU_ASCENDC=ON", f"SOC_VERSION={chip}")
    settings = [f"--config-settings=cmake.define.{setting}" for setting in defined]
    return [
        [*pip, "--force-reinstall", *settings, str(ROOT)],
        [sys.executable, "-c", BACKEND],
    ]


def _build(arguments: argparse.Namespace) -> dict[str, Any]:
    install, doctor = _build_commands(arguments)
    began = time.monotonic()
    chip = next(part for part in install if "SOC_VERSION=" in part).partition("SOC_VERSION=")[2]
    built = _run(install)
    found = {"soc_version": chip, "seconds": round(time.monotonic() - began, 1)}
    if built.returncode:
        error = f"pip ended with {built.returncode}"
        return {"ok": False, **found, "error": error, "output": built.stdout[-KEPT:]}
    # Elsewhere than in the repository: the installed package is asked.
    asked = subprocess.run(doctor, check=False, capture_output=True, text=True, cwd="/")
    if asked.returncode:
        error = f"the package that was built ended with {asked.returncode}"
        return {"ok": False, **found, "error": error, "output": asked.stderr[-KEPT:]}
    backend = json.loads(asked.stdout.splitlines()[-1])["npu"]
    return {
        "ok": backend["kernels"] > 0,
        **found,
        "kernels": backend["kernels"],
        **({"error": backend["reason"]} if backend["reason"] else {}),
    }


def _parity_commands(arguments: argparse.Namespace) -> list[list[str]]:
    # The names of the parity suite's tests end in the backend's: "[<op>-npu]".
    chosen = "npu]" if arguments.device == "npu" else "torch-scalar]"
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen]
    return [[sys.executable, "-m", "pytest", *options, "tests/ops/test_parity.py"]]


def _parity(arguments: argparse.Namespace) -> dict[str, Any]:
    (command,) = _parity_commands(arguments)
    done = _run(command, CI="1")
    counts = {
        kind: int(found[1]) if (found := re.search(rf"(\d+) {kind}", done.stdout)) else 0
        for kind in ("passed", "failed", "error")
    }
    if done.returncode == 0 and counts["passed"] > 0:
        return {"ok": True, **counts}
    return {
        "ok": False,
        **counts,
        "error": f"pytest ended with {done.returncode}",
        "failing": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE),
        "output": done.stdout[-KEPT:],
    }


def _bench_commands(arguments: argparse.Namespace) -> list[list[str]]:
    sizes = ",".join(arguments.sizes)
    return [[sys.executable, "-m", "tools.npu", "--steps", "bench", "--sizes", sizes]]


def _bench(arguments: argparse.Namespace) -> dict[str, Any]:
    from tools.npu.bench import run  # imports the package, which `build` may just have replaced

    return run(arguments)


def device_name() -> str:
    """The chip's name as torch_npu has it, which is what SOC_VERSION wants."""
    import torch
    import torch_npu  # noqa: F401

    name: str = torch.npu.get_device_name(0)
    return name


def machine(device: str) -> dict[str, Any]:
    """Processor, chip and versions; under ``unknown`` why some of that is not here."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": _versions,
        "processor": _processor,
        "npu": lambda: {"npu": device_name() if device == "npu" else None},
        "cann": _cann,
    }
    found: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for part, look in parts.items():
        try:
            found |= look()
        except Exception as error:
            unknown[part] = _text(error)
    return found | ({"unknown": unknown} if unknown else {})


def _versions() -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {"versions": versions}


def _processor() -> dict[str, Any]:
    from ngram_npu.replay import environment  # of the package, which may not have been built

    return environment.machine(None)


def _cann() -> dict[str, Any]:
    home = Path(os.environ.get("ASCEND_HOME_PATH", "/nowhere"))
    return {"cann": next((p.read_text().strip() for p in home.glob("**/version.info")), None)}


_COMMANDS: dict[str, Callable[[argparse.Namespace], list[list[str]]]] = {
    "build": _build_commands,
    "parity": _parity_commands,
    "bench": _bench_commands,
}
_RUN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "build": _build,
    "parity": _parity,
    "bench": _bench,
}
