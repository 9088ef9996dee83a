"""Recorded conversations: the data classes and the reader of JSONL files.

One conversation a line: `{"id": ..., "turns": [{"prompt": ..., "completion": ...}, ...]}`. Instead
of (or next to) the texts a turn may carry `prompt_token_ids` and `completion_token_ids`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ngram_npu.replay.errors import ReplayError

__all__ = ["SUFFIXES", "Conversation", "Turn", "find_files", "read_conversations"]

SUFFIXES = (".jsonl", ".jsonl.gz")
_TEXT_KEYS = ("prompt", "completion")
_IDS_KEYS = ("prompt_token_ids", "completion_token_ids")
_MAX_TOKEN_ID = 2**31 - 1
_MAX_LINE_MIB = 64
"""Longest line, decompressed: a small gzip file may stand for a line that fills the memory."""


@dataclass(frozen=True)
class Turn:
    """One exchange: what the model was given and what it answered.

    Either both texts or both lists of token ids are present; where both are, the ids are used.

    Attributes:
        prompt: text given to the model; tool outputs and the like are just text in it.
        completion: text the model answered; may be empty.
        prompt_token_ids: token ids of the whole prompt, used as they are (no template).
        completion_token_ids: token ids of the completion, used as they are.
    """

    prompt: str | None = None
    completion: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None

    @property
    def has_token_ids(self) -> bool:
        """Whether this turn needs no tokenizer."""
        return self.prompt_token_ids is not None and self.completion_token_ids is not None


@dataclass(frozen=True)
class Conversation:
    """A recorded conversation: one growing context over its turns.

    Attributes:
        id: the recording's own name for it; need not be unique.
        turns: in order, at least one.
        where: where it was read, for messages ("file.jsonl:3"); empty if it was not read.
    """

    id: str
    turns: tuple[Turn, ...]
    where: str = ""

    @property
    def has_token_ids(self) -> bool:
        """Whether every turn carries token ids (turns of one conversation are all alike)."""
        return all(turn.has_token_ids for turn in self.turns)


def find_files(path: Path) -> list[Path]:
    """The replay files that `path` stands for: itself, or a folder's *.jsonl and *.jsonl.gz.

    Folders are not searched recursively; the order is that of the names.

    Raises:
        ReplayError: the path does not exist, or the folder holds no such file.
    """
    if not path.is_dir():
        if not path.exists():
            raise ReplayError(f"{path}: no such file or directory")
        return [path]
    try:
        files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.is_file())
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from error
    if not files:
        raise ReplayError(f"{path}: no replay files (*.jsonl, *.jsonl.gz) in this directory")
    return files


def read_conversations(path: Path, limit: int | None = None) -> list[Conversation]:
    """Read a replay file; a name ending in `.gz` is decompressed, blank lines are skipped.

    Args:
        path: the file.
        limit: stop after this many conversations (later lines are then not looked at).

    Raises:
        ReplayError: naming file and line, for anything that is not a conversation; naming the file
            where it cannot be opened or holds no conversation.
    """
    conversations: list[Conversation] = []
    for line, raw in _lines(path):
        where = f"{path}:{line}"
        text = _decode(raw, where, first=line == 1)
        if not text.strip():
            continue
        conversations.append(_conversation(text, where))
        if limit is not None and len(conversations) >= limit:
            break
    if not conversations:
        raise ReplayError(f"{path}: empty, no conversation in this file")
    return conversations


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered raw lines; failures to open or decompress become errors naming the line reached."""
    line = 0
    try:
        with _open(path) as file:
            limit = _MAX_LINE_MIB << 20
            while raw := file.readline(limit + 1):
                line += 1
                if len(raw) > limit and not raw.endswith(b"\n"):
                    raise ReplayError(f"{path}:{line}: the line is longer than {_MAX_LINE_MIB} MiB")
                yield line, raw
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        # What was decompressed before the damage is whole lines, so the damage is on the next one.
        raise ReplayError(f"{path}:{line + 1}: damaged gzip data: {_one_line(error)}") from error
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from error


def _open(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb")


def _decode(raw: bytes, where: str, first: bool) -> str:
    try:
        # Editors on Windows put a byte order mark at the front of a file; JSON does not allow it.
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        at = f"{error.reason} at byte {error.start + 1}"
        raise ReplayError(f"{where}: not UTF-8: {at}") from error


def _conversation(text: str, where: str) -> Conversation:
    try:
        # The line end would put the column of an unfinished line on the next line.
        data: object = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        raise ReplayError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        raise ReplayError(f"{where}: not JSON that can be read: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise ReplayError(f"{where}: expected an object, got {_kind(data)}")
    for key in ("id", "turns"):
        if key not in data:
            raise ReplayError(f'{where}: missing key "{key}"')
    ident, turns = data["id"], data["turns"]
    if isinstance(ident, bool) or not isinstance(ident, (str, int)):
        raise ReplayError(f'{where}: "id" must be a string, got {_kind(ident)}')
    if not isinstance(turns, list):
        raise ReplayError(f'{where}: "turns" must be an array, got {_kind(turns)}')
    if not turns:
        raise ReplayError(f'{where}: "turns" is empty')
    parsed = tuple(_turn(turn, f"{where}: turns[{i}]") for i, turn in enumerate(turns))
    if len({turn.has_token_ids for turn in parsed}) > 1:
        raise ReplayError(f"{where}: some turns carry token ids and some do not")
    return Conversation(id=str(ident), turns=parsed, where=where)


def _turn(data: object, where: str) -> Turn:
    if not isinstance(data, dict):
        raise ReplayError(f"{where} must be an object, got {_kind(data)}")
    texts = {key: _text(data[key], f"{where}.{key}") for key in _TEXT_KEYS if key in data}
    ids = {key: _token_ids(data[key], f"{where}.{key}") for key in _IDS_KEYS if key in data}
    if len(ids) == 1:
        missing = next(key for key in _IDS_KEYS if key not in ids)
        raise ReplayError(f'{where}: missing key "{missing}" (the other token ids are there)')
    if not ids and len(texts) < 2:
        missing = next(key for key in _TEXT_KEYS if key not in texts)
        raise ReplayError(f'{where}: missing key "{missing}"')
    return Turn(
        prompt=texts.get("prompt"),
        completion=texts.get("completion"),
        prompt_token_ids=ids.get("prompt_token_ids"),
        completion_token_ids=ids.get("completion_token_ids"),
    )


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ReplayError(f"{where} must be a string, got {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON may spell half of a surrogate pair, which is no text and which tokenizers refuse.
        raise ReplayError(f"{where}: lone surrogate at character {error.start + 1}") from error
    return value


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ReplayError(f"{where} must be an array of integers, got {_kind(value)}")
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ReplayError(f"{where}[{i}] must be an integer, got {_kind(token)}")
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise ReplayError(f"{where}[{i}] is {token}, outside [0, 2**31)")
    return tuple(value)


def _kind(value: object) -> str:
    """The JSON name of a value's type, as the reader of the file knows it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the number {value!r:.40}"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
