"""The embedded default input: sources of the Python standard library.

They are on every machine that runs Python, and code repeats itself like the output of real models.
Each module is one conversation: its first half is the prompt, the rest the completion. The result
depends only on the Python version.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from ngram_npu.errors import InputError

from ngram_npu_cli.logs.records import Conversation, Turn

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
"""Paths in the standard library's folder; each is one file in all versions since Python 3.10."""

MAX_COMPLETION_CHARS = 12_000
"""Completions are cut at the first line end after this length, so that no file dominates."""


def stdlib_conversations(
    folder: Path | None = None, limit: int | None = None
) -> tuple[list[Conversation], list[str]]:
    """The standard library's sources as conversations of one turn each.

    Args:
        folder: folder of the sources; None for that of the running Python.
        limit: at most this many.

    Returns:
        The conversations in the order of `STDLIB_FILES`, and the listed files that are missing
        (some distributions leave modules out).

    Raises:
        InputError: all files are missing.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    conversations: list[Conversation] = []
    missing: list[str] = []
    for name in STDLIB_FILES:
        if limit is not None and len(conversations) >= limit:
            break
        try:
            # The line ends depend on how Python was installed; the result must not.
            source = (root / name).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            missing.append(name)
            continue
        prompt, completion = split_source(source)
        conversations.append(Conversation(name, (Turn(prompt, completion),), where=name))
    if not conversations:
        raise InputError(f"{root}: no sources of the Python standard library; give a replay file")
    return conversations, missing


def split_source(source: str) -> tuple[str, str]:
    """Cut a text into prompt and completion at the first line end of its second half."""
    cut = _line_end(source, len(source) // 2)
    return source[:cut], source[cut : _line_end(source, cut + MAX_COMPLETION_CHARS)]


def _line_end(text: str, at: int) -> int:
    """The index after the first newline from `at` on; the text's length if there is none."""
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1
