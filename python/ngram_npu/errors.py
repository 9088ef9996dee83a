"""Errors for users, about unusable files, options and packages; and text safe for a terminal."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "InputError",
    "RecordError",
    "escape_unprintable",
    "import_optional",
    "suggest_similar",
    "to_one_line",
]


def escape_unprintable(text: str) -> str:
    """Replaces control characters by escapes such as `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def to_one_line(error: BaseException) -> str:
    """Returns the error's message in one line."""
    return " ".join(str(error).split())


def suggest_similar(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message that suggests the most similar of the known words; an
    empty text if no word is similar."""
    similar = difflib.get_close_matches(word, known, n=1)
    return "".join(f"; did you mean {name!r}?" for name in similar)


class InputError(Exception):
    """A file, an option or the environment of the user cannot be used.

    This error is raised for input files that cannot be read or are malformed (the message contains
    file and line), invalid options, missing optional packages, and output that cannot be written.
    The message is one printable line that states what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(escape_unprintable(message))


class RecordError(InputError):
    """A field of a record is missing or has the wrong type. The reader adds a valid example."""


def import_optional(module: str, option: str, extra: str, package: str = "") -> Any:
    """Imports a module that an option of the command needs. `package` is the name of its package if
    the module has another name.

    Raises:
        InputError: the module is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0]
        raise InputError(
            f'{option} needs {package}: pip install {package} (the extra "{extra}")'
        ) from error
