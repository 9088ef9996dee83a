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
"""FastChat's file of questions, which belong to the answer files and are not traffic."""

_MAX_LINE_MIB = 64
"""Longest value after decompression, so that a small gzip file cannot fill the memory."""
_CHUNK = 1 << 20
_LINES_BEFORE_VLLM = 1000
"""What a script may print before the server that it starts."""
_PIECE = 1 << 10
_MAGIC = 4
_DECODER = json.JSONDecoder()
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]|-?\d+|"', re.DOTALL)


def find_files(path: Path) -> list[Path]:
    """The file `path`, or the files with one of `SUFFIXES` in the folder `path`, sorted by name.

    Folders are not searched recursively.

    Raises:
        InputError: the path does not exist, or the folder has no such file.
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
    """The JSON values of a file, one per line or the items of one array, each with the number of
    its first line.

    A line that cannot be read comes as a InputError in place of its value, and so does what
    follows compressed data: the reader decides whether to go on.

    Raises:
        InputError: naming file and line: the file or its compressed data cannot be read, or a
            document, whose later items nobody could find, is not JSON.
    """
    name = "stdin" if path == STDIN else str(path)
    reader = _Reader(path, name)
    lines = (line for line in reader.lines() if not isinstance(line, str) or line.strip())
    first = next(lines, "")
    begun = reader.line
    ahead: list[tuple[int, str | InputError]] = [(begun, first)] if first else []
    if isinstance(first, str) and first.lstrip()[:1] not in ("{", "[", ""):
        yield from _log_lines(reader, chain([first], lines))
        yield from reader.rest()
        return
    if isinstance(first, str) and _is_document(first):
        is_cut = first.rstrip()[-1] not in ",:[{]"  # else more follows, or it is an array
        second = next(lines, "") if is_cut else ""
        if isinstance(second, InputError):
            raise second
        if not _is_record(second):
            yield from _items(reader, first + second, begun)
            return
        ahead.append((reader.line, second))  # lines, of which the first is cut
    for line, text in ahead:
        yield line, text if isinstance(text, InputError) else _parsed(text, f"{name}:{line}")
    for text in lines:
        line = reader.line
        yield line, text if isinstance(text, InputError) else _parsed(text, f"{name}:{line}")
    yield from reader.rest()


def _log_lines(reader: _Reader, lines: Iterable[str | InputError]) -> Iterator[tuple[int, Any]]:
    """The records of a text log. Lines of JSON are values; what else there is between them is wrong
    unless the log is vLLM's."""
    log = VllmLog(reader.name)
    wrong: list[tuple[int, Any]] = []
    for text in lines:
        line = reader.line
        where = f"{reader.name}:{line}"
        if isinstance(text, InputError) and log.seen:
            yield line, text
            continue
        found = None if isinstance(text, InputError) else log.take(text, where)
        if found is not None:
            yield from ((line, value) for value in found)
            continue
        value = text if isinstance(text, InputError) else _parsed(text, where)
        wrong.append((line, value))
        if isinstance(value, dict) or len(wrong) > _LINES_BEFORE_VLLM:
            yield from wrong
            wrong = []
    if not log.seen:
        yield from wrong
    yield from ((reader.line, value) for value in log.rest())


