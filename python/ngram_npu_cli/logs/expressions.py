"""Evaluates JMESPath expressions on records, and adds functions for traces and trees of messages.

Where an expression selects a key of a text, the text is decoded as JSON. Key paths such as
`input.text || text`, which most presets consist of, need no package and are evaluated fastest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ngram_npu.errors import InputError, RecordError, import_optional, to_one_line

from ngram_npu_cli.logs.json_values import check_list, decode_json, get_first_value
from ngram_npu_cli.logs.traces import read_span

Expression = Callable[[Any], Any]

_KEY_PATH = re.compile(r"@|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CHATGPT_KEYS = ("parts", "text", "thoughts", "result", "user_profile", "user_instructions")


@cache
def compile_expression(text: str) -> Expression:
    """Returns a function that evaluates a JMESPath expression.

    Raises:
        InputError: The expression is not valid, or the package `jmespath` is missing.
    """
    parts = [part.strip() for part in text.split("||")]
    if all(_KEY_PATH.fullmatch(part) for part in parts):
        return partial(get_first_value, [part.split(".") if part != "@" else [] for part in parts])
    jmespath = import_optional("jmespath", f'the expression "{text}"', "logs")
    try:
        parsed = jmespath.compile(text).parsed
    except jmespath.exceptions.JMESPathError as error:
        raise InputError(f'map: "{text}" is not JMESPath: {to_one_line(error)}') from error
    visit = _make_interpreter(jmespath).visit

    def evaluate(record: Any) -> Any:
        try:
            return visit(parsed, record)
        except jmespath.exceptions.JMESPathError as error:
            reason = to_one_line(error).partition(", received")[0]  # the rest contains values
            raise RecordError(f'the expression "{text}" fails: {reason}') from error

    return evaluate


@cache
def _make_interpreter(jmespath: Any) -> Any:
    functions = {
        f"_func_{name}": jmespath.functions.signature(*[{"types": []}] * count)(
            lambda _, *arguments, function=function: function(*arguments)
        )
        for name, (function, count) in _FUNCTIONS.items()
    }

    class Interpreter(jmespath.visitor.TreeInterpreter):  # type: ignore[misc]
        def visit_field(self, node: Any, value: Any) -> Any:
            return super().visit_field(node, decode_json(value))

    table = type(jmespath.functions.Functions)(
        "Functions", (jmespath.functions.Functions,), functions
    )
    return Interpreter(jmespath.Options(custom_functions=table()))


# Functions of expressions


def list_thread(nodes: Any, last: Any) -> list[Any] | None:
    """Returns the messages of a tree from the root to the node `last`."""
    messages: list[Any] = []
    nodes = decode_json(nodes)
    if isinstance(nodes, list):
        nodes = {str(node.get("id")): node for node in check_list(nodes)}
    seen = set()
    while isinstance(nodes, dict) and isinstance(last, str) and last not in seen:
        seen.add(last)
        node = nodes.get(last)
        if not isinstance(node, dict):
            raise RecordError(f"the tree of messages has no node for {len(seen)} of the thread")
        message = node.get("message") if "message" in node else node
        if message is not None:
            messages[:0] = _read_message(message)
        parent = node.get("ancestors")
        if isinstance(parent, list):
            parent = parent[-1] if parent else None
        last = node.get("parent", node.get("parentId", parent))
    if last is not None:
        raise RecordError("the tree of messages has no root")
    return messages or None


def _read_message(message: Any) -> list[Any]:
    """Returns a message of a tree; nothing if it is an empty system message or not the model's."""
    if not isinstance(message, dict):
        return [message]
    content = message.get("content")
    if isinstance(content, dict):  # of ChatGPT, with a key for each type of content
        kind = content.get("content_type")
        values = [content[key] for key in _CHATGPT_KEYS if content.get(key)]
        if kind == "reasoning_recap":
            return []
        if not values and kind != "text":
            raise RecordError(f"no text in a message whose content is of the type {kind!r:.40}")
        content = [
            {"type": part.get("content_type"), **part} if isinstance(part, dict) else part
            for value in values
            for part in (value if isinstance(value, list) else [value])
        ]
        message = {**message, "content": content}
    role = get_first_value([["from"], ["role"], ["author", "role"]], message)
    return [] if role == "system" and content in ("", [], [""]) else [message]


def list_tree(node: Any, key: str) -> list[Any]:
    """Returns a node and all nodes below it, which are in a list at `key` of each node."""
    children = node.get(key) if isinstance(node, dict) else None
    children = check_list(decode_json(children) or [])
    return [node, *(below for child in children for below in list_tree(child, key))]


def make_dialog(texts: Any) -> list[dict[str, Any]]:
    """Returns the messages of texts, of which every second is an answer."""
    texts = list(texts) if isinstance(texts, list) else []
    while texts and texts[-1] is None:  # of a table's row
        texts.pop()
    if not texts or len(texts) % 2 or not all(isinstance(text, str) for text in texts):
        raise RecordError("a dialog must be a list of texts, of which every second is an answer")
    return [{("user", "assistant")[i % 2]: text} for i, text in enumerate(texts)]


_FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "json": (decode_json, 1),
    "span": (read_span, 1),
    "thread": (list_thread, 2),
    "tree": (list_tree, 2),
    "dialog": (make_dialog, 1),
}
"""By name in expressions, a function and its number of arguments."""
