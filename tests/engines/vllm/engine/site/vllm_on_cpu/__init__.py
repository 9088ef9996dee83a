"""Changes with which vLLM's runners (0.32.0) run on a CPU as in these tests: asynchronous
scheduling, and for V2 a Triton backend "cpu" and repairs of Triton's interpreter. The *.dist-info
folder declares the entry points, so every process with the parent folder on its path loads them."""

from __future__ import annotations

import os


def register() -> None:
    """Applies the repairs of this process's runner. vLLM may call it again."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from vllm_on_cpu import repairs

        repairs.register()
    else:
        import cpu_platform

        cpu_platform.register()