class _Reader:
    """Decodes a file in whole lines or pieces, and counts lines."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.line = 0
        self.at_end = False
        self._path = path
        self._follows: str | None = None
        self._raw = self._bytes()
        # Windows editors begin a file with a byte order mark, which JSON does not allow.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def lines(self) -> Iterator[str | InputError]:
        for raw in self._raw:
            at = f"{self.name}:{self.line}"
            if len(raw) > _MAX_LINE_MIB << 20 and not raw.endswith(b"\n"):
                if raw.lstrip()[:1] == b"[":  # the array may be long, its items may not
                    yield self._text(raw)
                    return
                while not raw.endswith(b"\n") and (raw := next(self._raw, b"")):
                    pass
                yield InputError(f"{at}: the line is longer than {_MAX_LINE_MIB} MiB")
                continue
            try:
                text = self._text(raw)
            except InputError as error:
                self._decoder.reset()
                yield error
            else:
                yield text
        self.at_end = True

    def rest(self) -> Iterator[tuple[int, InputError]]:
        """What follows compressed data, as one error."""
        if self._follows:
            where = f"{self.name}:{self.line}"
            yield self.line, InputError(f"{where}: what follows the {self._follows} data is not")

    def more(self, least: int) -> str:
        """At least ``least`` further characters, in whole lines; fewer at the file's end."""
        parts: list[str] = []
        size = 0
        for raw in self._raw:
            parts.append(self._text(raw))
            size += len(parts[-1])
            if size >= least:
                return "".join(parts)
        self.at_end = True
        return "".join(parts)

    def _bytes(self) -> Iterator[bytes]:
        """Lines; one longer than the limit plus one byte comes in pieces."""
        whole = True
        try:
            with _open(self._path, self.name) as file:
                while raw := file.readline((_MAX_LINE_MIB << 20) + 1):
                    self.line += whole
                    whole = raw.endswith(b"\n")
                    yield raw
                self._follows = getattr(getattr(file, "raw", None), "follows", None)
        except _DamagedError as error:
            # Whole lines were unpacked before: the damage is on the next one or shortly after it.
            raise InputError(f"{self.name}:{self.line + 1}: {error}") from error
        except OSError as error:
            raise InputError(f"{self.name}: {error.strerror or error}") from error

    def _text(self, raw: bytes) -> str:
        try:
            # Only a piece of a longer line may end within a character.
            return self._decoder.decode(raw, final=len(raw) <= _MAX_LINE_MIB << 20)
        except UnicodeDecodeError as error:
            at = f"{error.reason} at byte {error.start + 1}"
            raise InputError(f"{self.name}:{self.line}: not UTF-8: {at}") from error


def _is_document(first: str) -> bool:
    """Whether the whole file is the one value that begins on this line, and not JSON lines."""
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


def _items(reader: _Reader, text: str, begun: int) -> Iterator[tuple[int, Any]]:
    """The values of a document: the items of an array, otherwise the value itself."""
    buffer = _Buffer(reader, text, begun)
    if text.lstrip()[0] == "{":
        yield begun, buffer.value()
        buffer.end()
        yield from reader.rest()
        return
    messages: list[Any] | None = None  # an array of messages is one conversation
    buffer.skip("[")
    first = True
    while not buffer.skip("]"):
        line = buffer.here()
        value = buffer.value(is_item=True)
        if first and _is_message([value]):
            messages = []
        first = False
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
    buffer.end()
    if messages is not None:
        yield begun, messages
    yield from reader.rest()


