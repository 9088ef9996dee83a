"""What lacks, as one line: input, output, an optional dependency; and safe printing of text."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["InputError", "RecordError", "one_line", "optional", "printable"]


def printable(text: str) -> str:
    """Text made safe for a terminal: control characters become escapes like `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split())


class InputError(Exception):
    """The replay is not possible; the message is one line that tells the user what to do.

    Raised for input that cannot be read or is malformed (the message names file and line), for a
    missing optional dependency, and for output that cannot be written.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class RecordError(InputError):
    """Something is missing or of the wrong type in a record; the reader adds a working example."""


def optional(module: str, option: str, extra: str) -> Any:
    """Import what an option of the command needs.

    Raises:
        InputError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(
            f'{option} needs {package}: pip install {package} (the extra "{extra}")'
        ) from error
