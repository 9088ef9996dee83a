"""Repairs two faults of vLLM's CPU platform (0.32.0) that do not depend on the drafter, and enables
asynchronous scheduling on V1's runner, which the platform does not support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils


def _expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    *_: Any,
    **__: Any,
) -> None:
    """Writes each request's value to each of its drafted positions. vLLM's function writes to a
    temporary copy, so that temperature, top_k and top_p remain uninitialized memory."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts))


cpu_triton_utils._expand_kernel_impl = _expand

# A worker searches all loaded modules when it starts, and fails on numba's. The result applies to
# the whole process, so the search is made once, before numba is imported.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


class Event:
    """Replaces a device event. Recorded work is already done; waits are counted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waits = 0

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits += 1


class Stream:
    """Replaces a stream; its work runs immediately."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


_zeros = torch.zeros


@contextmanager
def allow_async_scheduling() -> Iterator[None]:
    """Allows asynchronous scheduling on the CPU platform, which otherwise disables it. The
    replacements of streams, events and pinned memory stay after the block, like vLLM's own."""
    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def keep_option(cls: Any, vllm_config: Any) -> None:
        requested = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = requested

    torch.Event = torch.cuda.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.stream = torch.cuda.current_stream = lambda *_: Stream()
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.zeros = lambda *a, pin_memory=False, **kw: _zeros(*a, **kw)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(platform, "check_and_update_config", classmethod(keep_option))
        yield


_until_exit = ExitStack()


def register() -> None:
    """Allows it until the process ends. The entry point in `site` may call this repeatedly."""
    if not hasattr(register, "done"):
        register.done = True  # type: ignore[attr-defined]
        _until_exit.enter_context(allow_async_scheduling())