class _Buffer:
    """Decodes values from text that is read when it is needed."""

    def __init__(self, reader: _Reader, text: str, line: int) -> None:
        self._reader = reader
        self._text = text
        self._at = 0
        self._line = line
        self._line_at = 0

    def here(self) -> int:
        """Line number of the next character that is not a space."""
        self._fill()
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = self._at
        return self._line

    def skip(self, character: str) -> bool:
        self._fill()
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def value(self, *, is_item: bool = False) -> Any:
        """The next value. In place of an item that is JSON, but cannot be read, comes its error."""
        self._fill()
        wanted = _CHUNK
        unread: RecordError | None = None
        while True:
            try:
                if unread is not None:
                    value, at = unread, self._end_of_value()
                else:
                    value, at = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._reader.at_end:
                    self.here()
                    pos = min(error.pos, len(self._text.rstrip()))
                    self._line += self._text.count("\n", self._line_at, pos)
                    column = pos - self._text.rfind("\n", 0, pos)
                    raise self._error(f"not JSON: {error.msg} at column {column}") from error
            except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
                unread = self._error(f"not JSON that can be read: {one_line(error)}")
                if not is_item:
                    raise unread from error
                continue
            else:
                # A number may continue in text that has not been read; other values are complete.
                if at < len(self._text) or self._reader.at_end:
                    self._at = at
                    return value
            if len(self._text) - self._at > _MAX_LINE_MIB << 20:
                raise self._error(f"the value is longer than {_MAX_LINE_MIB} MiB")
            self._more(wanted)
            wanted *= 2

    def _end_of_value(self) -> int:
        """The end of a value whose brackets are closed; raises if that has not been read."""
        depth = 0
        for found in _BRACKET.finditer(self._text, self._at):
            if found[0] == '"':  # of a text whose end has not been read
                break
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
            if depth <= 0:
                return found.end() - (depth < 0)
        raise json.JSONDecodeError("Unterminated value", self._text, len(self._text))

    def end(self) -> None:
        self._fill()
        if self._at < len(self._text):
            self.fail("expected the file's end after the value")

    def fail(self, what: str) -> None:
        self.here()
        found = self._text[self._at : self._at + 1]
        raise self._error(f"not JSON: {what}, got {found!r}" if found else f"not JSON: {what}")

    def _error(self, what: str) -> RecordError:
        return RecordError(f"{self._reader.name}:{self._line}: {what}")

    def _fill(self) -> None:
        """Skips spaces and reads on until there is a character or the file ends."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or self._reader.at_end:
                return
            self._more(_CHUNK)

    def _more(self, least: int) -> None:
        self._line += self._text.count("\n", self._line_at, self._at)
        self._text = self._text[self._at :] + self._reader.more(least)
        self._at = self._line_at = 0


class _DamagedError(Exception):
    """Compressed data that cannot be unpacked."""


class _Unpacked(io.RawIOBase):
    """Unpacks gzip members or zstd frames, one after the other.

    Every one must be complete: what a server flushed before it was killed is shorter than what it
    recorded, and would be read without an error otherwise.

    Attributes:
        follows: kind of the data after which something else follows, which is not read.
    """

    def __init__(self, file: IO[bytes], packing: _Packing, new: Callable[[], Any]) -> None:
        self._file, self._packing, self._new = file, packing, new
        self._one: Any = None
        self._begun = False
        self.follows: str | None = None
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
        """Unpack a little; returns False at the end of the data."""
        kind = self._packing.kind
        # Small pieces bound the memory: 4 bytes may be unpacked to 128 KiB.
        if len(self._packed) < _MAGIC:
            self._packed += self._file.read(_PIECE)
        if not self._packed:
            if self._one is not None:
                raise _DamagedError(f"damaged {kind} data: the file ends before the data does")
            return False
        if self._one is None:
            if not self._packing.begins(self._packed):
                if not self._begun:
                    raise _DamagedError(f"damaged {kind} data: this is not {kind}")
                if self._packed.strip(b"\0"):  # zeros fill up a block of a tape
                    self.follows = kind
                return False
            self._one, self._begun = self._new(), True
        try:
            self._plain = self._one.decompress(self._packed)
        except Exception as error:  # each package has a type of its own
            raise _DamagedError(f"damaged {kind} data: {one_line(error)}") from error
        self._packed = b""
        if self._one.eof:
            self._packed, self._one = self._one.unused_data, None
        return True


@dataclass(frozen=True)
class _Packing:
    kind: str
    suffix: str
    begins: Callable[[bytes], bool]


def _begins_zstd(data: bytes) -> bool:
    """A frame, or one to skip, as pzstd writes."""
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
    """Makes a decompressor of one frame."""
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


def _parsed(text: str, where: str) -> Any:
    try:
        # With the line end, an error in an unfinished line would be reported on the next line. Of
        # files put together each may have begun with a byte order mark.
        return json.loads(text.rstrip().removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        return RecordError(f"{where}: not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        return RecordError(f"{where}: not JSON that can be read: {one_line(error)}")
