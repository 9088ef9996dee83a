"""Serves vLLM-Ascend's ``method="ngram"`` and ``method="ngram_gpu"``.

Its V1 runner's module has the drafter classes and the launcher of the device lookup as globals, and
a factory in another module makes the drafter. Both places are replaced together. Its V2 runner
derives from vLLM's, and is served as that is (:mod:`ngram_npu.vllm.v2_plugin`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from ngram_npu import _library
from ngram_npu.vllm import correction, v2_plugin
from ngram_npu.vllm.after_import import after_import, class_unlike, installed, serve, unlike

RUNNER = "vllm_ascend.worker.model_runner_v1"
V2_MODULE, V2_CLASS = "vllm_ascend.worker.v2.spec_decode.ngram", "AscendNgramSpeculator"
FACTORY = "vllm_ascend.spec_decode"
HOST = "AscendNgramProposer"
DEVICE = "AscendNgramProposerNPU"
LAUNCHER = "triton_ngram_spec_decode"


def install() -> None:
    """Replaces the drafters now or when vLLM-Ascend imports its runner or its V2 speculator, and
    logs one line per method: enabled, or why not. Never raises; may be called again."""
    version = installed("vllm-ascend")

    def replace(runner: Any) -> None:
        for method, names in (("ngram", (HOST,)), ("ngram_gpu", (DEVICE, LAUNCHER))):
            what = f"method {method!r}"
            refused = f" for {what}, {version} is left as it is"
            serve(
                RUNNER, functools.partial(_replace, names=names), f"{what} of vllm-ascend", refused
            )
        correction.install(runner, lambda _: "npu")

    after_import(RUNNER, replace)
    v2_plugin.install(V2_MODULE, V2_CLASS, "ascend_v2")


def _replace(runner: Any, names: tuple[str, ...]) -> str | None:
    from ngram_npu.vllm import ascend

    factory = sys.modules[FACTORY]
    ours = {name: getattr(ascend, name) for name in names}
    if all(getattr(runner, name, None) is own for name, own in ours.items()):
        return None
    doubt = ""
    if LAUNCHER in names and not _library.has_kernel("ngram_step_", "npu"):
        doubt = f"no NPU kernels: {_library.backends()['npu'].reason}"
    for name, own in ours.items():
        theirs = getattr(runner, name, None)
        if not inspect.isclass(own):
            doubt = doubt or unlike(name, theirs, own)
            continue
        methods = ("__init__", "load_model", "dummy_run", *(("propose",) if name == HOST else ()))
        doubt = doubt or class_unlike(f"{RUNNER}.{name}", theirs, own, methods)
        if not doubt and getattr(factory, name, None) is not theirs:
            doubt = f"{FACTORY} makes another {name} than {RUNNER} knows"
    if not doubt:
        for name, own in ours.items():
            setattr(runner, name, own)
            if inspect.isclass(own):
                setattr(factory, name, own)
    return doubt
