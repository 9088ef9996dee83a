"""Fills a store with the answers of logs, and saves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError
from ngram_npu.store import NgramStore, StoreFileError, scope_of, tokenizer_digest
from ngram_npu.store.file import MAGIC, describe

from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.tokenization import Tokenization, read_requests


@dataclass(frozen=True)
class LearnReport:
    """What a store contains after learning."""

    output: str
    num_answers: int
    num_tokens: int
    tokens_held: int
    capacity: int
    file_bytes: int
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def find_stores(paths: Sequence[str]) -> list[Path]:
    """Returns those paths that are files of stores."""
    stores = []
    for path in map(Path, paths):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    stores.append(path)
    return stores


def learn(
    reader: LogReader | None,
    stores: Sequence[Path],
    tokenization: Tokenization,
    output: Path,
    store_tokens: int,
) -> LearnReport:
    """Fills a store from files of stores, and then from logs in their order; None: no logs. A full
    store overwrites its oldest text.

    Raises:
        InputError: The options, the input or the output cannot be used. Nothing is written then.
    """
    try:
        store = NgramStore(store_tokens)
        for path in stores:
            loaded = NgramStore.load(path, tokenizer=store.tokenizer)
            store.tokenizer = store.tokenizer or loaded.tokenizer
            store.merge(loaded, new_only=True)
        num_answers = num_tokens = 0
        read = () if reader is None else read_requests(reader, tokenization)
        for _, conversation, requests in read:
            # The scope of a request with this salt: see ngram_npu.engines.vllm.
            scope = conversation.salt and ("cache_salt", conversation.salt)
            for request in requests:
                for start, end in request.spans():
                    store.add_text(request.tokens()[start:end], scope_of(scope))
                    num_answers += 1
                    num_tokens += end - start
        if tokenization.tokenizer is not None and tokenization.tokenizer.vocab is not None:
            digest = tokenizer_digest(tokenization.tokenizer.vocab())
            if store.tokenizer not in ("", digest):
                raise InputError(f"{stores[0]}: the store is of another tokenizer; use --tokenizer")
            store.tokenizer = digest
        if not store.statistics.tokens_held:
            raise InputError("nothing to learn: no answer of 2 or more tokens")
        store.save(output)
    except (StoreFileError, ValueError) as error:
        raise InputError(str(error)) from error
    return LearnReport(
        str(output),
        num_answers,
        num_tokens,
        store.statistics.tokens_held,
        store.capacity,
        output.stat().st_size,
        [] if reader is None else reader.list_notes(),
    )


def format_learn(report: LearnReport) -> str:
    """Returns a report as text."""
    full = report.tokens_held < report.num_tokens
    return (
        f"{report.output}: {report.num_answers} answers of {report.num_tokens} tokens were read; "
        f"the store holds {report.tokens_held} of {report.capacity} tokens, "
        f"{report.file_bytes / 1e6:.1f} MB"
        + ("\nThe store is full: its oldest text was overwritten; use --store-tokens" * full)
    )


def describe_store(path: Path) -> dict[str, Any]:
    """Returns the description of a store's file."""
    try:
        return vars(describe(path)) | {"file": str(path)}
    except StoreFileError as error:
        raise InputError(str(error)) from error


def format_store(info: dict[str, Any]) -> str:
    """Returns a description as text."""
    return "\n".join(f"{name.replace('_', ' '):12} {value}" for name, value in info.items())
