"""Compiles a changed kernel against the twin's model and runs the parity samples on it."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from backends import Backend, call_torch
from cuda_hooks import (
    changed_lengths_break,
    dirty_workspaces,
    failed_launch_goes_unnoticed,
    watched,
)
from ops.parity import MismatchError, check_parity
from ops.specs import OPSPECS, OpSpec
from repo.verify.mutants.mutant import Mutant
from twins import FOLDER, ROOT, Twin

MODES = ("fast", "resident", "hooks")
"""The cheapest first."""
RECORD = ROOT / "tools" / "bench" / "results" / "cuda-mutants.json"
SECONDS = 120
"""Of a processor: a kernel that takes longer does not end. By the clock it may be ten times that,
since the machine may be busy."""
ORDERS = 6
"""How often what blocks share is looked up: each time they meet in another order."""


def modes_for(mutant: Mutant) -> tuple[str, ...]:
    """What only the hooks noticed need not first go through all samples of the others."""
    recorded = json.loads(RECORD.read_text())["caught_by"] if RECORD.exists() else {}
    return MODES[::-1] if recorded.get(mutant.name) == MODES[-1] else MODES


def caught(mutant: Mutant) -> str:
    """In which mode the samples noticed, and how; empty where none did."""
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(folder) / "csrc"
        for part in ("core", "cuda"):
            shutil.copytree(ROOT / "csrc" / part, csrc / part)
        (Path(folder) / mutant.file).write_text(mutant.changed())
        for mode in modes_for(mutant):
            library = build(csrc, mutant, mode)
            noticed = in_a_child(lambda mode=mode, lib=library: run_samples(mutant.op, mode, lib))
            if noticed:
                return f"{mode}: {noticed}"
    return ""


def build(csrc: Path, mutant: Mutant, mode: str) -> Path:
    """The operator's kernels as a library of their own, where Twin looks."""
    library = csrc.parent / mode / f"libngram_npu_cuda_{mode}.so"
    library.parent.mkdir()
    include = [f"-I{ROOT / 'tests/twins/cuda/include'}", f"-I{csrc}"]
    compiled = []
    parts = [(source_of(mutant.op, csrc), mode)]
    # The launch is the host's part, which nobody watches. The model has it, without a fault.
    if "/launch." in mutant.file:
        parts.append((csrc / "cuda/launch.cu", "fast"))
    for source, flags_of in parts:
        flags = f"-std=c++17 -fPIC -fvisibility=hidden -w @{FOLDER / flags_of}.flags"
        compiled.append(library.with_name(f"{source.stem}.o"))
        _run(f"g++ {flags} -c -x c++", source, *include, "-o", compiled[-1])
    # Without the flags, which would bring the sanitizers' own libraries.
    model = FOLDER / f"libcuda_twin_{mode}.a"
    _run("g++ -shared -Wl,--no-undefined", *compiled, model, "-o", library)
    return library


def source_of(op: str, csrc: Path = ROOT / "csrc") -> Path:
    """The file with the operator's CUDA kernel: its own, or its family's."""
    own = csrc / "cuda" / f"{op.rstrip('_')}.cu"
    return own if own.exists() else own.with_stem(OPSPECS[op].family)


def _run(command: str, *more: str | Path) -> None:
    subprocess.run([*shlex.split(command), *map(str, more)], check=True)


def run_samples(kernel: str, mode: str, library: Path) -> str:
    """Of all operators that run this kernel."""
    specs = (spec for spec in OPSPECS.values() if spec.kernel == kernel)
    return next(filter(None, (run_samples_of(spec, mode, library) for spec in specs)), "")


def run_samples_of(spec: OpSpec, mode: str, library: Path) -> str:
    if mode == "hooks":
        backend = watched(spec, library)
    else:
        twin = Twin(f"cuda_{mode}", "cuda", "cuda", library.parent)
        backend = Backend(mode, call_torch, twin=twin)
    if unnoticed := failed_launch_goes_unnoticed(spec, backend):
        return unnoticed
    if mode == "fast" and (broken := changed_lengths_break(spec, backend)):
        return broken
    samples = list(spec.samples(np.random.default_rng(2026)))
    if mode == "hooks":
        samples += dirty_workspaces(spec)
    for sample in samples:
        try:
            for _ in range(ORDERS if sample.label.startswith("few-long") else 1):
                check_parity(spec, backend, sample)
        except (MismatchError, RuntimeError) as error:
            return f"{sample.label}: {type(error).__name__}: {error}"
    return ""


def in_a_child(task: Callable[[], str]) -> str:
    """What it returns, or how it ended: a wrong kernel may take its process with it."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(10 * SECONDS)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 9))  # pytest inherits it
            faulthandler.disable()  # a crash is what some faults lead to
            os.write(sending, task()[:4000].encode())
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 1:
        raise RuntimeError("the samples could not be run; see above")
    if status > 0:  # what a library found broken: of its heap, say
        return f"ended with status {status}"
    return said if status == 0 else f"ended by {signal.Signals(-status).name}"
