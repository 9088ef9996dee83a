"""Tests the layers of the source tree: a layer uses only the layers below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def list_imported_modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def find_forbidden_imports(folder: Path, packages: set[str]) -> list[str]:
    return [
        f"{path.relative_to(folder)}: {module}"
        for path in sorted(folder.rglob("*.py"))
        for module in list_imported_modules(path.read_text(encoding="utf-8"))
        if module.partition(".")[0] in packages
    ]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("ngram_npu", {"ngram_npu_cli", "tests", "tools", "examples"}),
        ("ngram_npu_cli", {"tests", "tools", "examples"}),
    ],
)
def test_package_imports_no_layer_above_it(package: str, forbidden: set[str]) -> None:
    assert find_forbidden_imports(ROOT / "python" / package, forbidden) == []


def test_only_the_adapter_imports_transformers() -> None:
    """Nothing imports the adapter, so that importing the package does not import transformers."""
    adapter = "ngram_npu/engines/transformers.py"
    problems = find_forbidden_imports(ROOT / "python", {"transformers"})
    assert {problem.partition(":")[0] for problem in problems} == {adapter}
    imports = find_forbidden_imports(ROOT / "python", {"ngram_npu"})
    modules = {problem.partition(": ")[2] for problem in imports}
    assert not modules & {"ngram_npu.engines", "ngram_npu.engines.transformers"}


def find_circle_of_imports(folder: Path, package: str) -> list[str]:
    """Returns modules of a package that import each other in a circle; empty if there are none.
    Imports for type checks count, too."""
    graph: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        graph[module] = imports = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                imports.update((node.module, *names))
    for module, imports in graph.items():
        imports &= graph.keys() - {module}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_adapter_of_vllm_has_no_circle_of_imports(tmp_path: Path) -> None:
    folder = ROOT / "python" / "ngram_npu" / "engines" / "vllm"
    assert find_circle_of_imports(folder, "ngram_npu.engines.vllm") == []
    for name, other in ("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"):
        (tmp_path / f"{name}.py").write_text(f"from p import {other}\n")
    assert set(find_circle_of_imports(tmp_path, "p")) == {"p.a", "p.b", "p.c"}


def test_tools_import_nothing_from_tests_but_their_support() -> None:
    """Tests import tools, so importing other modules of tests would be a cycle."""
    tools = ROOT / "tools"
    for path in sorted(tools.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert '/ "tests"))' not in text, f"{path}: adds tests to sys.path"
        for module in list_imported_modules(text):
            name = f"{path.relative_to(ROOT)}: {module}"
            is_support = module == "tests.support" or module.startswith("tests.support.")
            assert is_support or not module.startswith("tests"), name


def test_core_includes_only_core_headers() -> None:
    for path in sorted((ROOT / "csrc" / "core").iterdir()):
        for included in re.findall(r'#include "(.+?)"', path.read_text(encoding="utf-8")):
            is_compiler_header = included == "kernel_operator.h"  # of CANN
            assert included.startswith("core/") or is_compiler_header, f"{path.name}: {included}"
