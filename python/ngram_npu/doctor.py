"""Which backends work on this machine, and why the others do not."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

from ngram_npu import _C, _library


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
            ("built with", self.compiler),
            ("cpu instruction set", self.instruction_set + refused),
            ("thread limit", str(self.thread_limit) if self.thread_limit else "none"),
        ]
        for backend in self.backends.values():
            present = f"{backend.kernels} kernels"
            rows.append((f"backend {backend.name}", backend.reason or present))
        return "\n".join(f"{name:<21}{value}" for name, value in rows)


def doctor() -> Report:
    """Reports the version, torch, which backends are built and loadable (with a reason for each
    that is not), and the CPU instruction set. Unlike importing the package, it imports torch_npu,
    to find out whether the NPU kernels load."""
    import numpy

    absence = _library.torch_absence()
    torch_version = None
    with contextlib.suppress(Exception):  # `absence` holds the reason
        import torch

        torch_version = str(torch.__version__)
    chosen = _C.instruction_set()
    wish = os.environ.get("NGRAM_NPU_INSTRUCTION_SET")
    return Report(
        version=_C.__version__,
        python=platform.python_version(),
        numpy=numpy.__version__,
        torch=torch_version,
        torch_operators=absence or "registered",
        compiler=_C.compiler,
        instruction_set=chosen,
        instruction_set_wish=None if wish in ("auto", chosen) else wish,
        thread_limit=_C.num_threads(),
        backends=_library.backends() | {"npu": _library.open_npu()},
    )
