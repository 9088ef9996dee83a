"""Shows a bar on a terminal for work that takes more than two seconds."""

from __future__ import annotations

from typing import Any


class _NoBar:
    """Takes the place of a bar if the package `tqdm` is missing."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _: int) -> None:
        pass


def make_bar(name: str, total: int, unit: str) -> Any:
    """Returns a context manager whose `update` adds to what is done."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(
        desc=name,
        total=total or None,
        unit=unit,
        unit_scale=True,
        leave=False,
        delay=2,
        disable=None,  # shows nothing if stderr is not a terminal
    )
