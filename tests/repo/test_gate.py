"""Tests that gate.py accepts this tree and rejects wrong trees; tests the stub of ngram_npu.ops."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ngram_npu import _library, ops
from ops import reference
from ops.specs import OPSPECS
from repo.gate import KERNELS, Tree, find_problems

from tools import ops_stub

ROOT = Path(__file__).resolve().parents[2]


def _read_registered_schemas() -> dict[str, str]:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("ngram_npu::")]
    schemas = {}
    for name in names:
        op = name.removeprefix("ngram_npu::")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"), name
        schema = str(getattr(torch.ops.ngram_npu, op).default._schema)
        schemas[op] = schema.removeprefix("ngram_npu::")
    return schemas


def _read_texts(folder: str, suffix: str) -> dict[str, str]:
    return {p.stem: p.read_text() for p in (ROOT / folder).glob(f"*{suffix}")}


@pytest.fixture(scope="module")
def tree() -> Tree:
    schemas = _read_registered_schemas()
    return Tree(
        specs=OPSPECS,
        schemas=schemas,
        kernels={op for op in schemas if _library.has_kernel(op, "cpu")},
        sources={
            path.relative_to(ROOT).as_posix(): path.read_text()
            for folder in ("csrc/core", *(str(Path(p).parent) for p, _ in KERNELS.values()))
            for path in (ROOT / folder).iterdir()
        },
        documents=_read_texts("docs/ops", ".md"),
        pages={page: (ROOT / page).read_text() for page in ("docs/README.md", "CHANGELOG.md")},
    )


def test_tree_passes_the_gate(tree: Tree) -> None:
    assert find_problems(tree) == []
    assert set(tree.schemas) == set(OPSPECS)
    assert len(OPSPECS) >= 2


OP, FILE = "ngram_step_", "ngram_step"
NO_KERNEL = "no kernel for cpu: expected ngram_npu_cpu_ngram_step_( in csrc/cpu/drafting.cpp"


@pytest.mark.parametrize(
    ("field", "key", "old", "new", "message"),
    [
        ("schemas", OP, r".*", "", "not registered"),
        ("schemas", OP, "SymInt k", "int k", "does not show its schema"),
        ("schemas", OP, r"!\)", ")", "ends in _"),
        ("documents", FILE, ">>> ", "", "no worked example"),
        ("pages", "docs/README.md", f"ops/{FILE}", "", "docs/README.md does not mention"),
        ("sources", "csrc/core/drafting.h", "NgramStepP", "P", "no NgramStepParams in csrc/core"),
        (
            "sources",
            "csrc/cpu/drafting.cpp",
            f"cpu_{OP}",
            "",
            NO_KERNEL,
        ),
    ],
)
def test_tree_with_wrong_text_fails(
    tree: Tree, field: str, key: str, old: str, new: str, message: str
) -> None:
    texts = getattr(tree, field)
    changed = {**texts, key: re.sub(old, new, texts[key])}
    problems = find_problems(replace(tree, **{field: changed}))
    assert any(message in problem for problem in problems), problems


def test_operator_without_its_files_fails(tree: Tree) -> None:
    assert f"{OP}: registered but has no OpSpec" in find_problems(replace(tree, specs={}))
    assert f"{OP}: no docs/ops/{FILE}.md" in find_problems(replace(tree, documents={}))
    samples = OPSPECS["prepare_inputs"].make_samples
    spec = replace(OPSPECS[OP], make_samples=samples, reference=reference.prepare_inputs)
    problems = find_problems(replace(tree, specs={**OPSPECS, OP: spec}))
    assert f"{OP}: its reference is not in tests/ops/reference/drafting.py" in problems
    assert len(problems) == 2


def test_stub_has_signature_and_description_of_each_operator() -> None:
    stub = ast.parse(ops_stub.format_stub(ROOT))
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert functions.keys() == {*OPSPECS, "workspace_size"}
    for name in OPSPECS:
        arguments, signature = functions[name].args, inspect.signature(getattr(ops, name))
        names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
        assert names == list(signature.parameters)
        stub_defaults = [d for d in (*arguments.defaults, *arguments.kw_defaults) if d is not None]
        defaults = [p.default for p in signature.parameters.values() if p.default is not p.empty]
        assert [ast.literal_eval(default) for default in stub_defaults] == defaults
        description = ast.get_docstring(functions[name])
        assert description is not None
        assert "Args:\n    " in description
