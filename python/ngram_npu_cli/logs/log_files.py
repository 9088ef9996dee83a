"""The files of a replay: which they are, what is skipped of each, and which are no logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Literal

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.files import STDIN, SUFFIXES, find_files
from ngram_npu_cli.logs.formats import iter_conversations
from ngram_npu_cli.logs.records import Conversation

_REASONS_SHOWN = 3


@dataclass(frozen=True)
class Progress:
    """Progress of a replay.

    Attributes:
        name: of the input.
        phase: "read" or "tokenize" (counted in conversations), "replay" (in generated tokens) or
            "learn" (in answers).
        done, total: count so far and in all, for this input and phase; 0: not known.
    """

    name: str
    phase: Literal["read", "tokenize", "replay", "learn"]
    done: int
    total: int


def no_progress(_: Progress) -> None:
    """For who does not ask."""


@dataclass
class Skipped:
    """What was skipped of an input, and why.

    Attributes:
        what: is counted, in the plural.
        path: of the file, with which reasons begin.
        strict: whether one is an error.
        number: of them.
        reasons: one of each kind, with file and line.
    """

    what: str
    path: str = ""
    strict: bool = False
    number: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, error: InputError) -> None:
        """Count one; with `strict` its error is raised."""
        if self.strict:
            raise error
        self.number += 1
        # Equal reasons differ in the line: "talk.jsonl:7: not JSON ..."
        kind = str(error).removeprefix(self.path).partition(": ")[2]
        if kind not in self.reasons and len(self.reasons) < _REASONS_SHOWN:
            self.reasons[kind] = str(error)

    def check(self, used: int) -> None:
        """Raises RecordError if more were skipped than used."""
        if self.number > used:
            first = next(iter(self.reasons.values()))
            raise RecordError(f"{first}; {self._share(used)}, which is more than half")

    def notes(self, used: int) -> tuple[str, ...]:
        """How many were skipped, which share that is, and the first three reasons."""
        if not self.number:
            return ()
        reasons = [reason.partition("; read as ")[0] for reason in self.reasons.values()]
        shown = "; ".join(f"{reason:.160}" for reason in reasons)
        return (f"{self._share(used)}: {shown}",)

    def _share(self, used: int) -> str:
        total = self.number + used
        share = self.number / total
        return f"{self.number} of {total} {self.what} are skipped ({share:.1%})"


@dataclass
class LogFile:
    """A file to read, once.

    Attributes:
        name: in the table.
        path: of the file.
        in_folder: whether it was found in a folder, which may have other files, and not named.
        strict: whether a record that is not a conversation is an error.
        scope_field: as for `iter_conversations`.
        found: records that were, so far.
        skipped: records that were not conversations.
    """

    name: str
    path: Path
    in_folder: bool
    strict: bool
    scope_field: str | None = None
    found: int = 0
    skipped: Skipped = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = Skipped("records", str(self.path), self.strict)

    def conversations(
        self,
        limit: int | None,
        format_name: str | None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[Conversation]:
        """Read them, at most `limit`.

        Raises:
            RecordError: more than half of the file, or all of it, is not conversations.
            InputError: the file cannot be read; with `strict`, one record is not a conversation.
        """
        last = None
        skip = self.skipped.add
        read = islice(iter_conversations(self.path, format_name, skip, self.scope_field), limit)
        for number, conversation in enumerate(read, start=1):
            if progress is not None:
                progress(Progress(self.name, "read", number, 0))
            self.found += conversation.where != last  # a record may have several answers
            last = conversation.where
            yield conversation
        self.skipped.check(self.found)
        if not self.found:
            raise RecordError(f"{self.path}: empty, no conversation in this file")

    @property
    def notes(self) -> tuple[str, ...]:
        """What was skipped of it."""
        return self.skipped.notes(self.found)

    def reason_to_leave_out(self, error: RecordError) -> str:
        """Why a file of a folder is no log; any other file's error is raised."""
        if self.strict or not self.in_folder or self.found > self.skipped.number:
            raise error
        return f"no log, left out: {str(error).partition('; read as ')[0]:.240}"


def log_files(
    paths: Sequence[str | PathLike[str]], strict: bool = False, scope_field: str | None = None
) -> list[LogFile]:
    """The files of `paths`, each with its name in the table.

    Raises:
        InputError: a path does not exist, or a folder has no replay files.
    """
    files = [(file, file != Path(path)) for path in paths for file in find_files(Path(path))]
    names = [_short_name(file) for file, _ in files]
    seen = Counter(names)
    # Files of the same name in different folders get different names in the table.
    return [
        LogFile(str(file) if seen[name] > 1 else name, file, in_folder, strict, scope_field)
        for name, (file, in_folder) in zip(names, files, strict=True)
    ]


def _short_name(file: Path) -> str:
    if file == STDIN:
        return "stdin"
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if file.name.endswith(suffix):
            return file.name[: -len(suffix)]
    return file.name
