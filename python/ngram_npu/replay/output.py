"""Output files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ngram_npu.replay.errors import ReplayError

__all__ = ["atomic_output", "check_writable"]


def check_writable(path: Path) -> None:
    """Say before any work is done that a result could not be written.

    Raises:
        ReplayError: `path` is a folder, its folder is not there, or may not be written to.
    """
    if path.is_dir():
        raise ReplayError(f"{path}: is a directory")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ReplayError(f"{path}: the directory {folder} does not exist")
    target = path if _is_special(path) else folder
    if not os.access(target, os.W_OK):
        raise ReplayError(f"{path}: no permission to write")


@contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """Yield a path to write to; only if the block ends well does it take the place of `path`.

    It lies in the folder of `path` (renaming is atomic only within a file system) and is removed
    when the block is left by any exception, interruption included. A symbolic link stays a link;
    devices and pipes, which cannot be replaced, are written directly.

    Raises:
        ReplayError: the system refuses to write.
    """
    if _is_special(path):
        yield path
        return
    target = path.resolve()
    # Nobody can plant a file or link under a name that is not known before; the file must be new.
    scratch = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        scratch.touch(exist_ok=False)
        try:
            yield scratch
            if target.exists():
                shutil.copymode(target, scratch)
            os.replace(scratch, target)
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ReplayError(f"{path}: cannot be written: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
