"""Compiles a kernel with a fault for its twin, and runs the parity samples on the twin."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from itertools import chain, repeat, zip_longest
from pathlib import Path

from backends import Backend, call_torch
from cuda_hooks import (
    check_changed_lengths,
    check_failed_launch_is_reported,
    make_checking_backend,
)
from ops.parity import MismatchError, check_cases, make_sample_cases
from ops.specs import OPSPECS, OpSpec
from repo.verify.device_faults import Fault
from twins import FOLDER, ROOT, Twin

CPU_SECONDS = 120
"""CPU time limit of a run, which may not end by itself. The wall time limit is 10 times as long."""
CUDA_ORDERS = 6
"""Number of runs of samples in which blocks share rows: the order of the blocks differs by run."""
ASCENDC_ROUNDS = 24
"""Number of runs of all samples: the number of cores changes from launch to launch."""


def run_program(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)


def detect_cuda_fault(fault: Fault) -> str:
    """Returns how the samples detected the fault; empty if they did not."""
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(folder) / "csrc"
        for part in ("core", "cuda"):
            shutil.copytree(ROOT / "csrc" / part, csrc / part)
        (Path(folder) / fault.file).write_text(fault.apply())
        library = build_cuda_library(csrc, fault)
        specs = [spec for spec in OPSPECS.values() if spec.kernel == fault.op]
        return run_in_child(specs, lambda: run_cuda_samples(fault.mode, library, specs))


def build_cuda_library(csrc: Path, fault: Fault) -> Path:
    """Builds the operator's kernel as a separate library, with the name that `Twin` expects."""
    library = csrc.parent / fault.mode / f"libngram_npu_cuda_{fault.mode}.so"
    library.parent.mkdir()
    include = [f"-I{ROOT / 'tests/twins/cuda/include'}", f"-I{csrc}"]
    sources = [(find_cuda_source(fault.op, csrc), fault.mode)]
    # The launch runs on the host, where no model checks it. The twin has the launch without fault.
    if "/launch." in fault.file:
        sources.append((csrc / "cuda/launch.cu", "fast"))
    objects = []
    for source, flags in sources:
        objects.append(library.with_name(f"{source.stem}.o"))
        command = f"g++ -std=c++17 -fPIC -fvisibility=hidden -w @{FOLDER / flags}.flags -c -x c++"
        run_program(*shlex.split(command), source, *include, "-o", objects[-1])
    # The mode's flags are left out, because they would link the sanitizers' own libraries.
    model = FOLDER / f"libcuda_twin_{fault.mode}.a"
    run_program("g++", "-shared", "-Wl,--no-undefined", *objects, model, "-o", library)
    return library


def find_cuda_source(op: str, csrc: Path) -> Path:
    """Returns the file with the operator's kernel: its own, or its family's."""
    source = csrc / "cuda" / f"{op.rstrip('_')}.cu"
    return source if source.exists() else source.with_stem(OPSPECS[op].family)


def run_cuda_samples(mode: str, library: Path, specs: list[OpSpec]) -> str:
    return next(filter(None, (run_cuda_samples_of(spec, mode, library) for spec in specs)), "")


def run_cuda_samples_of(spec: OpSpec, mode: str, library: Path) -> str:
    if mode == "hooks":
        backend = make_checking_backend(spec, library)
    else:
        twin = Twin(f"cuda_{mode}", "cuda", "cuda", library.parent)
        backend = Backend(mode, call_torch, twin=twin)
    if message := check_failed_launch_is_reported(spec, backend):
        return message
    if mode == "fast" and (message := check_changed_lengths(spec, backend)):
        return message
    for case in make_sample_cases(spec.name):
        label = case.sample.label
        num_orders = CUDA_ORDERS if label.startswith("few-long") else 1
        try:
            check_cases(spec, backend, [case] * num_orders)
        except (MismatchError, RuntimeError) as error:
            return f"{label}: {type(error).__name__}: {error}"
    return ""


