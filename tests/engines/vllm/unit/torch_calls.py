"""What a call asks of torch."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class TorchCalls(TorchDispatchMode):
    """Records the operators that torch runs, and their keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func).removesuffix(".default"), kwargs))
        return func(*args, **kwargs or {})
