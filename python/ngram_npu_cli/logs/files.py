"""Reads JSON values from a file or standard input: lines or one array, possibly compressed.

Memory is bounded for files of any length: no value may be longer than `_MAX_LINE_MIB`.
"""

from __future__ import annotations

import codecs
import importlib
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from ngram_npu.errors import InputError, RecordError, one_line

from ngram_npu_cli.logs.vllm_log import VllmLog

STDIN = Path("-")
SUFFIXES = tuple(
    f"{kind}{packed}"
    for kind in (".jsonl", ".json", ".ndjson", ".log")
    for packed in ("", ".gz", ".zst")
)
QUESTIONS = "question.jsonl"
"""FastChat's file of questions, which belong to files of answers and are not traffic."""

_MAX_LINE_MIB = 64
"""Longest value after decompression, so that a small gzip file cannot fill the memory."""
_CHUNK = 1 << 20
_LINES_BEFORE_VLLM = 1000
"""Lines that a script may print before vLLM's."""
_PIECE = 1 << 10
_MAGIC = 4
_DECODER = json.JSONDecoder()
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]|-?\d+|"', re.DOTALL)


def find_files(path: Path) -> list[Path]:
    """Returns the file `path`, or the files with one of `SUFFIXES` in a folder, sorted by name.

    Folders are not searched recursively.

    Raises:
        InputError: The path does not exist, or the folder has no such file.
    """
    if path == STDIN:
        return [path]
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path}: no such file or directory")
        return [path]
    try:
        files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.is_file())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    files = [file for file in files if file.name != QUESTIONS]
    if not files:
        raise InputError(
            f"{path}: no replay files (*.jsonl, *.json, *.log, also .gz or .zst) in this directory"
        )
    return files


