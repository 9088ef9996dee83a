"""The gate: every operator is complete in every layer, found by its family, then by its name. The
family is the file of csrc/api that has its body; other layers have it in a file of the family's
name, or of its own where its kernel is one of substance.

`problems` checks a `Tree`, a plain description of the registrations and the files, so that tests
can pass wrong ones.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ops.specs import OpSpec

KERNELS = {
    "cpu": ("csrc/cpu/{}.cpp", "ngram_npu_cpu_{}("),
    "cuda": ("csrc/cuda/{}.cu", "ngram_npu_cuda_{}("),
    "npu": ("csrc/ascendc/{}.cpp", "__global__ __aicore__ void ngram_npu_{}("),
}
"""Where the kernels of each device are, and how the entry of one begins. On an NPU names omit an
underscore at the end."""

_CPP_TYPES = {
    "Tensor": "In<F>",
    "Tensor?": "Optional<F>",
    "SymInt": "int64_t",
    "int": "int64_t",
    "bool": "bool",
}


@dataclass(frozen=True)
class Tree:
    specs: dict[str, OpSpec]
    schemas: dict[str, str]
    """Registered with torch, by name."""
    kernels: set[str]
    """Those operators that have a CPU kernel loaded."""
    sources: dict[str, str]
    """Source text of the parameters, rules and kernels, by path."""
    references: dict[str, Callable[..., object]]
    """The functions of tests/ops/reference, by name."""
    wrappers: dict[str, Callable[..., object]]
    """The functions of ngram_npu.ops, by name."""
    fakes: set[str]
    numpy_functions: set[str]
    documents: dict[str, str]
    pages: dict[str, str]
    """Source text of what names every operator: docs/README.md, CHANGELOG.md."""
    bodies: dict[str, str]
    """Source text of csrc/api/*.h, by family."""


def problems(tree: Tree) -> list[str]:
    found = [
        f"{op}: registered but has no OpSpec" for op in tree.schemas.keys() - tree.specs.keys()
    ]
    for name, spec in tree.specs.items():
        found += [f"{name}: {problem}" for problem in _problems_of(tree, name, spec)]
    return sorted(found)


def _problems_of(tree: Tree, name: str, spec: OpSpec) -> list[str]:
    if spec.name != name:
        return [f"its OpSpec is called {spec.name}"]
    found = []
    schema = tree.schemas.get(name, "")
    if not schema:
        found.append("not registered")
    elif bool(re.search(r"!\)\?? (?!workspace)", schema)) != name.endswith("_"):
        found.append("an operator's name ends in _ exactly if it writes to an argument")
    file = name.rstrip("_")
    if tree.references.get(name) is not spec.reference:
        found.append("tests/ops/reference has no function of that name, or not the OpSpec's")
    if name not in tree.wrappers:
        found.append("lacks a function in python/ngram_npu/ops.py")
    if name not in tree.fakes:
        found.append("lacks a fake")
    if name not in tree.numpy_functions:
        found.append("lacks a numpy function in _C")
    if file not in tree.documents:
        found.append(f"lacks docs/ops/{file}.md")
    else:
        if schema not in tree.documents[file]:
            found.append("its document does not show its schema")
        if ">>> " not in tree.documents[file]:
            found.append("its document has no worked example")
    mention = {"docs/README.md": f"(ops/{file}.md)", "CHANGELOG.md": f"`{name}`"}
    found += [
        f"{page} lacks {what}" for page, what in mention.items() if what not in tree.pages[page]
    ]
    found += _family_problems(tree, spec)
    return found


def _family_problems(tree: Tree, spec: OpSpec) -> list[str]:
    """The body, and everything else that is in a file of the body's name."""
    for family, text in tree.bodies.items():
        body = re.search(rf"^(auto|void) {spec.name}\(([^)]*)\) {{", text, re.MULTILINE)
        if body is None:
            continue
        found = _body_problems(spec, text, body)
        function = tree.references.get(spec.name)
        if function is None or function.__module__.rpartition(".")[2] != family:
            found.append(f"lacks a function in tests/ops/reference/{family}.py")
        found += _source_problems(tree, spec, family)
        return found
    return ["has no body in csrc/api"]


def _source_problems(tree: Tree, spec: OpSpec, family: str) -> list[str]:
    """Its parameters, its kernels and its OpSpec."""
    file = spec.kernel.rstrip("_")
    found = []
    params = "".join(word.title() for word in file.split("_")) + "Params"
    if f"struct {params} {{" not in tree.sources.get(f"csrc/core/{family}.h", ""):
        found.append(f"lacks {params} in csrc/core/{family}.h")
    module = spec.samples.__module__.rpartition(".")[2]
    if module != family and not file.startswith(module):
        found.append(f"its OpSpec is in {module}.py, not in tests/ops/specs/{family}.py")
    if spec.kernel not in tree.kernels:
        found.append("no kernel for cpu is loaded")
    for device, (place, begin) in KERNELS.items():
        entry = begin.format(file if device == "npu" else spec.kernel)
        homes = [place.format(name) for name in (family, file)]
        there = any(entry in tree.sources.get(home, "") for home in homes)
        reason = spec.no_kernel.get(device)
        if there and reason:
            found.append(f"has a kernel for {device}, but the OpSpec says why not")
        if not there and (device == "cpu" or not reason):
            found.append(f"no kernel for {device}: lacks {entry.split()[-1]} in {homes[0]}")
    return found


def _body_problems(spec: OpSpec, text: str, signature: re.Match[str]) -> list[str]:
    """Neither torch nor the compiler compares a schema with the function behind it."""
    returned, parameters = (" ".join(part.split()) for part in signature.groups())
    kinds = [(name, re.sub(r"\(\w+!\)", "", kind)) for name, kind in spec.arguments]
    expected = [f"{_CPP_TYPES[kind]} {name}" for name, kind in kinds]
    found = []
    if parameters.split(", ") != expected:
        found.append(
            f"schema and C++ signature differ: {parameters} instead of {', '.join(expected)}"
        )
    body = text[signature.end() : text.index("\n}\n", signature.end())]
    if shared := re.search(r"return (run_\w+)<", body):
        body = text[text.index(f"auto {shared[1]}(") :]
    given = re.search(r"call\.results\(([^)]*)\)", body)
    results = len(given[1].split(",")) if given and returned != "void" else 0
    if results != spec.schema.split(" -> ")[1].count("Tensor"):
        found.append(f"schema and C++ signature differ: {results} results")
    return found


def source_problems(root: Path) -> list[str]:
    """Problems of the source files: includes of torch, and what Python 3.10 rejects."""
    found = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        if path.suffix not in {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh"}:
            continue
        if relative.split("/")[0] not in {"csrc", "python", "tests", "tools"}:
            continue
        text = path.read_text()
        torch_free = relative.startswith("csrc/") and not relative.startswith("csrc/api/torch/")
        if torch_free and re.search(r'^#include [<"](torch|ATen|c10)/', text, re.MULTILINE):
            found.append(f"{relative}: includes torch outside csrc/api/torch")
        if relative != "csrc/ascendc/launch.cpp" and re.search(
            r'^#include [<"]torch_npu', text, re.MULTILINE
        ):
            found.append(f"{relative}: includes torch_npu outside csrc/ascendc/launch.cpp")
        if path.suffix == ".py":
            found += [f"{relative}: {problem}" for problem in _python_310_problems(text)]
    return found


def _python_310_problems(text: str) -> list[str]:
    """Code that Python 3.10 rejects at import, although ruff and mypy accept it for 3.10."""
    return [
        f"class {node.name} is generic and a {kind}, which needs Python 3.11"
        for node in _reached_by_python_310(ast.parse(text))
        if isinstance(node, ast.ClassDef) and len(node.bases) > 1
        for kind in ("NamedTuple", "TypedDict")
        if kind in [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    ]


def _reached_by_python_310(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "sys.version_info >= (3, 11)" in ast.unparse(node.test):
        children = iter(node.orelse)
    for child in children:
        yield from _reached_by_python_310(child)
