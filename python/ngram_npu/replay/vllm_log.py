"""The text log of a vLLM server (`--enable-log-requests --enable-log-outputs`), as records.

Prompts and token ids are there at level DEBUG only. Answers of `/v1/completions` are never there,
streamed ones without their token ids.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from ngram_npu.errors import RecordError

_LINE = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)(:| \d\d-\d\d \d\d:\d\d:\d\d) ")
_ASKED = re.compile(r"(?:Received request|Request) (\S+?)(?: details)?: (prompt: .*)", re.DOTALL)
_COUNTED = re.compile(r"Received request (\S+): .*?SamplingParams\(n=(\d+),", re.DOTALL)
_ANSWERED = re.compile(
    r"Generated response (\S+?)( \(streaming delta\)| \(streaming complete\))?(?: details)?: (.*)",
    re.DOTALL,
)
_TEXT = r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|None)"
_PROMPT = re.compile(rf"prompt: {_TEXT}", re.DOTALL)
_OUTPUT = re.compile(rf"output: {_TEXT}", re.DOTALL)
_IDS = re.compile(r"token_ids: [\[(]([\d, ]*)[\])]")


@dataclass
class _Request:
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """Of the answer whose text comes next."""
    answers: int = 1


class VllmLog:
    """Puts the lines of requests and responses together.

    Attributes:
        seen: whether a line was vLLM's.
    """

    def __init__(self, where: str) -> None:
        self.seen = False
        self._where = where
        self._requests: dict[str, _Request] = {}
        self._has_requests = False

    def take(self, text: str, where: str) -> list[dict[str, Any] | RecordError] | None:
        """The records that a line completes; None for a line that is not vLLM's."""
        if not self.seen and not _LINE.search(text[:200]):
            return None
        self.seen = True
        counted = _COUNTED.search(text)
        if counted is not None:
            self._requests.setdefault(counted[1], _Request()).answers = int(counted[2])
        asked = _ASKED.search(text)
        if asked is not None:
            request = self._requests.setdefault(asked[1], _Request())
            request.prompt = _literal(_PROMPT, asked[2])
            request.prompt_token_ids = _ids(asked[2])
        answered = None if asked or counted else _ANSWERED.search(text)
        self._has_requests |= bool(asked or counted or answered)
        if answered is None:
            return []
        ident, streamed, rest = answered[1], answered[2] or "", answered[3]
        request = self._requests.setdefault(ident, _Request())
        found = _ids(rest)
        if found is not None:
            before = request.token_ids if streamed else None
            request.token_ids = [*(before or []), *found]
        if "delta" in streamed or not _OUTPUT.match(rest):
            return []
        request.answers -= 1
        if request.answers == 0:
            del self._requests[ident]
        return [_record(ident, request, bool(streamed), _literal(_OUTPUT, rest), where)]

    def rest(self) -> list[dict[str, Any] | RecordError]:
        """The requests that the log has no answer of."""
        if self.seen and not self._has_requests:
            options = "--enable-log-requests --enable-log-outputs"
            return [RecordError(f"{self._where}: a server's log without requests: set {options}")]
        return [
            RecordError(
                f"{self._where}: request {ident}: the log has no answer; vLLM logs none of "
                "/v1/completions: log at the client, or with return_token_ids"
            )
            for ident in self._requests
        ]


def _record(
    ident: str, request: _Request, streamed: bool, output: str | None, where: str
) -> dict[str, Any] | RecordError:
    if request.prompt is None and request.prompt_token_ids is None:
        return RecordError(
            f"{where}: request {ident}: the log has no prompt; vLLM writes prompts and token ids "
            "at level DEBUG only: VLLM_LOGGING_LEVEL=DEBUG"
        )
    # Token ids of a stream are logged where a delta has text, so some may be missing.
    exact = request.token_ids if not streamed or request.prompt is None else None
    return {
        "id": ident,
        "request": {"prompt": request.prompt},
        "response": {
            "prompt_token_ids": request.prompt_token_ids,
            "choices": [{"text": output, "token_ids": exact}],
        },
    }


def _literal(pattern: re.Pattern[str], text: str) -> str | None:
    """A text as Python's `repr` wrote it."""
    found = pattern.match(text)
    value: str | None = None if found is None else ast.literal_eval(found[1])
    return value


def _ids(text: str) -> list[int] | None:
    found = _IDS.search(text)
    return None if found is None else [int(word) for word in found[1].split(",") if word.strip()]
