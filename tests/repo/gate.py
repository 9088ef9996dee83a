"""Checks that every operator is complete in every layer. The operator's family is the name of the
file in csrc/api that contains its body. In other layers, the operator is in a file with the
family's name, or with its own name if its kernel is large.

`find_problems` checks a `Tree`, a plain description of the registrations and the files, so that
tests can also check wrong trees.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ops.specs import OpSpec

KERNELS = {
    "cpu": ("csrc/cpu/{}.cpp", "ngram_npu_cpu_{}("),
    "cuda": ("csrc/cuda/{}.cu", "ngram_npu_cuda_{}("),
    "npu": ("csrc/ascendc/{}.cpp", "__global__ __aicore__ void ngram_npu_{}("),
}
"""By device: the file of a kernel, and the text with which the kernel's entry point begins. On an
NPU, names omit an underscore at the end."""

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
    """Schemas registered with torch, by name."""
    kernels: set[str]
    """Names of the operators whose CPU kernel is loaded."""
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
    """Text of the pages that must name every operator: docs/README.md, CHANGELOG.md."""
    bodies: dict[str, str]
    """Source text of csrc/api/*.h, by family."""


def find_problems(tree: Tree) -> list[str]:
    problems = [
        f"{op}: registered but has no OpSpec" for op in tree.schemas.keys() - tree.specs.keys()
    ]
    for name, spec in tree.specs.items():
        problems += [f"{name}: {problem}" for problem in _check_operator(tree, name, spec)]
    return sorted(problems)


def _check_operator(tree: Tree, name: str, spec: OpSpec) -> list[str]:
    if spec.name != name:
        return [f"its OpSpec is called {spec.name}"]
    problems = []
    schema = tree.schemas.get(name, "")
    if not schema:
        problems.append("not registered")
    elif bool(re.search(r"!\)\?? (?!workspace)", schema)) != name.endswith("_"):
        problems.append("an operator's name ends in _ exactly if it writes to an argument")
    file = name.rstrip("_")
    if tree.references.get(name) is not spec.reference:
        problems.append("tests/ops/reference has no function of that name, or not the OpSpec's")
    if name not in tree.wrappers:
        problems.append("no function in python/ngram_npu/ops.py")
    if name not in tree.fakes:
        problems.append("no fake implementation")
    if name not in tree.numpy_functions:
        problems.append("no numpy function in _C")
    if file not in tree.documents:
        problems.append(f"no docs/ops/{file}.md")
    else:
        if schema not in tree.documents[file]:
            problems.append("its document does not show its schema")
        if ">>> " not in tree.documents[file]:
            problems.append("its document has no worked example")
    mentions = {"docs/README.md": f"(ops/{file}.md)", "CHANGELOG.md": f"`{name}`"}
    problems += [
        f"{page} does not mention {text}"
        for page, text in mentions.items()
        if text not in tree.pages[page]
    ]
    problems += _check_family(tree, spec)
    return problems


def _check_family(tree: Tree, spec: OpSpec) -> list[str]:
    """Checks the operator's body, and the code in files with the name of the body's file."""
    for family, text in tree.bodies.items():
        body = re.search(rf"^(auto|void) {spec.name}\(([^)]*)\) {{", text, re.MULTILINE)
        if body is None:
            continue
        problems = _check_body(spec, text, body)
        function = tree.references.get(spec.name)
        if function is None or function.__module__.rpartition(".")[2] != family:
            problems.append(f"no function in tests/ops/reference/{family}.py")
        problems += _check_sources(tree, spec, family)
        return problems
    return ["has no body in csrc/api"]


def _check_sources(tree: Tree, spec: OpSpec, family: str) -> list[str]:
    """Checks the parameters, the kernels and the OpSpec."""
    file = spec.kernel.rstrip("_")
    problems = []
    params = "".join(word.title() for word in file.split("_")) + "Params"
    if f"struct {params} {{" not in tree.sources.get(f"csrc/core/{family}.h", ""):
        problems.append(f"no {params} in csrc/core/{family}.h")
    module = spec.make_samples.__module__.rpartition(".")[2]
    if module != family and not file.startswith(module):
        problems.append(f"its OpSpec is in {module}.py, not in tests/ops/specs/{family}.py")
    if spec.kernel not in tree.kernels:
        problems.append("no kernel for cpu is loaded")
    for device, (path_format, entry_format) in KERNELS.items():
        entry = entry_format.format(file if device == "npu" else spec.kernel)
        paths = [path_format.format(name) for name in (family, file)]
        has_kernel = any(entry in tree.sources.get(path, "") for path in paths)
        reason = spec.no_kernel.get(device)
        if has_kernel and reason:
            problems.append(f"has a kernel for {device}, but the OpSpec has a reason for none")
        if not has_kernel and (device == "cpu" or not reason):
            problems.append(f"no kernel for {device}: expected {entry.split()[-1]} in {paths[0]}")
    return problems


def _check_body(spec: OpSpec, text: str, signature: re.Match[str]) -> list[str]:
    """Compares a schema with its C++ function, because neither torch nor the compiler does."""
    return_type, parameters = (" ".join(part.split()) for part in signature.groups())
    kinds = [(name, re.sub(r"\(\w+!\)", "", kind)) for name, kind in spec.arguments]
    expected = [f"{_CPP_TYPES[kind]} {name}" for name, kind in kinds]
    problems = []
    if parameters.split(", ") != expected:
        problems.append(
            f"schema and C++ signature differ: {parameters} instead of {', '.join(expected)}"
        )
    body = text[signature.end() : text.index("\n}\n", signature.end())]
    if call := re.search(r"return (run_\w+)<", body):
        body = text[text.index(f"auto {call[1]}(") :]
    returns = re.search(r"call\.results\(([^)]*)\)", body)
    num_results = len(returns[1].split(",")) if returns and return_type != "void" else 0
    if num_results != spec.schema.split(" -> ")[1].count("Tensor"):
        problems.append(f"schema and C++ signature differ: {num_results} results")
    return problems
