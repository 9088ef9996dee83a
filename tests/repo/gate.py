"""Checks what no test of an operator reports: a missing OpSpec, document or kernel, and code in the
file of another family. The operator's family is the name of the file in csrc/api that contains its
body. In other layers, the operator is in a file with the family's name, or with its own name if its
kernel is large.

`find_problems` checks a `Tree`, a plain description of the registrations and the files, so that
tests can also check wrong trees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ops.specs import OpSpec

KERNELS = {
    "cpu": ("csrc/cpu/{}.cpp", "ngram_npu_cpu_{}("),
    "cuda": ("csrc/cuda/{}.cu", "ngram_npu_cuda_{}("),
    "npu": ("csrc/ascendc/{}.cpp", "NGRAM_NPU_KERNEL(ngram_npu_{},"),
}
"""By device: the file of a kernel, and the text with which the kernel's entry point begins. On an
NPU, names omit an underscore at the end."""


@dataclass(frozen=True)
class Tree:
    specs: dict[str, OpSpec]
    schemas: dict[str, str]
    """Schemas registered with torch, by name."""
    kernels: set[str]
    """Names of the operators whose CPU kernel is loaded."""
    sources: dict[str, str]
    """Source text of the parameters, rules and kernels, by path."""
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
    """Finds the operator's body, and checks the code in files with the name of the body's file."""
    for family, text in tree.bodies.items():
        if re.search(rf"^(auto|void) {spec.name}\(", text, re.MULTILINE):
            return _check_sources(tree, spec, family)
    return ["has no body in csrc/api"]


def _check_sources(tree: Tree, spec: OpSpec, family: str) -> list[str]:
    """Checks the parameters, the kernels and the OpSpec."""
    file = spec.kernel.rstrip("_")
    problems = []
    params = "".join(word.title() for word in file.split("_")) + "Params"
    if f"struct {params} {{" not in tree.sources.get(f"csrc/core/{family}.h", ""):
        problems.append(f"no {params} in csrc/core/{family}.h")
    if spec.reference.__module__.rpartition(".")[2] != family:
        problems.append(f"its reference is not in tests/ops/reference/{family}.py")
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
