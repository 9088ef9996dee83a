"""Shows a bar on a terminal for work that takes more than two seconds."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any


def make_bar(name: str, total: int, unit: str) -> Any:
    """Returns a context manager whose `update` adds to what is done."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext(SimpleNamespace(update=lambda _: None))
    # `disable=None` shows nothing if stderr is not a terminal.
    options: dict[str, Any] = {"leave": False, "delay": 2, "disable": None}
    return tqdm(desc=name, total=total or None, unit=unit, unit_scale=True, **options)
