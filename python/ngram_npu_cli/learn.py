"""Fills a store with the answers of logs, and saves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError
from ngram_npu.store import NgramStore, scope_of_request, tokenizer_digest

from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.tokenization import Tokenization, read_requests


@dataclass(frozen=True)
class LearnReport:
    """What was read, and what the store holds. Without a salt field, `num_salts` is 0."""

    output: str
    salt_field: str | None
    num_salts: int
    num_answers: int
    num_tokens: int
    tokens_held: int
    capacity: int
    file_bytes: int
    notes: list[str]
    is_complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def learn(
    reader: LogReader, tokenization: Tokenization, output: Path, store_tokens: int
) -> LearnReport:
    """Fills a store from logs in their order. A full store overwrites its oldest text.

    Raises:
        InputError: The options, the input or the output cannot be used. Nothing is written then.
    """
    try:
        store = NgramStore(store_tokens)
    except ValueError as error:
        raise InputError(str(error)) from error
    num_answers = num_tokens = 0
    salts = set()
    for conversation, requests in read_requests(reader, tokenization):
        scope = scope_of_request(conversation.salt)
        for request in requests:
            tokens = request.tokens()
            for start, end in request.spans():
                store.add_text(tokens[start:end], scope)
                salts.add(conversation.salt)
                num_answers += 1
                num_tokens += end - start
    if not num_answers:
        raise InputError("nothing to learn: no answer of 2 or more tokens")
    if tokenization.tokenizer is not None and tokenization.tokenizer.vocab is not None:
        store.tokenizer = tokenizer_digest(tokenization.tokenizer.vocab())
    store.save(output)
    return LearnReport(
        str(output),
        reader.salt_field,
        len(salts - {None}),
        num_answers,
        num_tokens,
        store.statistics.tokens_held,
        store.capacity,
        output.stat().st_size,
        reader.list_notes(),
    )


def format_learn(report: LearnReport) -> str:
    """Returns a report as text."""
    readers = 'requests without a salt: the server needs "scope": "shared"'
    if report.salt_field is not None:
        plural = "" if report.num_salts == 1 else "s"
        readers = f"{report.num_salts} salt{plural} (field {report.salt_field})"
    text = (
        f"{report.output}: {report.num_answers} answers with {report.num_tokens} tokens, for "
        f"{readers}\nThe store holds {report.tokens_held} of at most {report.capacity} tokens in "
        f"{report.file_bytes / 1e6:.1f} MB."
    )
    if report.tokens_held < report.num_tokens:
        text += (
            "\nThe store is full (each text takes at least 256 tokens): its oldest text was "
            "overwritten; raise --store-tokens, and store_tokens of the server."
        )
    return text
