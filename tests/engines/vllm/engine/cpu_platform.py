"""Repairs two faults of vLLM's CPU platform (0.32.0) that do not depend on the drafter, and lets
it schedule asynchronously, which it does not support by itself."""

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
    """Each request's value at each of its drafted positions. vLLM's writes them to a copy that is
    dropped: temperature, top_k and top_p there are uninitialised memory."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts))


cpu_triton_utils._expand_kernel_impl = _expand

# A worker searches all modules when it starts, and fails on numba's. The search takes effect for
# the whole process, so it is done once, before numba is imported.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


class Event:
    """Replaces a device's event: recorded work is already done. Counts the waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waits = 0

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits += 1


class Stream:
    """Runs its work immediately."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


_zeros = torch.zeros


@contextmanager
def asynchronous() -> Iterator[None]:
    """Asynchronous scheduling on the CPU platform, which otherwise switches it off. The stand-ins
    for streams, events and pinned memory stay in place, like vLLM's own."""
    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def keeping(cls: Any, vllm_config: Any) -> None:
        wish = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wish

    torch.Event = torch.cuda.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.stream = torch.cuda.current_stream = lambda *_: Stream()
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.zeros = lambda *a, pin_memory=False, **kw: _zeros(*a, **kw)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(platform, "check_and_update_config", classmethod(keeping))
        yield


_for_good = ExitStack()


def register() -> None:
    """The same for a whole process: the entry point below ``site``, which vLLM loads in each of its
    processes with that folder on its path. May be called again."""
    if not hasattr(register, "done"):
        register.done = True  # type: ignore[attr-defined]
        _for_good.enter_context(asynchronous())
