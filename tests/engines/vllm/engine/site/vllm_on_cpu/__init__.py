"""Changes with which vLLM's runners (0.32.0) run on a CPU as in these tests: asynchronous
scheduling, no busy waiting, repairs of V1's runner, and for V2 a Triton backend "cpu" and repairs
of Triton's interpreter. The *.dist-info folder declares the entry points, so every process that has
the parent folder on its path makes these changes."""

from __future__ import annotations

import os
import time
from typing import Any


def register() -> None:
    """Applies the changes for this process's runner, only in the first of vLLM's calls."""
    if hasattr(register, "done"):
        return
    register.done = True  # type: ignore[attr-defined]
    _allow_async_scheduling()
    _sleep_while_waiting()
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from vllm_on_cpu import v2

        v2.repair_interpreter()
    else:
        from vllm_on_cpu import v1

        v1.repair_platform()


def _allow_async_scheduling() -> None:
    """Keeps the option async_scheduling, which vLLM's CPU platform would always disable."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def keep_option(cls: type, vllm_config: Any) -> None:
        requested = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = requested

    CpuPlatform.check_and_update_config = classmethod(keep_option)


def _sleep_while_waiting() -> None:
    """Lets a process that waits for another one sleep. vLLM's processes wait busily for a second,
    on a core that another process of the tests could use."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)
