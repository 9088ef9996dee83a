"""The file format of a store. A file is written completely or not at all.

    8 bytes   "NGRSTORE"
    4 words   version, num_blocks, line_bits, visibility; unsigned
    8 bytes   size of the contents in bytes
    32 bytes  BLAKE2b of all bytes above and of the contents
    contents  the store's words without its slots (csrc/core/ngram_store.h)

All numbers are little-endian, as in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike

from ngram_npu.memory import Int32Array

MAGIC = b"NGRSTORE"
VERSION = 1
"""Changes with the meaning of the contents: layout, hash, rules for adding text."""
_SIZES = struct.Struct("<8sIIIIQ")
_DIGEST_BYTES = 32


class StoreFileError(ValueError):
    """A file is not a store file, or cannot be used here; the message says why."""


@dataclass(frozen=True)
class FileSizes:
    """The sizes and the visibility of the store in a file."""

    num_blocks: int
    line_bits: int
    visibility: int


def write(path: str | PathLike[str], sizes: FileSizes, contents: Sequence[Int32Array]) -> None:
    """Replaces the file ``path`` atomically. It contains users' text: only its owner may read it.
    What killed processes left of earlier calls for this path is removed.

    Raises:
        OSError: writing fails.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    size = sum(part.nbytes for part in contents)
    head = _SIZES.pack(MAGIC, VERSION, sizes.num_blocks, sizes.line_bits, sizes.visibility, size)
    _remove_leftovers(folder, name)
    scratch, descriptor = _locked_scratch(folder, name)
    try:
        with open(descriptor, "wb") as file:
            file.write(head + _digest(head, contents))
            for part in contents:
                file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise
    _sync_folder(folder)


def read_sizes(file: BufferedReader, name: str) -> tuple[FileSizes, bytes]:
    """The sizes of the store in an open file, and its first bytes for :func:`read_contents`.

    Raises:
        StoreFileError: not a store file, of another version, or not of the size that it names.
    """
    head = file.read(_SIZES.size + _DIGEST_BYTES)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise StoreFileError(f"{name}: not a file of a store")
    if len(head) < _SIZES.size + _DIGEST_BYTES:
        raise StoreFileError(f"{name}: truncated: {len(head)} bytes")
    _, version, num_blocks, line_bits, visibility, size = _SIZES.unpack_from(head)
    if version != VERSION:
        whose = "of an older" if version < VERSION else "of a newer"
        raise StoreFileError(f"{name}: {whose} release: expected format {VERSION}, got {version}")
    found = os.fstat(file.fileno()).st_size - len(head)
    if found != size:
        how = "truncated" if found < size else "too long"
        raise StoreFileError(f"{name}: {how}: expected {size} bytes of contents, got {found}")
    return FileSizes(num_blocks, line_bits, visibility), head


def check_size(name: str, head: bytes, expected: int) -> None:
    """Checks that a store of the sizes in the file has ``expected`` bytes of contents; called
    before memory is allocated for it.

    Raises:
        StoreFileError: it has another size.
    """
    size = _SIZES.unpack_from(head)[5]
    if size != expected:
        raise StoreFileError(f"{name}: corrupt: expected {expected} bytes of contents, got {size}")


def read_contents(
    file: BufferedReader, name: str, head: bytes, contents: Sequence[Int32Array]
) -> None:
    """Reads ``contents``, whose sizes are those that the file names.

    Raises:
        StoreFileError: the file was damaged or truncated.
    """
    for part in contents:
        if file.readinto(part.data) != part.nbytes:
            raise StoreFileError(f"{name}: truncated while it was read")
    if _digest(head[: _SIZES.size], contents) != head[_SIZES.size :]:
        raise StoreFileError(f"{name}: corrupt: its checksum does not match")


def _digest(head: bytes, contents: Sequence[Int32Array]) -> bytes:
    digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
    for part in contents:
        digest.update(part.data)
    return digest.digest()


def _locked_scratch(folder: str, name: str) -> tuple[str, int]:
    """A new file to write to and its descriptor. The lock, which ends with the process, tells other
    processes that it is in use."""
    while True:
        scratch = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # a file system without locks, where none is removed either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return scratch, descriptor
        os.close(descriptor)  # another call removed it before it was locked


def _remove_leftovers(folder: str, name: str) -> None:
    """Removes the files of :func:`_locked_scratch` that no process has locked."""
    scratch = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    for found in filter(scratch.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, found)
        with suppress(OSError):  # in use, another user's, or gone already
            # Non-blocking, because a pipe of this name would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _sync_folder(folder: str) -> None:
    """Syncs the folder, so that the new name survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
