"""Applies random single faults to C++ sources and lists the faults that no test detects.

    python -m tools.mutate FILE ... [--count 60] [--seed 1] [--gtest TARGET ...] [--twins] \\
        [-- ARGUMENTS OF PYTEST]

Works on a copy of the tracked files in build/mutate. The same seed gives the same faults as long as
the files do not change. A fault that does not compile is replaced by the next fault. A survivor is
a fault that no test detects. It shows that a test is missing, unless the fault has no effect; a
person must decide. For Python, use a tool such as mutmut.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "mutate" / "tree"
STAGE = ROOT / "build" / "mutate" / "stage"
TIME_LIMIT_S = 600
"""Time limit of a test command, which then counts as failed: the fault may be an endless loop."""

_NO_CODE = re.compile(
    r"""/\*.*?\*/|//[^\n]*|^\s*#[^\n]*|\"(?:\\.|[^"\\\n])*\"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.MULTILINE,
)
"""Comments, directives of the preprocessor, and strings."""

_PAIRS = (
    *(("< ", "<= "), ("> ", ">= "), ("== ", "!= "), ("+ ", "- "), ("+= ", "-= ")),
    *(("&& ", "|| "), ("min(", "max("), ("smaller(", "larger(")),
    *(("true", "false"), ("break", "continue")),
)
_REPLACEMENTS = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_REPLACEMENTS |= {"* ": "+ ", "% ": "+ "}
# Formatters put spaces around binary operators, but not inside templates and pointer types.
_OPERATORS = "|".join(
    (r"(?<= )" if token[0] in "<>=!+-&|*%" else r"\b") + re.escape(token) for token in _REPLACEMENTS
)
_REPLACEABLE = re.compile(_OPERATORS + r"|!(?=[\w(])|(?<![\w.])\d+(?![\w.])|(?<=if \()(?=\w)")
_STATEMENT = re.compile(
    r"^ +(?!return|using|for|if|else|case|const|auto)[\w.:>\[\]-]+(?:\(| \S?= ).*;$", re.MULTILINE
)

_LIBRARIES = ("_C", "ngram_npu", "ngram_npu_cpu")
_CONFIGURE = [
    *("cmake", "-G", "Ninja", "-S", ".", "-B", "build/libraries"),
    *("-DNGRAM_NPU_CUDA=OFF", "-DNGRAM_NPU_ASCENDC=OFF", "-DNGRAM_NPU_TESTS=ON"),
    *("-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF"),
    "-DSKBUILD_PROJECT_VERSION=mutated",
    f"-DPython_EXECUTABLE={sys.executable}",
    f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    f"-DCMAKE_MAKE_PROGRAM={Path(sys.prefix) / 'bin' / 'ninja'}",
]


@dataclass(frozen=True)
class Change:
    """Replaces the characters from ``begin`` to ``end`` of a file."""

    begin: int
    end: int
    replacement: str

    def apply(self, text: str) -> str:
        return text[: self.begin] + self.replacement + text[self.end :]


def find_changes(text: str) -> list[Change]:
    """Returns all single changes of a file's code, in order, without comments and strings."""
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
    changes = []
    for match in _REPLACEABLE.finditer(code):
        token = match[0]
        if token.isdigit():
            replacement = str(int(token) + 1)
        elif token:
            replacement = _REPLACEMENTS.get(token, "")
        else:
            replacement = "!"
        changes.append(Change(match.start(), match.end(), replacement))
    changes += [Change(*match.span(), "") for match in _STATEMENT.finditer(code)]
    return sorted(changes, key=lambda change: change.begin)


