"""Reads and writes store files. A file is written completely or not at all.

    8 bytes   "NGRSTORE"
    1 word    version
    1 word    zero
    3 * 8     capacity of the store in tokens, number of texts, number of tokens; unsigned
    16 bytes  digest of the tokenizer's vocabulary; zeros: unknown
    16 bytes  first half of the checksum of the file that the store was seeded with; zeros: none
    32 bytes  checksum: BLAKE2b of all bytes above and below
    8 bytes   scope, for each text in order
    1 word    length, for each text
    words     tokens of all texts

All numbers are little-endian. A word has four bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike

import numpy as np

from ngram_npu.store.identifiers import Scope
from ngram_npu.tensors import Int32Array

MAGIC = b"NGRSTORE"
VERSION = 3
"""Incremented when the format changes."""
_HEAD = struct.Struct("<8sIIQQQ16s16s")
_VERSION = struct.Struct("<8sI")
_CHECKSUM_BYTES = 32
_BYTES_PER_TEXT, _BYTES_PER_TOKEN = 8 + 4, 4

Text = tuple[Scope, Int32Array]
"""The scope and the tokens of one request's text."""


class StoreFileError(ValueError):
    """A file is not a store file, or cannot be used here. The message states the reason."""


@dataclass(frozen=True)
class Description:
    """The header of a store file."""

    capacity: int
    """Capacity of the store in tokens."""
    num_texts: int
    num_tokens: int
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
    path: str | PathLike[str], texts: list[Text], capacity: int, tokenizer: str, seed: str
) -> Iterator[Callable[[], None]]:
    """Writes a complete new file, and yields a function that replaces ``path`` by it atomically.
    The file contains users' text: only its owner may read it. Temporary files that killed processes
    left for this path are removed.

    Raises:
        OSError: writing fails.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    lengths = np.array([len(text) for _, text in texts], "<u4")
    names = bytes.fromhex(tokenizer), bytes.fromhex(seed)
    head = _HEAD.pack(MAGIC, VERSION, 0, capacity, len(texts), int(lengths.sum()), *names)
    scopes = np.array([scope for scope, _ in texts], "<i8")
    arrays = [scopes, lengths, *(text.astype("<i4", copy=False) for _, text in texts)]
    checksum = hashlib.blake2b(head, digest_size=_CHECKSUM_BYTES)
    for array in arrays:
        checksum.update(array.data)
    _remove_leftovers(folder, name)
    scratch, descriptor = _create_scratch(folder, name)
    try:
        # The lock of the descriptor lasts until the file has replaced the target. Otherwise another
        # call for this path could remove it as a leftover.
        with open(descriptor, "wb") as file:
            file.write(head + checksum.digest())
            for array in arrays:
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())
            yield lambda: os.replace(scratch, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise
    with suppress(FileNotFoundError):  # the caller did not replace the path
        os.unlink(scratch)
    _sync_folder(folder)


def describe(path: str | PathLike[str]) -> Description:
    """Reads the header of a store file.

    Raises:
        StoreFileError: not a store file, of another version, or not of the size in its header.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return _read_description(file, os.fspath(path))


def read_texts(path: str | PathLike[str]) -> tuple[Description, list[Text]]:
    """Reads a store file. Memory is allocated for the actual size of the file only.

    Raises:
        StoreFileError: not a store file, of another version, truncated or damaged.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        description = _read_description(file, name)
        file.seek(0)
        head, expected = file.read(_HEAD.size), file.read(_CHECKSUM_BYTES)
        contents = file.read()
    checksum = hashlib.blake2b(head, digest_size=_CHECKSUM_BYTES)
    checksum.update(contents)
    end = 8 * description.num_texts
    begin_of_tokens = _BYTES_PER_TEXT * description.num_texts
    lengths = np.frombuffer(contents[end:begin_of_tokens], "<u4").astype(np.int64)
    if checksum.digest() != expected or int(lengths.sum()) != description.num_tokens:
        raise StoreFileError(f"{name}: corrupt: its checksum does not match")
    scopes = np.frombuffer(contents[:end], "<i8")
    tokens = np.frombuffer(contents, "<i4", offset=begin_of_tokens).astype(np.int32, copy=False)
    texts = np.split(tokens, np.cumsum(lengths)[:-1])
    return description, [(Scope(s), text) for s, text in zip(scopes.tolist(), texts, strict=False)]


def _read_description(file: BufferedReader, name: str) -> Description:
    head = file.read(_HEAD.size + _CHECKSUM_BYTES)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise StoreFileError(f"{name}: not a store file")
    if len(head) >= _VERSION.size and (version := _VERSION.unpack_from(head)[1]) != VERSION:
        advice = "update ngram_npu"
        if version < VERSION:
            advice = "make the file again with `ngram-npu learn`"
        raise StoreFileError(
            f"{name}: expected a file of format {VERSION}, got format {version}; {advice}"
        )
    if len(head) < _HEAD.size + _CHECKSUM_BYTES:
        raise StoreFileError(f"{name}: truncated: {len(head)} bytes")
    _, _, _, capacity, num_texts, num_tokens, tokenizer, seed = _HEAD.unpack_from(head)
    size = _BYTES_PER_TEXT * num_texts + _BYTES_PER_TOKEN * num_tokens
    actual_size = os.fstat(file.fileno()).st_size - len(head)
    if actual_size != size:
        problem = "truncated" if actual_size < size else "too long"
        raise StoreFileError(
            f"{name}: {problem}: expected {size} bytes of contents, got {actual_size}"
        )
    tokenizer, seed = (part.hex() if any(part) else "" for part in (tokenizer, seed))
    checksum = head[_HEAD.size :].hex()
    return Description(capacity, num_texts, num_tokens, tokenizer, seed, checksum)


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
