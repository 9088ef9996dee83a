"""Compiles a changed AscendC kernel against the twin's model and runs the parity samples on it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from backends import Backend, call_torch
from ops.parity import MismatchError, check_parity
from ops.specs import OPSPECS
from repo.verify.mutants.by_twin import in_a_child
from repo.verify.mutants.mutant import Mutant
from twins import FOLDER, ROOT, Twin

TWIN = "ascendc_twin"
ROUNDS = 24
"""How often the samples run: the machine's size changes from launch to launch."""


def caught(mutant: Mutant) -> str:
    """How the samples noticed; empty where none did."""
    with tempfile.TemporaryDirectory() as folder:
        changed = build(mutant, Path(folder))
        return in_a_child(lambda: run_samples(changed, Path(folder)))


def uses(source: Path, file: str) -> bool:
    """Whether a kernel's source includes a file of csrc, or is that file."""
    included = re.findall(r'#include "(ascendc/.*)"', source.read_text())
    return source == ROOT / file or any(uses(ROOT / "csrc" / other, file) for other in included)


def build(mutant: Mutant, folder: Path) -> list[str]:
    """The twin's library with the fault in all kernels that have it; the families of these."""
    build_folder = FOLDER.parent
    commands = json.loads((build_folder / "compile_commands.json").read_text())
    objects = build_folder / "tests/twins/ascendc/CMakeFiles"
    parts = sorted((objects / "ascendc_twin_2201.dir").rglob("*.o"))
    parts += sorted((objects / f"ngram_npu_{TWIN}.dir").rglob("*.o"))
    changed = []
    header = folder / mutant.file  # found before the original: the folder comes first
    header.parent.mkdir(parents=True)
    header.write_text(mutant.changed())
    for command in commands:
        source = Path(command["file"])
        if source.parent.name != "ascendc" or "ascendc_kernels_2201" not in command["command"]:
            continue
        if not uses(source, mutant.file):
            parts.append(build_folder / shlex.split(command["command"])[-3])
            continue
        changed.append(source.stem)
        parts.append(folder / f"{source.stem}.o")
        compiler, *flags = shlex.split(command["command"].partition(" -o ")[0])
        text = header if source == ROOT / mutant.file else source
        quick = ("-O1", "-w")  # most of the time goes into compiling
        _run(compiler, f"-I{folder / 'csrc'}", *flags, *quick, "-o", parts[-1], "-c", text)
    _run("g++", "-shared", "-pthread", *parts, "-o", folder / f"libngram_npu_{TWIN}.so")
    return changed


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)


def run_samples(families: list[str], folder: Path) -> str:
    """Of all operators with kernels in these files."""
    backend = Backend(TWIN, call_torch, twin=Twin(TWIN, "npu", "ascendc", folder))
    specs = [s for s in OPSPECS.values() if s.family in families and backend.serves(s)]
    for _ in range(ROUNDS):
        for spec in specs:
            for sample in spec.samples(np.random.default_rng(2026)):
                try:
                    check_parity(spec, backend, sample)
                except (MismatchError, RuntimeError) as error:
                    return f"{spec.name}: {sample.label}: {type(error).__name__}: {error}"
    return ""