class ProjectCopy:
    """A copy of the project with one changed file, which is built and tested."""

    def __init__(self, gtests: Sequence[str], pytest: Sequence[str], *, twins: bool) -> None:
        self._gtests, self._pytest, self._twins = gtests, pytest, twins
        self.output = ""
        """The output of the last command."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                self.write(name, (ROOT / name).read_bytes())
        if not (TREE / ".venv").exists():  # the CMake presets expect ninja there
            (TREE / ".venv").symlink_to(Path(sys.prefix))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file unless it has this content, so that only changed files are built again."""
        path = TREE / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def build(self) -> bool:
        """Builds and installs the copy; returns whether it compiles."""
        commands = [["cmake", "--build", "build/libraries", "--target", *_LIBRARIES]]
        commands[0] += self._gtests
        if not (TREE / "build" / "libraries" / "build.ninja").exists():
            commands.insert(0, _CONFIGURE)
        if self._twins:
            commands += [["cmake", "--preset", "twins"], ["cmake", "--build", "build/twins"]]
        if any(self._execute(command) for command in commands):
            return False
        shutil.rmtree(STAGE, ignore_errors=True)
        shutil.copytree(TREE / "python", STAGE)
        return not self._execute(["cmake", "--install", "build/libraries", "--prefix", str(STAGE)])

    def find_failure(self) -> str:
        """Returns the first test that fails; an empty string if all pass."""
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
        commands = [[f"build/libraries/tests/cpp/{name}"] for name in self._gtests]
        if self._pytest:
            check = "import ngram_npu; assert ngram_npu.__version__ == 'mutated', 'not the copy'"
            if self._execute([sys.executable, "-c", check]) and "not the copy" in self.output:
                raise SystemExit(
                    "tools.mutate: expected an installed wheel, got an editable install: "
                    "run make install"
                )
            commands.append([*pytest, *self._pytest])
        for command in commands:
            if self._execute(command):
                failures = [line for line in self.output.splitlines() if "FAILED" in line]
                return failures[0] if failures else " ".join(command[-2:])
        return ""

    def _execute(self, command: Sequence[str]) -> int:
        environment = {**os.environ, "PYTHONPATH": str(STAGE), "CI": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            result = subprocess.run(
                command, cwd=TREE, env=environment, text=True, timeout=TIME_LIMIT_S, **streams
            )
        except subprocess.TimeoutExpired:
            return -1
        self.output = result.stdout
        return result.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    add = parser.add_argument
    add("files", nargs="+", help="C++ sources, relative to the project's root")
    add("--count", type=int, default=60)
    add("--seed", type=int, default=1)
    add("--gtest", action="append", default=[], metavar="TARGET")
    add("--twins", action="store_true", help="also build the twins of the device kernels")
    tool_arguments, pytest = list(sys.argv[1:] if arguments is None else arguments), []
    if "--" in tool_arguments:
        pytest = tool_arguments[tool_arguments.index("--") + 1 :]
        tool_arguments = tool_arguments[: tool_arguments.index("--")]
    options = parser.parse_args(tool_arguments)
    copy = ProjectCopy(options.gtest, pytest, twins=options.twins)
    if not copy.build() or copy.find_failure():
        raise SystemExit(f"tools.mutate: the tests fail without a fault:\n{copy.output[-4000:]}")
    faults = [
        (name, change)
        for name in options.files
        for change in find_changes((ROOT / name).read_text())
    ]
    random.Random(options.seed).shuffle(faults)
    num_tried, survivors = 0, []
    for name, change in faults:
        text = (ROOT / name).read_text()
        copy.write(name, change.apply(text).encode())
        if copy.build():
            num_tried += 1
            location = f"{name}:{text.count(chr(10), 0, change.begin) + 1}"
            fault = f"{location}: {text[change.begin : change.end]!r} -> {change.replacement!r}"
            failure = copy.find_failure()
            print(f"{num_tried}. {fault}: {failure or 'SURVIVED'}", flush=True)
            if not failure:
                survivors.append(fault)
        copy.write(name, text.encode())
        if num_tried == options.count:
            break
    print(json.dumps({"tried": num_tried, "seed": options.seed, "survivors": survivors}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
