"""Reads files of remote storage, such as "s3://bucket/logs.jsonl", with fsspec.

The package of the storage, such as s3fs or gcsfs, must be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, import_optional, to_one_line


class RemotePath:
    """A file or folder at a URL, with the methods of `pathlib.Path` that reading needs.

    Raises:
        InputError: A package is missing, or the storage reports an error.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.name = self._url.rpartition("/")[2]
        fsspec = import_optional("fsspec", url, "remote")
        with _storage_errors(url):
            self._filesystem, self._path = fsspec.core.url_to_fs(self._url)

    def __str__(self) -> str:
        return self._url

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def is_dir(self) -> bool:
        # Over HTTP, a file is also a folder, and listing it would download it.
        return not self.is_file() and bool(self._call("isdir"))

    def is_symlink(self) -> bool:
        return False

    def is_file(self) -> bool:
        return bool(self._call("isfile"))

    def exists(self) -> bool:
        return bool(self._call("exists"))

    def iterdir(self) -> Iterator[RemotePath]:
        """Yields the files and folders in this folder."""
        for path in self._call("ls", detail=False):
            yield RemotePath(f"{self._url}/{path.rstrip('/').rpartition('/')[2]}")

    def open(self, mode: str = "rb") -> Any:
        return self._call("open", mode)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        with _storage_errors(self._url):
            return getattr(self._filesystem, method)(self._path, *arguments, **options)


LogPath = Path | RemotePath
"""A file or folder of logs."""


def make_path(path: str | PathLike[str]) -> LogPath:
    """Returns a URL as a `RemotePath`, and everything else as a `Path`."""
    return RemotePath(path) if isinstance(path, str) and "://" in path else Path(path)


@contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    """Converts all errors, because each storage's package has its own classes of errors."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{url}: {to_one_line(error) or type(error).__name__}") from error
