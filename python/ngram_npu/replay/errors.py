"""The one exception of the replay package."""

__all__ = ["ReplayError"]


class ReplayError(Exception):
    """The replay cannot be done as asked; the message is one line that a user can act on.

    Raised for input that cannot be read or is malformed (the message names file and line), for a
    missing optional dependency, and for output that cannot be written.
    """
