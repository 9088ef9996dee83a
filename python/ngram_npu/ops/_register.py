"""torch's ``register_fake`` with a type: torch leaves it untyped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def register_fake(name: str) -> Callable[[FunctionT], FunctionT]:
    """Registers the decorated function as what ``name`` returns for tensors without data."""
    return cast(Callable[[FunctionT], FunctionT], torch.library.register_fake(name))
