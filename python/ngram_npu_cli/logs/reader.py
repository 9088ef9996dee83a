"""Reads conversations from files and folders, and converts them to requests of token ids.

replay, tune and learn read their input with `read_logs` and convert it with a `Tokenization`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from ngram_npu.errors import InputError, RecordError, to_one_line

from ngram_npu_cli.logs.answers import check_text
from ngram_npu_cli.logs.chat_template import ChatTemplate, load_chat_template, render_turns
from ngram_npu_cli.logs.conversations import (
    Conversation,
    TokenRequest,
    TokenTurn,
    stdlib_conversations,
)
from ngram_npu_cli.logs.files import STDIN, SUFFIXES, find_files
from ngram_npu_cli.logs.formats import iter_conversations
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER, ReplayTokenizer, load_tokenizer
from ngram_npu_cli.options import ReadingOptions

IDS_ONLY = "ids"
"""Value of --tokenizer for no tokenizer: only conversations with token ids are read."""

STDLIB_NAME = "python-stdlib"

_MAX_REASONS = 3
_FORMAT_NOTE = "; read as "  # formats.py appends it and the detected format to messages


@dataclass(frozen=True)
class Progress:
    """Progress of a command in one phase of an input. `total` is 0 if it is not known.

    `done` and `total` count conversations in the phases "read" and "tokenize", generated tokens in
    "replay", and answers in "learn".
    """

    name: str
    phase: Literal["read", "tokenize", "replay", "learn"]
    done: int
    total: int


ShowProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """Does nothing; used if no callback is passed."""


@dataclass
class Skipped:
    """Counts the skipped items of an input, and keeps the reasons.

    Attributes:
        items: Plural name of the counted items.
        path: Path of the file, with which reasons begin.
        strict: Whether a skipped item is an error.
        used: Number of items that were not skipped.
        number: Number of skipped items.
        reasons: One message for each different error, with file and line.
    """

    items: str
    path: str = ""
    strict: bool = False
    used: int = 0
    number: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, error: InputError) -> None:
        """Counts a skipped item; raises its error if `strict`."""
        if self.strict:
            raise error
        self.number += 1
        # Messages begin with file and line, which are not compared: "chat.jsonl:7: not JSON ..."
        reason = str(error).removeprefix(self.path).partition(": ")[2]
        if reason not in self.reasons and len(self.reasons) < _MAX_REASONS:
            self.reasons[reason] = str(error)

    def list_notes(self) -> tuple[str, ...]:
        """Returns the number, the share and three reasons; empty if nothing was skipped.

        Raises:
            RecordError: More items were skipped than used.
        """
        if not self.number:
            return ()
        total = self.number + self.used
        share = f"{self.number} of {total} {self.items} are skipped ({self.number / total:.1%})"
        if self.number > self.used:
            first = next(iter(self.reasons.values()))
            raise RecordError(f"{first}; {share}, which is more than half")
        reasons = [reason.partition(_FORMAT_NOTE)[0] for reason in self.reasons.values()]
        return (f"{share}: {'; '.join(f'{reason:.160}' for reason in reasons)}",)


class InputLog(NamedTuple):
    """An input that was read completely: its short name for tables, and notes about skipped
    records."""

    name: str
    notes: tuple[str, ...]


def read_logs(
    paths: Sequence[str | PathLike[str]],
    options: ReadingOptions,
    receive: Callable[[int, Conversation], None],
    *,
    scope_field: str | None = None,
    progress: ShowProgress = ignore_progress,
) -> tuple[list[InputLog], list[str]]:
    """Reads all conversations of files and folders; without a path, the standard library's sources.

    Records that are not conversations are skipped.

    Args:
        paths: Files and folders.
        options: Options for reading.
        receive: Called with the number of the input and each of its conversations.
        scope_field: Field of each record that contains the scope; dots separate nested keys.
        progress: Called after each conversation.

    Returns:
        The inputs, and the reasons why files of folders were skipped.

    Raises:
        InputError: A file or folder is missing, not readable or empty, or more than half of the
            records of a file are not conversations.
    """
    if not paths:
        if scope_field is not None:
            raise InputError("scope_field: expected none for the standard library's sources")
        conversations, missing = stdlib_conversations(options.limit)
        for conversation in conversations:
            receive(0, conversation)
        notes: tuple[str, ...] = (f"{len(missing)} modules are not installed: {' '.join(missing)}",)
        return [InputLog(STDLIB_NAME, notes if missing else ())], []
    files = [(file, file != Path(path)) for path in paths for file in find_files(Path(path))]
    name_counts = Counter(_shorten(file) for file, _ in files)
    inputs: list[InputLog] = []
    omissions: list[str] = []
    for file, is_in_folder in files:
        # Files of the same name in different folders get different names in tables.
        name = str(file) if name_counts[_shorten(file)] > 1 else _shorten(file)
        skipped = Skipped("records", str(file), options.strict)
        previous = None
        records = iter_conversations(file, options.format, skipped.add, scope_field)
        try:
            for num_read, conversation in enumerate(islice(records, options.limit), start=1):
                progress(Progress(name, "read", num_read, 0))
                skipped.used += conversation.where != previous  # a record may have several answers
                previous = conversation.where
                receive(len(inputs), conversation)
            notes = skipped.list_notes()
            if not skipped.used:
                raise RecordError(f"{file}: empty, no conversation in this file")
        except RecordError as error:
            if options.strict or not is_in_folder or skipped.used:
                raise  # a file found in a folder is left out only if it has no conversation
            omissions.append(f"not a log, skipped: {str(error).partition(_FORMAT_NOTE)[0]:.240}")
        else:
            inputs.append(InputLog(name, notes))
    if not inputs and omissions:
        raise InputError(omissions[0])
    return inputs, omissions


def _shorten(file: Path) -> str:
    if file == STDIN:
        return "stdin"
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if file.name.endswith(suffix):
            return file.name[: -len(suffix)]
    return file.name


class Tokenization:
    """Converts conversations to requests of token ids.

    Attributes:
        tokenizer: The tokenizer; None until `load` or the first text loads it.
        is_guessed: Whether the default tokenizer was loaded because none was chosen.
    """

    def __init__(
        self,
        name: str | None = None,
        chat_template: str = "auto",
        tokenizer: ReplayTokenizer | None = None,
    ) -> None:
        self.tokenizer: ReplayTokenizer | None = None
        self.is_guessed = False
        self._name = name
        self._chat_template = chat_template
        self._template: ChatTemplate | None = None
        if tokenizer is not None:
            self._set_tokenizer(tokenizer)

    @property
    def digest(self) -> str:
        """Digest of the tokenizer's vocabulary; empty if the tokenizer is not loaded."""
        return "" if self.tokenizer is None else self.tokenizer.digest

    def load(self) -> None:
        """Loads the tokenizer, unless only token ids are accepted.

        Raises:
            InputError: There is no such tokenizer, or its chat template cannot be read.
        """
        if self.tokenizer is None and self._name != IDS_ONLY:
            self.is_guessed = self._name is None
            self._set_tokenizer(load_tokenizer(self._name or DEFAULT_TOKENIZER))

    def _set_tokenizer(self, tokenizer: ReplayTokenizer) -> None:
        self.tokenizer = tokenizer
        if self._chat_template == "auto" and tokenizer.folder is not None:
            self._template = load_chat_template(tokenizer.folder)

    def make_requests(self, conversation: Conversation) -> list[TokenRequest]:
        """Returns one request, or several if the template changes earlier turns.

        Raises:
            RecordError: The template rejects the conversation, or a text has no tokenizer.
        """
        if conversation.has_token_ids:
            turns = conversation.turns
            ids = [(t.prompt_token_ids or (), t.completion_token_ids or ()) for t in turns]
            return [_make_request(conversation.id, ids)]
        self.load()
        if self.tokenizer is None:
            raise RecordError(f'{conversation.where}: missing key "prompt_token_ids"')
        # Prompt and answer are tokenized separately, because a token that the model generates
        # never contains text of the prompt.
        encode = self.tokenizer.encode
        return [
            _make_request(conversation.id, ((encode(p), encode(c)) for p, c in turns))
            for turns in self._render(conversation)
        ]

    def make_requests_or_skip(
        self, conversation: Conversation, skipped: Skipped
    ) -> list[TokenRequest]:
        """Returns the requests; none if the conversation is rejected, which `skipped` counts."""
        try:
            requests = self.make_requests(conversation)
        except RecordError as error:
            skipped.add(error)
            return []
        skipped.used += 1
        return requests

    def _render(self, conversation: Conversation) -> list[list[tuple[str, str]]]:
        """Returns the texts of the requests, which a tokenizer accepts."""
        try:
            as_is = self._chat_template == "none"
            requests = render_turns(conversation, self._template, as_is=as_is)
            for text in chain.from_iterable(chain.from_iterable(requests)):
                check_text(text, "the text in its template")
        except (InputError, RecursionError) as error:
            raise RecordError(f"{conversation.where}: {to_one_line(error)}") from error
        return requests


def _make_request(ident: str, turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> TokenRequest:
    pairs = [(np.asarray(prompt, np.int32), np.asarray(c, np.int32)) for prompt, c in turns]
    return TokenRequest(ident, tuple(TokenTurn(prompt, completion) for prompt, completion in pairs))
