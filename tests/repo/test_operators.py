"""Tests that every registered operator has what no test of it alone would miss: an OpSpec, a
document, a line in the lists, and an entry in the stub of ngram_npu.ops."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from ngram_npu import ops
from ops.specs import OPSPECS

from tools import ops_stub

ROOT = Path(__file__).resolve().parents[2]


def test_every_registered_operator_has_a_spec() -> None:
    names = torch._C._dispatch_get_all_op_names()
    prefix = "ngram_npu::"
    assert {n.removeprefix(prefix) for n in names if n.startswith(prefix)} == set(OPSPECS)
    assert len(OPSPECS) >= 12


@pytest.mark.parametrize("op", OPSPECS)
def test_operator_has_document_and_is_listed(op: str) -> None:
    file = op.rstrip("_")
    document = (ROOT / "docs" / "ops" / f"{file}.md").read_text()
    schema = str(getattr(torch.ops.ngram_npu, op).default._schema).removeprefix("ngram_npu::")
    assert schema in document
    assert ">>> " in document, "expected a worked example"
    assert f"(ops/{file}.md)" in (ROOT / "docs" / "README.md").read_text()


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
