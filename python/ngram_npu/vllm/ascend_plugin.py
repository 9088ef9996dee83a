"""Serves vLLM-Ascend's ``method="ngram"`` and ``method="ngram_gpu"``.

The runner's module has the drafter classes and the launcher of the device lookup as globals, and a
factory in another module makes the drafter. After the runner's module has been imported, both
places are replaced together for each method, if the signatures are those this was written for.
"""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType
from typing import Any

from ngram_npu import _library
from ngram_npu.vllm.after_import import after_import, difference, installed, one_line

logger = logging.getLogger("vllm.ngram_npu")

RUNNER = "vllm_ascend.worker.model_runner_v1"
V2_RUNNER = "vllm_ascend.worker.v2.model_runner"
FACTORY = "vllm_ascend.spec_decode"
HOST = "AscendNgramProposer"
DEVICE = "AscendNgramProposerNPU"
LAUNCHER = "triton_ngram_spec_decode"


def install() -> None:
    """Replaces the drafters now or when vLLM-Ascend imports its runner, and logs one line per
    method: enabled, or why not. Never raises; may be called again."""
    after_import(RUNNER, _replace)
    after_import(V2_RUNNER, _refused)


def _refused(runner: ModuleType) -> None:
    logger.warning(
        "ngram_npu: not enabled, the V2 runner of %s supports no n-gram method; "
        "set VLLM_USE_V2_MODEL_RUNNER=0 for its V1 runner",
        installed("vllm-ascend"),
    )


def _replace(runner: ModuleType) -> None:
    _serve("ngram", runner, (HOST,), ("propose",))
    _serve("ngram_gpu", runner, (DEVICE, LAUNCHER), ())


def _serve(
    method: str, runner: ModuleType, names: tuple[str, ...], called: tuple[str, ...]
) -> None:
    try:
        from ngram_npu.vllm import ascend

        factory = sys.modules[FACTORY]
        ours = {name: getattr(ascend, name) for name in names}
        if all(getattr(runner, name, None) is own for name, own in ours.items()):
            return
        doubt = _no_kernel() if LAUNCHER in names else ""
        for name, own in ours.items():
            doubt = doubt or _doubt(name, getattr(runner, name, None), own, called)
            if not doubt and inspect.isclass(own):
                doubt = _bound_elsewhere(name, factory, runner)
        if not doubt:
            for name, own in ours.items():
                setattr(runner, name, own)
                if inspect.isclass(own):
                    setattr(factory, name, own)
    except Exception as error:
        doubt = one_line(error)
    if doubt:
        logger.warning(
            "ngram_npu: not enabled for method %r, %s is left as it is: %s",
            method,
            installed("vllm-ascend"),
            doubt,
        )
    else:
        logger.info("ngram_npu: enabled for method %r of vllm-ascend (NGRAM_NPU_VLLM=1)", method)


def _no_kernel() -> str:
    if _library.has_kernel("ngram_step_", "npu"):
        return ""
    return f"no NPU kernels: {_library.backends()['npu'].reason}"


def _doubt(name: str, theirs: Any, own: Any, called: tuple[str, ...]) -> str:
    """How this vLLM-Ascend differs from those this was written for; empty if it does not."""
    if not inspect.isclass(own):
        return difference(name, theirs, own)
    if not inspect.isclass(theirs):
        return f"{RUNNER} has no class {name}"
    for method in ("__init__", "load_model", "dummy_run", *called):
        doubt = difference(f"{name}.{method}", getattr(theirs, method, None), getattr(own, method))
        if doubt:
            return doubt
    return ""


def _bound_elsewhere(name: str, factory: ModuleType, runner: ModuleType) -> str:
    if getattr(factory, name, None) is getattr(runner, name):
        return ""
    return f"{FACTORY} makes another {name} than {RUNNER} knows"
