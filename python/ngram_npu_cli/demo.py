"""Makes conversations from sources of Python's standard library, as an example input.

They are on every machine with Python, and code repeats itself like the output of models. The result
depends only on the Python version.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from ngram_npu.errors import InputError

from ngram_npu_cli.logs.values import Conversation, Turn

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

_MAX_ANSWER_CHARACTERS = 12_000
"""An answer is cut at the first line end after this many characters, to limit its weight."""


def list_demo_conversations() -> list[Conversation]:
    """Returns a conversation of one turn for each source: its first half is the prompt.

    Raises:
        InputError: All sources are missing. Some distributions leave some out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    conversations = []
    for name in STDLIB_FILES:
        try:
            # The line ends depend on how Python was installed; the result must not.
            source = (root / name).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            continue
        cut = _find_line_end(source, len(source) // 2)
        answer = source[cut : _find_line_end(source, cut + _MAX_ANSWER_CHARACTERS)]
        messages = ({"role": "user", "content": source[:cut]},)
        turn = Turn(messages, {"role": "assistant", "content": answer})
        conversations.append(Conversation((turn,), name))
    if not conversations:
        raise InputError(f"{root}: no sources of the Python standard library; pass a PATH instead")
    return conversations


def _find_line_end(text: str, start: int) -> int:
    """Returns the index after the first newline from `start` on, or the text's length."""
    newline = text.find("\n", start)
    return len(text) if newline < 0 else newline + 1
