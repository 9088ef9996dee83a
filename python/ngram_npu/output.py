"""Writes output files completely or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ngram_npu.errors import InputError

__all__ = ["atomic_output", "check_writable"]


def check_writable(path: Path) -> None:
    """Checks before a long computation that its result can be written.

    Raises:
        InputError: ``path`` is a folder, or its folder does not exist or is not writable.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a directory")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise InputError(f"{path}: the directory {folder} does not exist")
    target = path if _is_special(path) else folder
    if not os.access(target, os.W_OK):
        raise InputError(f"{path}: no permission to write")


@contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which replaces ``path`` if the block ends without an exception.

    The temporary file is in the folder of ``path``, because renaming is atomic only within a file
    system. It is removed after any exception, including an interruption. A symbolic link stays a
    link. Devices and pipes cannot be replaced, so they are written directly.

    Raises:
        InputError: writing fails.
    """
    target = path.resolve()
    # If the name were predictable, another user could create a file or a link of this name before.
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        if _is_special(path):
            yield path
            return
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
