"""Writes ``ops.pyi``: signatures and docstrings of ngram_npu.ops for editors and type checkers.
The contents are from csrc/schemas.h, docs/ops and the functions that ops.py defines in Python. The
package's build runs this script.

    python tools/ops_stub.py build/ops.pyi
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TYPES = {"Tensor": "Tensor", "Tensor?": "Tensor | None", "bool": "bool"}  # all others: int
_RAISES = "ValueError: invalid argument (dtype, device, shape, stride, range, overlapping memory),"


def read_schemas(text: str) -> list[str]:
    """Returns the schemas of the operators in the text of csrc/schemas.h."""
    schemas = []
    for op, table in re.findall(r"^struct ([a-z_]+) : \w+Table.*?\{\n(.*?)^\};", text, re.M | re.S):
        arguments, _, results = table.partition("kResults[] = ")
        names = ", ".join(re.findall(r'\{"([^"]+)"', arguments))
        tensors = ", ".join(f"Tensor {name}" for name in re.findall(r'\{"(\w+)"', results))
        schemas.append(f"{op}({names}) -> ({tensors})")
    return schemas


def format_function(schema: str, document: str) -> str:
    """Returns the stub of an operator: a named tuple of its results, if any, and a signature."""
    op, arguments, results = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", schema).groups()  # type: ignore[union-attr]
    parameters = [_format_parameter(argument) for argument in arguments.split(", ")]
    result_names = re.findall(r"Tensor (\w+)", results)
    name = "".join(word.title() for word in op.split("_")) + "Result"
    lines = []
    if result_names:
        lines += [f"class {name}(NamedTuple):", *(f"    {r}: Tensor" for r in result_names), ""]
    lines += [f"def {op}(", *(f"    {parameter}," for parameter in parameters)]
    lines.append(f") -> {name if result_names else 'None'}:")
    names = {parameter.partition(":")[0] for parameter in parameters}
    lines.append(textwrap.indent(_format_docstring(op, names, {*result_names}, document), " " * 4))
    return "\n".join([*lines, "    ...", ""])


def _format_parameter(argument: str) -> str:
    if argument == "*":
        return argument
    match = re.fullmatch(r"(\w+)(?:\(\w!\))?(\??) (\w+)(?:=(.*))?", argument)
    assert match is not None, argument
    kind, optional, name, default = match.groups()
    type_name = _TYPES.get(kind + optional, "int")
    return f"{name}: {type_name} = {default}" if default else f"{name}: {type_name}"


def _format_docstring(op: str, parameters: set[str], results: set[str], document: str) -> str:
    """Returns the paragraph after the title, and the arguments and results of ``op``."""
    _title, summary, _lists = (part.strip() for part in document.split("\n\n", 2))
    lines = [f'"""{_strip_markdown(summary)}', ""]
    lists = re.findall(r"^(Arguments|Results)\b.*\n\n((?:[- ] .*\n)+)", document, re.MULTILINE)
    groups = (("Arguments", "Args:", parameters), ("Results", "Returns:", results))
    for kind, title, names in groups:
        text = "".join(items for name, items in lists if name == kind)
        items = [" ".join(item.split()) for item in re.split("^- ", text, flags=re.MULTILINE)[1:]]
        descriptions = [f"    {_strip_markdown(i)}" for i in items if _describes(i, names)]
        lines += [title, *descriptions, ""] if names else []
    lines += ["Raises:", f"    {_RAISES}", "    before anything is written.", ""]
    lines += [f"Contract: docs/ops/{op.rstrip('_')}.md", '"""']
    return "\n".join(lines)


def _describes(item: str, names: set[str]) -> bool:
    """Returns whether an item such as "`a`, `b` ([B] int32): ..." has one of ``names``, or none."""
    described = set(re.findall(r"`(\w+)`", item.partition(": ")[0]))
    return not described or not names.isdisjoint(described)


def _strip_markdown(text: str) -> str:
    """Removes Markdown's links and code marks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("\\", "\\\\")


def format_stub(root: Path) -> str:
    module = (root / "python/ngram_npu/ops.py").read_text()
    parts = [
        '"""Generated from csrc/schemas.h and docs/ops."""',
        "from typing import NamedTuple",
        "",
    ]
    parts += ["from torch import Tensor", ""]
    for schema in read_schemas((root / "csrc/schemas.h").read_text()):
        op = schema.partition("(")[0]
        document = (root / "docs/ops" / f"{op.rstrip('_')}.md").read_text()
        parts.append(format_function(schema, document))
    for node in ast.parse(module).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            node.body = [node.body[0], ast.Expr(ast.Constant(...))]
            parts += [ast.unparse(node), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(format_stub(ROOT))
