"""Checks that vLLM's runner calls a custom class with the arguments that ours expects.

vLLM has no version for this interface, so the call is read from the runner's source.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from ngram_npu.vllm.after_import import installed, logger, one_line

RUNNER = "vllm.v1.worker.gpu_model_runner"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1"
# vLLM-Ascend's runner derives from vLLM's: if both are loaded, it is the one that calls.
CLASSES = {ASCEND_RUNNER: "NPUModelRunner", RUNNER: "GPUModelRunner"}
METHOD = "custom_class"


def check_call(propose: Callable[..., Any]) -> None:
    """Compares the call in the loaded V1 runner, vLLM-Ascend's or vLLM's, with the parameters of
    ``propose``, a bound method. If no call is found, a log line says so, since another runner may
    make it.

    Raises:
        ValueError: other arguments, or another order; one line.
    """
    name = next((name for name in CLASSES if name in sys.modules), None)
    if name is None:  # not in a vLLM worker
        return
    try:
        caller = getattr(sys.modules[name], CLASSES[name]).propose_draft_token_ids
        call = _call(ast.parse(textwrap.dedent(inspect.getsource(caller))))
        if call is None:
            raise LookupError(f"{CLASSES[name]} has no call for {METHOD!r}")
    except (AttributeError, LookupError, OSError, SyntaxError, TypeError) as error:
        logger.warning("ngram_npu: the runner's call is not checked: %s", one_line(error))
        return
    # vLLM-Ascend calls them valid_sampled_token_ids.
    positional = [_name(argument).removeprefix("valid_") for argument in call.args]
    keywords = [str(keyword.arg) for keyword in call.keywords]
    parameters = inspect.signature(propose).parameters
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    expected = list(parameters)
    rest = expected[len(positional) :]
    fits = positional == expected[: len(positional)] and set(keywords) <= set(rest)
    if not fits or not set(required) <= {*positional, *keywords}:
        given = ", ".join([*positional, *(f"{name}=" for name in keywords)])
        version = installed(*(["vllm-ascend"] if name == ASCEND_RUNNER else []))
        raise ValueError(
            f"ngram_npu: this vLLM ({version}) is not supported: its runner calls a "
            f"custom class with ({given}), expected ({', '.join(expected)})"
        )


def _call(tree: ast.AST) -> ast.Call | None:
    """The call of ``propose`` in the branch for custom classes."""
    for branch in ast.walk(tree):
        if isinstance(branch, ast.If) and repr(METHOD) in ast.unparse(branch.test):
            for node in (node for statement in branch.body for node in ast.walk(statement)):
                if isinstance(node, ast.Call) and _name(node.func) == "propose":
                    return node
    return None


def _name(expression: ast.expr) -> str:
    """The last part of a dotted name."""
    return ast.unparse(expression).rpartition(".")[2]
