"""The text log of a vLLM server (`--enable-log-requests --enable-log-outputs`), as records.

Prompts and token ids are there at level DEBUG only. Answers of `/v1/completions` are never there,
streamed ones without their token ids.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from ngram_npu.errors import RecordError, one_line

_LINE = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)(:| \d\d-\d\d \d\d:\d\d:\d\d) ")
# Each is matched where it must be: a text may contain all that a log has.
_PLACE = re.compile(r"\S*:\d+\] ")
_ASKED = re.compile(r"(?:Received request|Request) (\S+?)(?: details)?: (?=prompt: )")
_COUNTED = re.compile(r"Received request (\S+?): ")
_ANSWERED = re.compile(
    r"Generated response (\S+?)( \(streaming delta\)| \(streaming complete\))?(?: details)?: "
)
_TEXT = r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|None)"
_PROMPT = re.compile(rf"prompt: {_TEXT}(?=, |$)", re.DOTALL)
_OUTPUT = re.compile(rf"output: {_TEXT}(?=, |$)", re.DOTALL)
_IDS = re.compile(r"token_ids: [\[(]([\d, ]*)[\])]")
_N = re.compile(r"SamplingParams\(n=(\d{1,9}),")


@dataclass
class _Request:
    where: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """Of the answer whose text comes next."""
    number: int = 1
    """Of answers."""
    answered: int = 0
    is_reused: bool = False
    """Whether two requests have this id, so that nobody knows whose the answers are."""


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
        begun = _LINE.search(text[:200])
        if begun is None and not self.seen:
            return None
        self.seen = True
        place = None if begun is None else _PLACE.match(text, begun.end())
        if place is None:
            return []
        try:
            return self._take(text.rstrip("\r\n"), place.end(), where)
        except (ValueError, SyntaxError) as error:
            return [RecordError(f"{where}: not a line of vLLM's log: {one_line(error):.100}")]

    def _take(self, text: str, at: int, where: str) -> list[dict[str, Any] | RecordError]:
        asked = _ASKED.match(text, at)
        received = asked or _COUNTED.match(text, at)
        if received is not None:
            self._has_requests = True
            request = self._requests.setdefault(received[1], _Request(where))
            at = received.end()
            if asked is not None:
                request.is_reused |= request.prompt is not None or bool(request.prompt_token_ids)
                request.prompt, at = _literal(_PROMPT, text, at)
                request.prompt_token_ids = _ids(text, at)
            counted = _N.search(text, at)
            if counted is not None:
                request.number = int(counted[1])
            return []
        answered = _ANSWERED.match(text, at)
        if answered is None:
            return []
        self._has_requests = True
        ident, streamed, at = answered[1], answered[2] or "", answered.end()
        request = self._requests.setdefault(ident, _Request(where))
        said, end = _literal(_OUTPUT, text, at)
        found = _ids(text, end)
        if found is not None:
            before = request.token_ids if streamed else None
            request.token_ids = [*(before or []), *found]
        if "delta" in streamed or end == at:
            return []
        made = _record(ident, request, bool(streamed), said, where)
        request.token_ids = None  # the next answer has its own
        request.answered += 1
        if request.answered >= request.number and not request.is_reused:
            del self._requests[ident]
        return [made]

    def rest(self) -> list[dict[str, Any] | RecordError]:
        """The requests that the log has no answer of."""
        if self.seen and not self._has_requests:
            options = "--enable-log-requests --enable-log-outputs"
            return [RecordError(f"{self._where}: a server's log without requests: set {options}")]
        return [
            RecordError(
                f"{request.where}: request {ident}: the log has no answer; vLLM logs none of "
                "/v1/completions: log at the client, or with return_token_ids"
            )
            for ident, request in self._requests.items()
            if not (request.is_reused and request.answered)
        ]


def _record(
    ident: str, request: _Request, streamed: bool, output: str | None, where: str
) -> dict[str, Any] | RecordError:
    if request.is_reused:
        return RecordError(f"{where}: request {ident}: the log has several requests of this id")
    if request.prompt is None and request.prompt_token_ids is None:
        return RecordError(
            f"{where}: request {ident}: the log has no prompt; vLLM writes prompts and token ids "
            "at level DEBUG only: VLLM_LOGGING_LEVEL=DEBUG"
        )
    # Token ids of a stream are logged where a delta has text, so some may be missing, and those of
    # several answers are mixed.
    exact = (
        None
        if streamed and (request.prompt is not None or request.number > 1)
        else (request.token_ids)
    )
    return {
        "id": ident,
        "request": {"prompt": request.prompt},
        "response": {
            "prompt_token_ids": request.prompt_token_ids,
            "choices": [{"text": output, "token_ids": exact}],
        },
    }


def _literal(pattern: re.Pattern[str], text: str, at: int) -> tuple[str | None, int]:
    """A text as Python's `repr` wrote it, and where it ends; None if there is none."""
    found = pattern.match(text, at)
    if found is None:
        return None, at
    value: str | None = ast.literal_eval(found[1])
    return value, found.end()


def _ids(text: str, at: int) -> list[int] | None:
    found = _IDS.search(text, at)
    return None if found is None else [int(word) for word in found[1].split(",") if word.strip()]
