"""Reads operator schemas from the documents in docs/ops. tests/repo compares the schemas with the
registered ones. Also contains the decorator with which a reference is called like its operator."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OPERATOR_DOCUMENTS = Path(__file__).parents[2] / "docs" / "ops"


@cache
def schema_of(op: str) -> str:
    """Returns the line of the operator's document that contains the schema."""
    text = (OPERATOR_DOCUMENTS / f"{op.rstrip('_')}.md").read_text()
    return next(line for line in text.splitlines() if line.startswith(f"{op}("))


def parameters_of(op: str) -> list[str]:
    """Returns the parts of the schema between the parentheses, e.g. ["Tensor(a!) token_ids",
    "*", "int k=5"]."""
    schema = schema_of(op)
    return schema[schema.index("(") + 1 : schema.index(") ->")].split(", ")


@cache
def arguments_of(op: str) -> list[tuple[str, str]]:
    """Returns (name, type) of each argument, e.g. ("token_ids", "Tensor(a!)")."""
    parts = [part.split() for part in parameters_of(op) if part != "*"]
    return [(name.partition("=")[0], type_name) for type_name, name in parts]


@cache
def defaults_of(op: str) -> dict[str, Any]:
    """Returns the default value of each argument that has one."""
    parts = [part.split()[1].partition("=") for part in parameters_of(op) if "=" in part]
    return {name: literal_eval(value) for name, _, value in parts}


class Arguments(SimpleNamespace):
    """The arguments of a call as attributes."""


def reference_operator(function: Callable[[Arguments], Any]) -> Callable[..., Any]:
    """Returns a function that is called like the operator with the name of ``function``. All
    arguments may be passed by position or by name, and the schema's defaults apply."""
    op = function.__name__

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        names = [name for name, _ in arguments_of(op)][: len(args)]
        positional = dict(zip(names, args, strict=True))
        return function(Arguments(**defaults_of(op) | positional | keywords))

    return call
