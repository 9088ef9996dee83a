"""Reads and writes store files. A file is written completely or not at all.

    8 bytes   "NGRSTORE"
    4 words   version, num_blocks, line_bits, visibility; unsigned
    8 bytes   size of the contents in bytes
    16 bytes  digest of the tokenizer's vocabulary; zeros: unknown
    16 bytes  first half of the checksum of the file that the store was seeded with; zeros: none
    32 bytes  checksum: BLAKE2b of the contents and of all bytes above
    contents  pieces (csrc/cpu/ngram_store_lifecycle.cpp), each after its size in bytes, a word

All numbers are little-endian, as in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike
from typing import NamedTuple

import ngram_npu._C as _C

MAGIC = b"NGRSTORE"
VERSION = 2
"""Incremented when layout, hash or the rules for adding text change."""
_HEAD = struct.Struct("<8sIIIIQ16s16s")
_WORD = struct.Struct("<I")
_CHECKSUM_BYTES = 32


class StoreFileError(ValueError):
    """A file is not a store file, or cannot be used here. The message states the reason."""


class FileSizes(NamedTuple):
    """Sizes and visibility code of the store in a file."""

    num_blocks: int
    line_bits: int
    visibility: int


@dataclass(frozen=True)
class Description:
    """The header of a store file."""

    sizes: FileSizes
    tokenizer: str
    """Digest of the vocabulary, 32 hexadecimal digits; empty: unknown."""
    seed: str
    """``checksum[:32]`` of the file that the store was seeded with; empty: none."""
    checksum: str
    """Of the whole file, 64 hexadecimal digits."""


def check_digest(digest: str) -> str:
    """Returns the digest if it is valid.

    Raises:
        ValueError: not 32 hexadecimal digits, and not empty.
    """
    if not re.fullmatch("([0-9a-f]{32})?", digest):
        raise ValueError(f"tokenizer: expected 32 hexadecimal digits, got {digest!r}")
    return digest


@contextmanager
def write_new_file(
    path: str | PathLike[str],
    sizes: FileSizes,
    tokenizer: str,
    seed: str,
    pieces: Iterable[memoryview],
) -> Iterator[Callable[[], None]]:
    """Writes a complete new file, and yields a function that replaces ``path`` by it atomically.
    The file contains users' text: only its owner may read it. Temporary files that killed processes
    left for this path are removed.

    Raises:
        OSError: writing fails.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    _remove_leftovers(folder, name)
    scratch, descriptor = _create_scratch(folder, name)
    try:
        with open(descriptor, "wb") as file:
            checksum, size = hashlib.blake2b(digest_size=_CHECKSUM_BYTES), 0
            file.write(bytes(_HEAD.size + _CHECKSUM_BYTES))
            for piece in pieces:
                for part in (_WORD.pack(len(piece)), piece):
                    checksum.update(part)
                    size += file.write(part)
            names = bytes.fromhex(tokenizer), bytes.fromhex(seed)
            head = _HEAD.pack(MAGIC, VERSION, *sizes, size, *names)
            checksum.update(head)
            file.seek(0)
            file.write(head + checksum.digest())
            file.flush()
            os.fsync(file.fileno())
        yield lambda: os.replace(scratch, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise
    _sync_folder(folder)


def describe(path: str | PathLike[str]) -> Description:
    """Reads the header of a store file.

    Raises:
        StoreFileError: not a store file, or of another version.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return read_description(file, os.fspath(path))


def read_description(file: BufferedReader, name: str) -> Description:
    """Reads the header of an open store file.

    Raises:
        StoreFileError: not a store file, of another version, or not of the size in its header.
    """
    head = file.read(_HEAD.size + _CHECKSUM_BYTES)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise StoreFileError(f"{name}: not a store file")
    if len(head) >= 12 and (version := _WORD.unpack_from(head, 8)[0]) != VERSION:
        age = "an older" if version < VERSION else "a newer"
        raise StoreFileError(f"{name}: of {age} release: expected format {VERSION}, got {version}")
    if len(head) < _HEAD.size + _CHECKSUM_BYTES:
        raise StoreFileError(f"{name}: truncated: {len(head)} bytes")
    _, _, *sizes, size, tokenizer, seed = _HEAD.unpack_from(head)
    actual_size = os.fstat(file.fileno()).st_size - len(head)
    if actual_size != size:
        problem = "truncated" if actual_size < size else "too long"
        raise StoreFileError(
            f"{name}: {problem}: expected {size} bytes of contents, got {actual_size}"
        )
    tokenizer, seed = (part.hex() if any(part) else "" for part in (tokenizer, seed))
    return Description(FileSizes(*sizes), tokenizer, seed, head[_HEAD.size :].hex())


def read_pieces(file: BufferedReader, name: str) -> Iterator[bytes]:
    """Yields the pieces of the contents, then verifies the checksum.

    Raises:
        StoreFileError: the file is damaged or truncated.
    """
    file.seek(0)
    head, expected = file.read(_HEAD.size), file.read(_CHECKSUM_BYTES)
    checksum = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    while size_word := file.read(_WORD.size):
        size = _WORD.unpack(size_word)[0] if len(size_word) == _WORD.size else 0
        if size > _C.STORE_PIECE_WORDS * _WORD.size:
            break
        piece = file.read(size)
        checksum.update(size_word)
        checksum.update(piece)
        yield piece
    checksum.update(head)
    if checksum.digest() != expected:
        raise StoreFileError(f"{name}: corrupt: its checksum does not match")


def _create_scratch(folder: str, name: str) -> tuple[str, int]:
    """Creates a temporary file. Returns its path and descriptor. The lock, which ends with the
    process, shows other processes that the file is in use."""
    while True:
        scratch = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        # A file system may not support locks. Leftovers are then not removed either.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return scratch, descriptor
        os.close(descriptor)  # another call removed the file before it was locked


def _remove_leftovers(folder: str, name: str) -> None:
    """Removes temporary files of :func:`_create_scratch` that no process has locked."""
    scratch = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    for leftover in filter(scratch.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, leftover)
        with suppress(OSError):  # in use, owned by another user, or already removed
            # Opening a pipe of this name would block until it has a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _sync_folder(folder: str) -> None:
    """Syncs the folder, so that the new file name survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
