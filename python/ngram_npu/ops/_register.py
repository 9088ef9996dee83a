"""torch's ``register_fake`` with a type: torch leaves it untyped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def register_fake(name: str) -> Callable[[FunctionT], FunctionT]:
    """Registers the decorated function as the fake of operator ``name``.

    torch does not check that fake tensors are on one device, and calls the fake also for a mix of
    fake and real tensors. Such calls are rejected here, as the kernels would reject them; so are
    tensors of rank 0, which have no size to read.

    torch leaves out keywords with default values: a fake names what it needs, ``**_`` takes the
    rest.
    """

    def register(fake: FunctionT) -> FunctionT:
        op = name.removeprefix("ngram_npu::")
        parameters = list(inspect.signature(fake).parameters)

        @functools.wraps(fake)
        def checked(*args: Any, **keywords: Any) -> Any:
            first: tuple[str, torch.device] | None = None
            positional = zip(parameters, args, strict=False)
            for parameter, value in (*positional, *keywords.items()):
                if not isinstance(value, torch.Tensor):
                    continue
                if value.ndim == 0:
                    raise ValueError(f"{op}: {parameter}: expected rank 1 or 2, got rank 0")
                first = first or (parameter, value.device)
                if value.device != first[1]:
                    raise ValueError(
                        f"{op}: {parameter}: expected device {first[1]} as {first[0]}, "
                        f"got {value.device}"
                    )
            return fake(*args, **keywords)

        torch.library.register_fake(name)(checked)
        return fake

    return register


def with_empty_fake(wrapper: FunctionT) -> FunctionT:
    """Registers the fake of an operator without results; ``wrapper`` calls it and has its name."""

    @functools.wraps(wrapper)  # whose parameters have the operator's names
    def fake(*_: Any, **__: Any) -> None:
        return None

    register_fake(f"ngram_npu::{wrapper.__name__}")(fake)
    return wrapper
