"""Operator schemas as their documents in docs/ops show them (tests/repo compares these with what is
registered), and calls by name."""

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
    text = (OPERATOR_DOCUMENTS / f"{op.rstrip('_')}.md").read_text()
    return next(line for line in text.splitlines() if line.startswith(f"{op}("))


def parameters_of(op: str) -> list[str]:
    """Returns the parts between parentheses, e.g. ["Tensor(a!) token_ids", "*", "int k=5"]."""
    schema = schema_of(op)
    return schema[schema.index("(") + 1 : schema.index(") ->")].split(", ")


@cache
def arguments_of(op: str) -> list[tuple[str, str]]:
    """Returns (name, type) of each argument, e.g. ("token_ids", "Tensor(a!)")."""
    split = [part.split() for part in parameters_of(op) if part != "*"]
    return [(name.partition("=")[0], kind) for kind, name in split]


@cache
def defaults_of(op: str) -> dict[str, Any]:
    parts = [part.split()[1].partition("=") for part in parameters_of(op) if "=" in part]
    return {name: literal_eval(value) for name, _, value in parts}


class Arguments(SimpleNamespace):
    """The arguments of a call as attributes."""


def reference_operator(function: Callable[[Arguments], Any]) -> Callable[..., Any]:
    """Returns a function that is called like the operator of that name, with all arguments by
    position or by name. It has the schema's defaults."""
    op = function.__name__

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        names = [name for name, _ in arguments_of(op)][: len(args)]
        by_position = dict(zip(names, args, strict=True))
        return function(Arguments(**defaults_of(op) | by_position | keywords))

    return call
