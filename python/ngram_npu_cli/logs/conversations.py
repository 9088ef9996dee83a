"""Contains recorded conversations as text and as token ids, and makes conversations from the
sources of the standard library as an example input."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError

Int32Array = npt.NDArray[np.int32]

Message = Mapping[str, Any]
"""A message for chat templates: the texts "role" and "content", and optional keys such as
"tool_calls"."""


class Turn(NamedTuple):
    """One turn: the model's input and its answer.

    A turn has either both lists of token ids, or the completion's text with a prompt or messages.
    If there are token ids, they are used.

    Attributes:
        prompt: Text for the model, including the outputs of tools.
        completion: Text of the answer; it may be empty.
        prompt_token_ids: Token ids of the whole prompt, used as they are (no template).
        completion_token_ids: Token ids of the completion, used as they are.
        messages: Instead of a prompt, the messages since the last turn (system, user, tools).
        answer: The completion as a message, if it was recorded as one.
        tools: Definitions of the tools offered to the model from this turn on.
        raw: Whether the prompt is the model's whole input, including the template.
    """

    prompt: str | None = None
    completion: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    answer: Message | None = None
    tools: tuple[Any, ...] = ()
    raw: bool = False

    @property
    def has_token_ids(self) -> bool:
        """Whether this turn needs no tokenizer."""
        return self.prompt_token_ids is not None and self.completion_token_ids is not None

    def get_messages(self) -> tuple[Message, ...]:
        """Returns the messages, or the prompt as a user message."""
        return self.messages or ({"role": "user", "content": self.prompt or ""},)


class Conversation(NamedTuple):
    """A recorded conversation: turns that share one growing context.

    Attributes:
        id: Name of the conversation in the recording; it need not be unique.
        where: File and line for error messages ("file.jsonl:3"); empty without a file.
        scope: Value of the record's scope field; None without a scope field.
    """

    id: str
    turns: tuple[Turn, ...]
    where: str = ""
    scope: str | int | None = None

    @property
    def has_token_ids(self) -> bool:
        """Whether the turns have token ids (either all turns of a conversation or none)."""
        return all(turn.has_token_ids for turn in self.turns)

    @property
    def num_characters(self) -> int:
        """Characters of all prompts and completions, with four characters per token id."""
        total = 0
        for turn in self.turns:
            total += len(turn.prompt or "") + len(turn.completion or "")
            total += sum(len(message["content"]) for message in turn.messages)
            if not turn.completion:
                ids = (turn.prompt_token_ids or (), turn.completion_token_ids or ())
                total += 4 * sum(map(len, ids))
        return total


@dataclass(frozen=True)
class TokenTurn:
    """A turn as token ids, both one-dimensional int32; either may be empty."""

    prompt: Int32Array
    completion: Int32Array


@dataclass(frozen=True)
class TokenRequest:
    """A conversation as token ids."""

    id: str
    turns: tuple[TokenTurn, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the whole context at the end of the last turn."""
        return sum(len(turn.prompt) + len(turn.completion) for turn in self.turns)

    @property
    def num_generated(self) -> int:
        """Number of tokens generated in steps."""
        return sum(end - start - 1 for start, end in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        """Returns (start, end) of every completion that takes a step, as offsets into `tokens()`.

        Prefill generates a completion's first token, so a completion of one token or none takes no
        step: it is only context for the next turns.
        """
        spans: list[tuple[int, int]] = []
        offset = 0
        for turn in self.turns:
            start = offset + len(turn.prompt)
            offset = start + len(turn.completion)
            if offset - start >= 2:
                spans.append((start, offset))
        return spans

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles all turns as one string of bytes, because many arrays take longer."""
        parts = [part for turn in self.turns for part in (turn.prompt, turn.completion)]
        data = b"".join(part.tobytes() for part in parts)
        return _split_request, (self.id, [len(part) for part in parts], data)

    def split_turns(self) -> list[TokenRequest]:
        """Returns each turn as a separate request, with all earlier turns in its prompt."""
        requests = []
        context = np.empty(0, np.int32)
        for turn in self.turns:
            prompt = np.concatenate([context, turn.prompt])
            requests.append(TokenRequest(self.id, (TokenTurn(prompt, turn.completion),)))
            context = np.concatenate([prompt, turn.completion])
        return requests

    def tokens(self) -> Int32Array:
        """Returns all turns joined, `[num_tokens]` int32."""
        parts = [part for turn in self.turns for part in (turn.prompt, turn.completion)]
        joined: Int32Array = np.concatenate([np.empty(0, np.int32), *parts])
        return joined


def _split_request(ident: str, lengths: list[int], data: bytes) -> TokenRequest:
    """Returns a request whose prompts and completions, one after the other, have these lengths."""
    tokens: Int32Array = np.frombuffer(data, np.int32).copy()  # which can be written
    ends = accumulate(lengths)
    parts = (tokens[end - length : end] for end, length in zip(ends, lengths, strict=True))
    return TokenRequest(ident, tuple(TokenTurn(prompt, next(parts)) for prompt in parts))


# The standard library is the example input, because it is on every machine with Python, and code
# contains repetitions like the output of models. The result depends only on the Python version.

STDLIB_FILES = tuple(
    """
    argparse.py ast.py asyncio/base_events.py bdb.py calendar.py cmd.py codecs.py
    collections/__init__.py concurrent/futures/_base.py configparser.py contextlib.py copy.py
    csv.py dataclasses.py difflib.py dis.py doctest.py email/message.py enum.py fileinput.py
    fractions.py ftplib.py functools.py gettext.py gzip.py heapq.py html/parser.py
    http/client.py http/cookiejar.py http/server.py imaplib.py inspect.py ipaddress.py
    json/decoder.py json/encoder.py logging/handlers.py mailbox.py mimetypes.py optparse.py
    pickle.py platform.py plistlib.py pprint.py random.py sched.py selectors.py shelve.py
    shlex.py shutil.py smtplib.py socketserver.py statistics.py subprocess.py tarfile.py
    tempfile.py textwrap.py threading.py timeit.py tokenize.py trace.py traceback.py
    unittest/case.py urllib/parse.py urllib/request.py
    """.split()  # noqa: SIM905 - sixty quoted lines would hide the list
)
"""Paths in the standard library's folder of files that all versions since Python 3.10 have."""

MAX_COMPLETION_CHARS = 12_000
"""A completion is cut at the first line end after this many characters, to limit its weight."""


def stdlib_conversations(limit: int | None = None) -> tuple[list[Conversation], list[str]]:
    """Returns the standard library's sources as conversations of one turn each, and those of
    `STDLIB_FILES` that are missing (some distributions leave modules out).

    Args:
        limit: Maximum number of conversations.

    Raises:
        InputError: All files are missing.
    """
    root = Path(sysconfig.get_path("stdlib"))
    conversations: list[Conversation] = []
    missing_files: list[str] = []
    for name in STDLIB_FILES:
        if limit is not None and len(conversations) >= limit:
            break
        try:
            # The line ends depend on how Python was installed; the result must not.
            source = (root / name).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            missing_files.append(name)
            continue
        prompt, completion = split_source(source)
        conversations.append(Conversation(name, (Turn(prompt, completion),), where=name))
    if not conversations:
        raise InputError(f"{root}: no sources of the Python standard library; pass a PATH instead")
    return conversations, missing_files


def split_source(source: str) -> tuple[str, str]:
    """Cuts a text into prompt and completion at the first line end of its second half."""
    cut = _find_line_end(source, len(source) // 2)
    return source[:cut], source[cut : _find_line_end(source, cut + MAX_COMPLETION_CHARS)]


def _find_line_end(text: str, start: int) -> int:
    """Returns the index after the first newline from `start` on, or the text's length."""
    newline = text.find("\n", start)
    return len(text) if newline < 0 else newline + 1