def values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the JSON values of a file, one per line or the items of one array, each with the
    number of its first line.

    A line that cannot be read is yielded as an InputError instead of a value, and so is data after
    the compressed data: the caller decides whether to continue.

    Raises:
        InputError: The file or its compressed data cannot be read, or a document is not JSON, so
            that its later items cannot be found. The message names file and line.
    """
    name = "stdin" if path == STDIN else str(path)
    reader = _Reader(path, name)
    lines = (line for line in reader.lines() if not isinstance(line, str) or line.strip())
    first = next(lines, "")
    first_line = reader.line
    ahead: list[tuple[int, str | InputError]] = [(first_line, first)] if first else []
    if isinstance(first, str) and first.lstrip()[:1] not in ("{", "[", ""):
        yield from _read_log_lines(reader, chain([first], lines))
        yield from reader.check_end()
        return
    if isinstance(first, str) and _is_document(first):
        is_cut = first.rstrip()[-1] not in ",:[{]"  # otherwise it continues, or is an array
        second = next(lines, "") if is_cut else ""
        if isinstance(second, InputError):
            raise second
        if not _is_record(second):
            yield from _read_items(reader, first + second, first_line)
            return
        ahead.append((reader.line, second))  # JSON lines, and the first one is cut
    for line, text in ahead:
        yield line, _parse(text, f"{name}:{line}")
    for text in lines:
        line = reader.line
        yield line, _parse(text, f"{name}:{line}")
    yield from reader.check_end()


def _read_log_lines(
    reader: _Reader, lines: Iterable[str | InputError]
) -> Iterator[tuple[int, Any]]:
    """Yields the records of a text log.

    Lines of JSON are values. Other lines are errors unless the log is vLLM's, which is only known
    after some lines, so they are collected first.
    """
    log = VllmLog(reader.name)
    others: list[tuple[int, Any]] = []
    for text in lines:
        line = reader.line
        where = f"{reader.name}:{line}"
        if isinstance(text, InputError) and log.seen:
            yield line, text
            continue
        records = None if isinstance(text, InputError) else log.add_line(text, where)
        if records is not None:
            yield from ((line, record) for record in records)
            continue
        value = _parse(text, where)
        others.append((line, value))
        if isinstance(value, dict) or len(others) > _LINES_BEFORE_VLLM:
            yield from others
            others = []
    if not log.seen:
        yield from others
    yield from ((reader.line, record) for record in log.finish())


class _Reader:
    """Decodes a file in lines or pieces of lines, and counts lines."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.line = 0
        self.at_end = False
        self._path = path
        self._packing_before_rest: str | None = None
        self._raw = self._read_bytes()
        # Windows editors begin a file with a byte order mark, which JSON does not allow.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def lines(self) -> Iterator[str | InputError]:
        for raw in self._raw:
            at = f"{self.name}:{self.line}"
            if len(raw) > _MAX_LINE_MIB << 20 and not raw.endswith(b"\n"):
                if raw.lstrip()[:1] == b"[":  # the limit is for each item of an array
                    yield self._decode(raw)
                    return
                while not raw.endswith(b"\n") and (raw := next(self._raw, b"")):
                    pass
                yield InputError(f"{at}: the line is longer than {_MAX_LINE_MIB} MiB")
                continue
            try:
                text = self._decode(raw)
            except InputError as error:
                self._decoder.reset()
                yield error
            else:
                yield text
        self.at_end = True

    def check_end(self) -> Iterator[tuple[int, InputError]]:
        """Yields an error if other data follows compressed data."""
        packing = self._packing_before_rest
        if packing:
            where = f"{self.name}:{self.line}"
            yield self.line, InputError(f"{where}: data after the {packing} data is not {packing}")

    def read_more(self, least: int) -> str:
        """Returns at least ``least`` characters, in complete lines; fewer at the file's end."""
        parts: list[str] = []
        size = 0
        for raw in self._raw:
            parts.append(self._decode(raw))
            size += len(parts[-1])
            if size >= least:
                return "".join(parts)
        self.at_end = True
        return "".join(parts)

    def _read_bytes(self) -> Iterator[bytes]:
        """Yields lines, and lines that are too long in pieces."""
        is_new_line = True
        try:
            with _open(self._path, self.name) as file:
                while raw := file.readline((_MAX_LINE_MIB << 20) + 1):
                    self.line += is_new_line
                    is_new_line = raw.endswith(b"\n")
                    yield raw
                unpacked = getattr(file, "raw", None)
                self._packing_before_rest = getattr(unpacked, "packing_before_rest", None)
        except _DamagedError as error:
            # Complete lines were unpacked before: the damage is in or shortly after the next line.
            raise InputError(f"{self.name}:{self.line + 1}: {error}") from error
        except OSError as error:
            raise InputError(f"{self.name}: {error.strerror or error}") from error

    def _decode(self, raw: bytes) -> str:
        try:
            # Only a piece of a longer line may end within a character.
            return self._decoder.decode(raw, final=len(raw) <= _MAX_LINE_MIB << 20)
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start + 1}"
            raise InputError(f"{self.name}:{self.line}: not UTF-8: {reason}") from error


def _is_document(first: str) -> bool:
    """Returns whether the file is one value that begins on this line, and not JSON lines."""
    if not first.lstrip() or first.lstrip()[0] not in "[{":
        return False
    try:
        value = json.loads(first)
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):  # numbers too long, nesting too deep
        return first.lstrip()[0] == "["
    # A file of one array on one line; an array of messages is one conversation.
    return isinstance(value, list) and not _is_message(value)


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), (dict, list))
    except (ValueError, RecursionError):
        return False


def _is_message(value: list[Any]) -> bool:
    first = value[0] if value else None
    return isinstance(first, dict) and bool({"role", "from"} & first.keys())


