"""Repairs of Triton's interpreter (3.9.0) for the V2 runner on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.runtime import interpreter


class _PermanentPatch:
    """The result of patching triton.language: a patch that stays in place."""

    def restore(self) -> None: ...


def repair_interpreter() -> None:
    """Applies all repairs."""
    _give_comparisons_bool_dtype()
    _patch_language_once()
    libdevice.log1p = lambda x: tl.log(x + 1.0)  # the interpreter has no log1p
    # The interpreter repeats integer arithmetic in 64 bits to detect overflows, which takes a sixth
    # of a step's time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _give_comparisons_bool_dtype() -> None:
    """Gives comparisons the dtype bool. The interpreter gives a comparison the dtype of its
    operands, and would reject a condition that is broadcast to a vector as a mask."""
    binary_op = interpreter.InterpreterBuilder.binary_op

    def apply_with_bool_dtype(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = binary_op(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            return interpreter.TensorHandle(result.data, tl.int1)
        return result

    interpreter.InterpreterBuilder.binary_op = apply_with_bool_dtype


def _patch_language_once() -> None:
    """Makes the interpreter patch triton.language permanently. Otherwise it patches and restores
    triton.language for every launch, which takes most of a launch's time."""
    patch, result = interpreter._patch_lang, _PermanentPatch()
    patched_names: set[str] = set()

    def patch_once(fn: Any) -> _PermanentPatch:
        names = {v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core}
        if not names <= patched_names:
            patch(fn)
            patched_names.update(names)
        return result

    interpreter._patch_lang = patch_once
