"""The one exception of the replay package, and how text from outside is shown."""

from __future__ import annotations

__all__ = ["ReplayError", "one_line", "printable"]


def printable(text: str) -> str:
    """Text from outside, safe on a terminal: control characters become escapes like `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """Its message, whatever line ends it has."""
    return " ".join(str(error).split())


class ReplayError(Exception):
    """The replay cannot be done as asked; the message is one line that a user can act on.

    Raised for input that cannot be read or is malformed (the message names file and line), for a
    missing optional dependency, and for output that cannot be written.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