def _read_items(reader: _Reader, text: str, first_line: int) -> Iterator[tuple[int, Any]]:
    """Yields the items of an array, or the only value of a document."""
    buffer = _Buffer(reader, text, first_line)
    if text.lstrip()[0] == "{":
        yield first_line, buffer.read_value()
        buffer.check_end()
        yield from reader.check_end()
        return
    messages: list[Any] | None = None  # an array of messages is one conversation
    buffer.skip("[")
    is_first = True
    while not buffer.skip("]"):
        line = buffer.count_lines()
        value = buffer.read_value(is_item=True)
        if is_first and _is_message([value]):
            messages = []
        is_first = False
        if messages is None:
            yield line, value
        elif isinstance(value, InputError):
            raise value
        else:
            messages.append(value)
        if not buffer.skip(","):
            if not buffer.skip("]"):
                buffer.fail("expected , or ] after an item")
            break
    buffer.check_end()
    if messages is not None:
        yield first_line, messages
    yield from reader.check_end()


class _Buffer:
    """Decodes values, and reads more text when it is needed."""

    def __init__(self, reader: _Reader, text: str, line: int) -> None:
        self._reader = reader
        self._text = text
        self._position = 0
        self._line = line
        self._line_position = 0  # up to here line ends are counted

    def count_lines(self) -> int:
        """Returns the line number of the next character that is not a space."""
        self._fill()
        self._line += self._text.count("\n", self._line_position, self._position)
        self._line_position = self._position
        return self._line

    def skip(self, character: str) -> bool:
        self._fill()
        if not self._text.startswith(character, self._position):
            return False
        self._position += 1
        return True

    def read_value(self, *, is_item: bool = False) -> Any:
        """Returns the next value, or an error for an item that is JSON but cannot be read."""
        self._fill()
        size = _CHUNK
        unreadable: RecordError | None = None
        while True:
            try:
                if unreadable is not None:
                    value, end = unreadable, self._find_value_end()
                else:
                    value, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._reader.at_end:
                    self.count_lines()
                    pos = min(error.pos, len(self._text.rstrip()))
                    self._line += self._text.count("\n", self._line_position, pos)
                    column = pos - self._text.rfind("\n", 0, pos)
                    raise self._make_error(f"not JSON: {error.msg} at column {column}") from error
            except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
                unreadable = self._make_error(f"not JSON that can be read: {one_line(error)}")
                if not is_item:
                    raise unreadable from error
                continue
            else:
                # A number may continue in text that has not been read; other values are complete.
                if end < len(self._text) or self._reader.at_end:
                    self._position = end
                    return value
            if len(self._text) - self._position > _MAX_LINE_MIB << 20:
                raise self._make_error(f"the value is longer than {_MAX_LINE_MIB} MiB")
            self._read_more(size)
            size *= 2

    def _find_value_end(self) -> int:
        """Returns the end of a value by its brackets; raises if it has not been read."""
        depth = 0
        for token in _BRACKET.finditer(self._text, self._position):
            if token[0] == '"':  # begins a string with an end that has not been read
                break
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
            if depth <= 0:
                return token.end() - (depth < 0)
        raise json.JSONDecodeError("Unterminated value", self._text, len(self._text))

    def check_end(self) -> None:
        self._fill()
        if self._position < len(self._text):
            self.fail("expected the file's end after the value")

    def fail(self, what: str) -> None:
        self.count_lines()
        character = self._text[self._position : self._position + 1]
        got = f", got {character!r}" if character else ""
        raise self._make_error(f"not JSON: {what}{got}")

    def _make_error(self, what: str) -> RecordError:
        return RecordError(f"{self._reader.name}:{self._line}: {what}")

    def _fill(self) -> None:
        """Skips spaces and reads more text until there is a character or the file ends."""
        while True:
            while self._position < len(self._text) and self._text[self._position] in " \t\r\n":
                self._position += 1
            if self._position < len(self._text) or self._reader.at_end:
                return
            self._read_more(_CHUNK)

    def _read_more(self, least: int) -> None:
        self._line += self._text.count("\n", self._line_position, self._position)
        self._text = self._text[self._position :] + self._reader.read_more(least)
        self._position = self._line_position = 0


class _DamagedError(Exception):
    """Compressed data that cannot be unpacked."""


