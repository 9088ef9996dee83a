"""Replays recorded conversations, to measure drafting on real input.

The recorded completion takes the place of the target model's output, so no model is needed: a step
drafts, accepts the leading drafts that equal the recording, and yields one token more.

Functions of this package do not print: results are data classes, and progress is reported to a
callback.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from ngram_npu.errors import InputError

from ngram_npu_cli.logs.conversations import (
    Conversation,
    TokenRequest,
    TokenTurn,
    Turn,
    stdlib_conversations,
)
from ngram_npu_cli.logs.reader import (
    Progress,
    ignore_progress,
    keep_conversation,
    read_logs,
    read_requests,
)
from ngram_npu_cli.logs.tokenization import IDS_ONLY, Tokenization, TokenizedConversation
from ngram_npu_cli.logs.tokenizers import ReplayTokenizer, load_tokenizer
from ngram_npu_cli.options import CONFIG_FIELDS, ReadingOptions, ReplayOptions
from ngram_npu_cli.replay.replay_report import ReplayFigures, ReplayReport, format_table
from ngram_npu_cli.replay.simulation import Proposer, simulate
from ngram_npu_cli.report import Run

__all__ = [
    "Conversation",
    "InputError",
    "Progress",
    "Proposer",
    "ReplayFigures",
    "ReplayInput",
    "ReplayOptions",
    "ReplayReport",
    "ReplayTokenizer",
    "TokenRequest",
    "TokenTurn",
    "Turn",
    "format_table",
    "load_inputs",
    "load_tokenizer",
    "replay",
    "simulate",
    "stdlib_conversations",
    "tokenize",
]


@dataclass(frozen=True)
class ReplayInput:
    """A named list of conversations. `notes` are copied to the figures of the input."""

    name: str
    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...] = ()


def load_inputs(
    paths: Sequence[str | PathLike[str]],
    options: ReadingOptions | None = None,
    progress: Callable[[Progress], None] = ignore_progress,
) -> tuple[ReplayInput, ...]:
    """Reads files and folders as `read_logs` does; `notes` report what was skipped or left out."""
    conversations: dict[int, list[Conversation]] = {}

    def receive(number: int, conversation: Conversation) -> None:
        conversations.setdefault(number, []).append(conversation)

    inputs, omissions = read_logs(
        paths,
        options or ReadingOptions(),
        receive,
        convert=keep_conversation,
        progress=progress,
    )
    loaded = [
        ReplayInput(log.name, tuple(conversations[number]), log.notes)
        for number, log in enumerate(inputs)
    ]
    loaded[0] = replace(loaded[0], notes=(*loaded[0].notes, *omissions))
    return tuple(loaded)


def replay(
    paths: Sequence[str | PathLike[str]] = (),
    options: ReplayOptions | None = None,
    *,
    tokenizer: ReplayTokenizer | None = None,
    make_proposer: Callable[[ReplayOptions], Proposer] | None = None,
    progress: Callable[[Progress], None] = ignore_progress,
    command: str = "",
) -> ReplayReport:
    """Replays recorded conversations and reports the results of drafting.

    All files are read before the replay starts, so that a malformed file is reported early.

    Args:
        paths: Files and folders; empty for the standard library's sources.
        options: See `ReplayOptions`; `make_proposer` gets them with the defaults filled in.
        tokenizer: Tokenizer to use instead of `options.tokenizer`.
        make_proposer: Makes the proposer of each input; default: `NgramProposer` as configured.
        progress: Called often; must return quickly. The time of the calls is not counted.
        command: Command line to show in the report.

    Raises:
        InputError: Options, input, tokenizer or proposer cannot be used; the message names the
            reason.
    """
    options = options or ReplayOptions()
    config = options.config()
    options = replace(options, **{name: getattr(config, name) for name in CONFIG_FIELDS})
    batch_size = options.batch_size or (32 if config.store is None else 1)
    minimum = 1024 * batch_size
    if config.store is not None and config.store_tokens < minimum:
        raise InputError(
            f"store_tokens: expected at least {minimum}, 1024 per conversation of the batch, got "
            f"{config.store_tokens}"
        )
    make_proposer = make_proposer or _make_ngram_proposer
    run = Run(command)
    # A wrong option is reported before any work, and the time to load libraries and to start
    # threads is not measured.
    _warm_up(make_proposer(options))
    tokenization = Tokenization(options.tokenizer, options.chat_template, tokenizer)
    figures: list[ReplayFigures] = []
    for item in _read_inputs(paths, options, tokenization, progress):
        requests = item.requests
        if options.generated_only:
            requests = [turn for request in requests for turn in request.split_turns()]
        counts = simulate(
            item.name,
            requests,
            make_proposer(options),
            k=config.k,
            batch_size=batch_size,
            padded=options.drafts == "padded",
            progress=progress,
        )
        figures.append(replace(counts, notes=item.notes))
    return ReplayReport(
        **run.describe(),
        config={
            **{name: getattr(config, name) for name in CONFIG_FIELDS},
            "costs": None if options.costs is None else str(options.costs),
            "drafts": options.drafts,
            "generated_only": options.generated_only,
        },
        batch_size=batch_size,
        limit=options.limit,
        tokenizer=_describe_tokenizer(tokenization, bool(paths)),
        inputs=tuple(figures),
    )


def _describe_tokenizer(tokenization: Tokenization, has_paths: bool) -> dict[str, Any] | None:
    tokenizer = tokenization.tokenizer
    if tokenizer is None or not tokenization.is_needed:
        return None
    description = {name: getattr(tokenizer, name) for name in ("name", "source", "vocab_size")}
    # The standard library is only an example, so its default tokenizer needs no warning.
    return description | ({"chosen": False} if tokenization.is_guessed and has_paths else {})


def tokenize(item: ReplayInput, tokenizer: ReplayTokenizer | None) -> list[TokenRequest]:
    """Converts one input's conversations to token ids, each prompt in its chat template.

    Raises:
        InputError: A turn has no token ids and there is no tokenizer, or the template rejects a
            conversation; the message names file and line.
    """
    tokenization = Tokenization(IDS_ONLY, tokenizer=tokenizer)
    return [r for c in item.conversations for r in tokenization.make_requests(c)]


class _TokenizedInput(NamedTuple):
    """A named list of requests. `notes` are copied to the figures of the input."""

    name: str
    requests: list[TokenRequest]
    notes: tuple[str, ...]


def _read_inputs(
    paths: Sequence[str | PathLike[str]],
    options: ReplayOptions,
    tokenization: Tokenization,
    progress: Callable[[Progress], None],
) -> list[_TokenizedInput]:
    """Reads and tokenizes files and folders."""
    requests: defaultdict[int, list[TokenRequest]] = defaultdict(list)

    def receive(number: int, conversation: TokenizedConversation) -> None:
        requests[number] += conversation.requests

    logs, omissions = read_requests(paths, options, tokenization, receive, progress=progress)
    inputs = [
        _TokenizedInput(log.name, requests[number], log.notes) for number, log in enumerate(logs)
    ]
    return [inputs[0]._replace(notes=(*inputs[0].notes, *omissions)), *inputs[1:]]


def _make_ngram_proposer(options: ReplayOptions) -> Proposer:
    from ngram_npu.proposer import NgramProposer

    config = options.config()
    try:
        # Most rows are so long that an index is faster than a scan. The drafts are the same.
        return NgramProposer(config, "index" if config.fits_index else "scan")
    except ValueError as error:
        raise InputError(str(error)) from error


def _warm_up(proposer: Proposer) -> None:
    """Makes one step of one request on a temporary buffer."""
    token_ids = np.zeros((1, 8), np.int32)
    proposer.step(token_ids, np.full(1, 4, np.int32), np.zeros((1, 1), np.int32), advance=True)
