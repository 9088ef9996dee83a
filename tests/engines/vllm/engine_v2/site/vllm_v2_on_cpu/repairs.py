"""Loaded by vLLM in each of its processes, before it starts an engine there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.runtime import interpreter


class _Patched:
    """What the interpreter restores after a launch: nothing."""

    def restore(self) -> None: ...


def register() -> None:
    """May be called again."""
    if hasattr(register, "done"):
        return
    register.done = True  # type: ignore[attr-defined]
    _label_comparisons()
    _patch_once()
    _compute_once()
    libdevice.log1p = lambda x: tl.log(x + 1.0)  # the interpreter has no log1p
    _let_async_be_asked_for()


def _label_comparisons() -> None:
    """The interpreter (3.9.0) gives a comparison the dtype of its operands, so that a condition
    spread over a vector is refused as a mask."""
    binary_op = interpreter.InterpreterBuilder.binary_op

    def labelled(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = binary_op(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            return interpreter.TensorHandle(result.data, tl.int1)
        return result

    interpreter.InterpreterBuilder.binary_op = labelled


def _patch_once() -> None:
    """The interpreter patches triton.language for every launch and restores it after, which takes
    most of a launch's time. Nothing but the interpreter uses it here."""
    patch, patched = interpreter._patch_lang, _Patched()
    done: set[str] = set()

    def once(fn: Any) -> _Patched:
        used = {v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core}
        if not used <= done:
            patch(fn)
            done.update(used)
        return patched

    interpreter._patch_lang = once


def _compute_once() -> None:
    """The interpreter computes every sum, difference and product of integers again in 64 bits, to
    find overflows: a sixth of a step's time."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _let_async_be_asked_for() -> None:
    """vLLM's CPU platform switches asynchronous scheduling off whatever was asked for."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def kept(cls: type, vllm_config: Any) -> None:
        wish = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wish

    CpuPlatform.check_and_update_config = classmethod(kept)
