"""Tests that gate.py accepts this tree and rejects wrong trees; tests the stub of ngram_npu.ops."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
        bodies=_read_texts("csrc/api", ".h"),
    )


def test_tree_passes_the_gate(tree: Tree) -> None:
    assert find_problems(tree) == []
    assert set(tree.schemas) == set(OPSPECS)
    assert len(OPSPECS) >= 2


OP, FILE = "ngram_step_", "ngram_step"


def _remove_key(mapping: dict[Any, Any], key: Any) -> dict[Any, Any]:
    return {k: v for k, v in mapping.items() if k != key}


def _move_file(sources: dict[str, str], path: str, name: str) -> dict[str, str]:
    return {**_remove_key(sources, path), str(Path(path).with_name(name)): sources[path]}


def _make_removal(field: str, key: str = OP) -> Callable[[Tree], Tree]:
    def change(tree: Tree) -> Tree:
        value = getattr(tree, field)
        changed = value - {key} if isinstance(value, set) else _remove_key(value, key)
        return replace(tree, **{field: changed})

    return change


def _make_schema_change(old: str, new: str) -> Callable[[Tree], Tree]:
    return lambda t: replace(t, schemas={**t.schemas, OP: t.schemas[OP].replace(old, new)})


def _change_spec(tree: Tree, **change: Any) -> Tree:
    return replace(tree, specs={**tree.specs, OP: replace(tree.specs[OP], **change)})


def _rename_body(tree: Tree) -> Tree:
    text = tree.bodies["drafting"].replace(f"auto {OP}(", "auto other(")
    return replace(tree, bodies={**tree.bodies, "drafting": text})


def _make_page_removal(page: str) -> tuple[Callable[[Tree], Tree], str]:
    return lambda t: replace(t, pages={**t.pages, page: ""}), f"{page} does not mention"


WRONG_TREES: dict[str, tuple[Callable[[Tree], Tree], str]] = {
    "no OpSpec": (_make_removal("specs"), "has no OpSpec"),
    "not registered": (_make_removal("schemas"), "not registered"),
    "other schema": (_make_schema_change("SymInt k", "int k"), "does not show its schema"),
    "unmarked write": (_make_schema_change("!)", ")"), "ends in _"),
    "no cpu kernel": (
        _make_removal("sources", "csrc/cpu/drafting.cpp"),
        "no kernel for cpu: expected ngram_npu_cpu_ngram_step_( in csrc/cpu/drafting.cpp",
    ),
    "kernel in another family's file": (
        lambda t: replace(t, sources=_move_file(t.sources, "csrc/cpu/drafting.cpp", "merging.cpp")),
        "no kernel for cpu: expected ngram_npu_cpu_ngram_step_( in csrc/cpu/drafting.cpp",
    ),
    "OpSpec in another family's file": (
        lambda t: _change_spec(t, make_samples=t.specs["prepare_inputs"].make_samples),
        "not in tests/ops/specs/drafting.py",
    ),
    "reference in another family's file": (
        lambda t: _change_spec(t, reference=reference.prepare_inputs),
        "not in tests/ops/reference/drafting.py",
    ),
    "not in the list of pages": _make_page_removal("docs/README.md"),
    "no parameters": (
        _make_removal("sources", "csrc/core/drafting.h"),
        "no NgramStepParams in csrc/core/drafting.h",
    ),
    "no document": (_make_removal("documents", FILE), "no docs/ops/ngram_step.md"),
    "document without example": (
        lambda t: replace(t, documents={**t.documents, FILE: t.specs[OP].schema}),
        "no worked example",
    ),
    "no body": (_rename_body, "has no body"),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_wrong_tree_fails(tree: Tree, name: str) -> None:
    change, message = WRONG_TREES[name]
    problems = find_problems(change(tree))
    assert any(message in problem for problem in problems), problems


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