def detect_ascendc_fault(fault: Fault, num_rounds: int = ASCENDC_ROUNDS) -> str:
    """Returns how the samples, which run this number of times, detected the fault; empty if they
    did not."""
    with tempfile.TemporaryDirectory() as folder:
        families = build_ascendc_twin(fault, Path(folder))
        specs = [spec for spec in OPSPECS.values() if spec.family in families]
        specs = [spec for spec in specs if fault.op in ("", spec.kernel)]
        return run_in_child(specs, lambda: run_ascendc_samples(specs, num_rounds, Path(folder)))


def includes_file(source: Path, file: str) -> bool:
    """Returns whether a kernel's source is this file of csrc or includes the file."""
    headers = re.findall(r'#include "(ascendc/.*)"', source.read_text())
    paths = [ROOT / "csrc" / name for name in headers]
    return source == ROOT / file or any(includes_file(path, file) for path in paths)


def build_ascendc_twin(fault: Fault, folder: Path) -> list[str]:
    """Builds the twin with the fault in the kernels of the fault's operator, or else in each kernel
    that includes the file; returns the families of these kernels. Other objects are those of
    `make twins`."""
    build_folder = FOLDER.parent
    commands = json.loads((build_folder / "compile_commands.json").read_text())
    objects = build_folder / "tests/twins/ascendc/CMakeFiles"
    parts = sorted((objects / "ascendc_twin_2201.dir").rglob("*.o"))
    parts += sorted((objects / "ngram_npu_ascendc_twin.dir").rglob("*.o"))
    header = folder / fault.file  # precedes the original on the include path
    header.parent.mkdir(parents=True)
    header.write_text(fault.apply())
    families = []
    for command in commands:
        source = Path(command["file"])
        if source.parent.name != "ascendc" or "ascendc_kernels_2201" not in command["command"]:
            continue
        family = OPSPECS[fault.op].family if fault.op else ""
        if source.stem != family if family else not includes_file(source, fault.file):
            parts.append(build_folder / shlex.split(command["command"])[-3])
            continue
        families.append(source.stem)
        parts.append(folder / f"{source.stem}.o")
        compiler, *flags = shlex.split(command["command"].partition(" -o ")[0])
        text = header if source == ROOT / fault.file else source
        flags += ["-O0", "-w"]  # compiling takes most of the time
        run_program(compiler, f"-I{folder / 'csrc'}", *flags, "-o", parts[-1], "-c", text)
    run_program("g++", "-shared", "-pthread", *parts, "-o", folder / "libngram_npu_ascendc_twin.so")
    return families


def run_ascendc_samples(specs: list[OpSpec], num_rounds: int, folder: Path) -> str:
    twin = Twin("ascendc_twin", "npu", "ascendc", folder)
    backend = Backend(twin.name, call_torch, twin=twin)
    for _ in range(num_rounds):
        # The operators take turns, because most faults are in one of them.
        turns = zip_longest(*(zip(repeat(spec), make_sample_cases(spec.name)) for spec in specs))
        for spec, case in filter(None, chain.from_iterable(turns)):
            try:
                check_cases(spec, backend, [case])
            except (MismatchError, RuntimeError) as error:
                return f"{spec.name}: {case.sample.label}: {type(error).__name__}: {error}"
    return ""


def run_in_child(specs: list[OpSpec], task: Callable[[], str]) -> str:
    """Returns the task's result or, if a wrong kernel ended the task's process, how it ended. The
    task runs samples of these specs."""
    for spec in specs:
        make_sample_cases(spec.name)  # cached for all children, because the reference is slow
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run_task() -> None:
        signal.alarm(10 * CPU_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 9))
        faulthandler.disable()  # some faults are expected to crash
        sender.send(task()[:4000])
        os._exit(0)  # a fault may have damaged what the exit would use

    process = context.Process(target=run_task)
    process.start()
    sender.close()
    try:
        message = str(receiver.recv())
    except EOFError:  # the task has ended the process
        message = ""
    process.join()
    status = process.exitcode or 0
    if status == 1:  # of an exception, which the process has printed
        raise RuntimeError("the samples could not be run; see above")
    if status > 0:  # a library ended the process, for example because its heap was damaged
        return f"ended with status {status}"
    return message if status == 0 else f"ended by {signal.Signals(-status).name}"
