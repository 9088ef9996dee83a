"""Makes paths of logs, also of remote storage, such as "s3://bucket/logs.jsonl".

`universal_pathlib` gives URLs the methods of `pathlib.Path`. The package of the storage, such as
s3fs or gcsfs, must be installed.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ngram_npu.errors import InputError, import_optional, to_one_line

if TYPE_CHECKING:
    from upath import UPath

LogPath: TypeAlias = "Path | UPath"
"""A file or folder of logs."""


def make_path(path: str | PathLike[str]) -> LogPath:
    """Returns the path of a file or folder, or of a URL.

    Raises:
        InputError: A package is missing, or the storage is not known.
    """
    if not isinstance(path, str) or "://" not in path:
        return Path(path)
    upath = import_optional("upath", path, "remote", "universal_pathlib")
    try:
        remote: UPath = upath.UPath(path)
        _ = remote.fs  # loads the package of the storage
    except Exception as error:  # some packages connect here, with their own errors
        raise InputError(f"{path}: {to_one_line(error)}") from error
    return remote


def list_errors(path: LogPath) -> type[Exception]:
    """Returns the class of errors of reading a path. Each package of a remote storage has its own
    errors."""
    return OSError if isinstance(path, Path) else Exception
