"""The driver of the Triton backend "cpu"."""

from __future__ import annotations

from triton.backends.driver import DriverBase


class Driver(DriverBase):
    """vLLM requires an active driver; the interpreter needs none."""

    @staticmethod
    def is_active() -> bool:
        return True


Driver.__abstractmethods__ = frozenset()  # Triton skips abstract classes
