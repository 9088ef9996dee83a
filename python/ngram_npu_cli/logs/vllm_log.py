"""Converts the text log of a vLLM server (`--enable-log-requests --enable-log-outputs`) to records.

vLLM logs prompts and token ids at level DEBUG only, answers of `/v1/completions` never, and token
ids of streamed answers only in part.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from ngram_npu.errors import RecordError, one_line

_LINE = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)(:| \d\d-\d\d \d\d:\d\d:\d\d) ")
# Each pattern is matched at its position only, because a text may contain lines of a log.
_LOCATION = re.compile(r"\S*:\d+\] ")
_REQUEST_PROMPT = re.compile(r"(?:Received request|Request) (\S+?)(?: details)?: (?=prompt: )")
_REQUEST_PARAMS = re.compile(r"Received request (\S+?): ")
_ANSWER = re.compile(
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
    token_ids: list[int] | None = None  # of the answer with the next text
    num_answers: int = 1
    answered: int = 0
    is_ambiguous: bool = False  # two requests have this id, so answers cannot be assigned


def is_vllm_line(text: str) -> bool:
    return _LINE.search(text[:200]) is not None


class VllmLog:
    """Combines the lines of requests and responses to records."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._requests: dict[str, _Request] = {}
        self._has_requests = False

    def add_line(self, text: str, where: str) -> list[dict[str, Any] | RecordError]:
        """Returns the records that a line completes."""
        level = _LINE.search(text[:200])
        location = None if level is None else _LOCATION.match(text, level.end())
        if location is None:
            return []
        try:
            return self._parse_message(text.rstrip("\r\n"), location.end(), where)
        except (ValueError, SyntaxError) as error:
            return [RecordError(f"{where}: not a line of vLLM's log: {one_line(error):.100}")]

    def _parse_message(
        self, text: str, start: int, where: str
    ) -> list[dict[str, Any] | RecordError]:
        with_prompt = _REQUEST_PROMPT.match(text, start)
        received = with_prompt or _REQUEST_PARAMS.match(text, start)
        if received is not None:
            self._has_requests = True
            request = self._requests.setdefault(received[1], _Request(where))
            end = received.end()
            if with_prompt is not None:
                request.is_ambiguous |= request.prompt is not None or bool(request.prompt_token_ids)
                request.prompt, end = _parse_literal(_PROMPT, text, end)
                request.prompt_token_ids = _parse_ids(text, end)
            number = _N.search(text, end)
            if number is not None:
                request.num_answers = int(number[1])
            return []
        answer = _ANSWER.match(text, start)
        if answer is None:
            return []
        self._has_requests = True
        ident, stream_kind = answer[1], answer[2] or ""
        request = self._requests.setdefault(ident, _Request(where))
        output, end = _parse_literal(_OUTPUT, text, answer.end())
        token_ids = _parse_ids(text, end)
        if token_ids is not None:
            earlier = request.token_ids if stream_kind else None
            request.token_ids = [*(earlier or []), *token_ids]
        if "delta" in stream_kind or end == answer.end():
            return []
        record = _make_record(ident, request, bool(stream_kind), output, where)
        request.token_ids = None  # the next answer has its own token ids
        request.answered += 1
        if request.answered >= request.num_answers and not request.is_ambiguous:
            del self._requests[ident]
        return [record]

    def finish(self) -> list[dict[str, Any] | RecordError]:
        """Returns errors for the requests without an answer in the log."""
        if not self._has_requests:
            options = "--enable-log-requests --enable-log-outputs"
            return [RecordError(f"{self._where}: a server's log without requests: set {options}")]
        return [
            RecordError(
                f"{request.where}: request {ident}: the log has no answer; vLLM logs none of "
                "/v1/completions: log at the client, or with return_token_ids"
            )
            for ident, request in self._requests.items()
            if not (request.is_ambiguous and request.answered)
        ]


def _make_record(
    ident: str, request: _Request, is_streamed: bool, output: str | None, where: str
) -> dict[str, Any] | RecordError:
    if request.is_ambiguous:
        return RecordError(f"{where}: request {ident}: the log has several requests of this id")
    if request.prompt is None and request.prompt_token_ids is None:
        return RecordError(
            f"{where}: request {ident}: the log has no prompt; vLLM writes prompts and token ids "
            "at level DEBUG only: VLLM_LOGGING_LEVEL=DEBUG"
        )
    # Token ids of a stream are logged only with text, so some may be missing, and those of several
    # answers are mixed.
    is_exact = not is_streamed or (request.prompt is None and request.num_answers == 1)
    return {
        "id": ident,
        "request": {"prompt": request.prompt},
        "response": {
            "prompt_token_ids": request.prompt_token_ids,
            "choices": [{"text": output, "token_ids": request.token_ids if is_exact else None}],
        },
    }


def _parse_literal(pattern: re.Pattern[str], text: str, start: int) -> tuple[str | None, int]:
    """Returns a text that Python's `repr` wrote, or None, and its end position."""
    match = pattern.match(text, start)
    if match is None:
        return None, start
    value: str | None = ast.literal_eval(match[1])
    return value, match.end()


def _parse_ids(text: str, start: int) -> list[int] | None:
    match = _IDS.search(text, start)
    return None if match is None else [int(word) for word in match[1].split(",") if word.strip()]