class _Unpacked(io.RawIOBase):
    """Unpacks gzip members or zstd frames, one after the other.

    Each one must be complete. Otherwise a file that a killed server had flushed only in part would
    be read without an error.

    Attributes:
        packing_before_rest: Name of the packing if other data follows, which is not read.
    """

    def __init__(self, file: IO[bytes], packing: _Packing, new: Callable[[], Any]) -> None:
        self._file, self._packing, self._new = file, packing, new
        self._member: Any = None
        self._has_member = False
        self.packing_before_rest: str | None = None
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, into: Any) -> int:
        while not self._plain and self._next():
            pass
        size = min(len(into), len(self._plain))
        into[:size], self._plain = self._plain[:size], self._plain[size:]
        return size

    def _next(self) -> bool:
        """Unpacks a small piece; returns False at the end of the data."""
        kind = self._packing.kind
        # Small pieces bound the memory: 4 bytes may be unpacked to 128 KiB.
        if len(self._packed) < _MAGIC:
            self._packed += self._file.read(_PIECE)
        if not self._packed:
            if self._member is not None:
                raise _DamagedError(f"damaged {kind} data: the file ends before the data does")
            return False
        if self._member is None:
            if not self._packing.begins(self._packed):
                if not self._has_member:
                    raise _DamagedError(f"damaged {kind} data: this is not {kind}")
                if self._packed.strip(b"\0"):  # zeros are padding, as on tapes
                    self.packing_before_rest = kind
                return False
            self._member, self._has_member = self._new(), True
        try:
            self._plain = self._member.decompress(self._packed)
        except Exception as error:  # each package raises its own type
            raise _DamagedError(f"damaged {kind} data: {one_line(error)}") from error
        self._packed = b""
        if self._member.eof:
            self._packed, self._member = self._member.unused_data, None
        return True


@dataclass(frozen=True)
class _Packing:
    kind: str
    suffix: str
    begins: Callable[[bytes], bool]


def _begins_zstd(data: bytes) -> bool:
    """Whether data begins with a frame, or with one to skip, as pzstd writes."""
    return data.startswith(b"\x28\xb5\x2f\xfd") or (
        data[1:_MAGIC] == b"\x2a\x4d\x18" and data[0] >> 4 == 5
    )


_GZIP = _Packing("gzip", ".gz", lambda data: data.startswith(b"\x1f\x8b"))
_ZSTD = _Packing("zstd", ".zst", _begins_zstd)


def _open(path: Path, name: str) -> IO[bytes]:
    if path == STDIN and sys.stdin is None:
        raise OSError("standard input is closed")
    raw: Any = sys.stdin.buffer if path == STDIN else path.open("rb")
    file = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)
    head = file.peek(_MAGIC)[:_MAGIC]
    for packing in (_GZIP, _ZSTD):
        if path.name.endswith(packing.suffix) or (head and packing.begins(head)):
            new = _zstd(name) if packing is _ZSTD else lambda: zlib.decompressobj(wbits=31)
            return io.BufferedReader(_Unpacked(file, packing, new))
    return file


def _zstd(name: str) -> Callable[[], Any]:
    """Returns a function that makes a decompressor of one frame."""
    for module in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            decompressor: Callable[[], Any] = importlib.import_module(module).ZstdDecompressor
            return decompressor
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError as error:
        raise InputError(
            f"{name}: zstd needs the package zstandard: pip install zstandard, or unpack the file "
            f"first: zstd -d {name}"
        ) from error
    return lambda: zstandard.ZstdDecompressor().decompressobj()


def _parse(text: str | InputError, where: str) -> Any:
    """Returns the value of a line, or an error."""
    if isinstance(text, InputError):
        return text
    try:
        # With the line end, an error in an unfinished line would be reported for the next line.
        # Concatenated files may each begin with a byte order mark.
        return json.loads(text.rstrip().removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        return RecordError(f"{where}: not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        return RecordError(f"{where}: not JSON that can be read: {one_line(error)}")
