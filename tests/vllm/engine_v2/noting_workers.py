"""A digest of all drafts of a rank, which its process prints at its end."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable
from typing import Any

import torch


def note(drafter: Any) -> None:
    """Has a digest of all drafts, and the number of steps, printed when the process ends."""
    propose: Callable[..., Any] = drafter.propose
    digest, steps = hashlib.sha256(), 0

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        found = propose(*args, **kwargs)
        drafts = found if isinstance(found, torch.Tensor) else found[0]
        digest.update(f"{drafts.tolist()}".encode())
        steps += 1
        return found

    drafter.propose = noted
    atexit.register(lambda: print(f"DRAFTED {digest.hexdigest()} {steps}", flush=True))
