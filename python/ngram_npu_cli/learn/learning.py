"""From logs to a file of a store and a report of what it would bring."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ngram_npu.config import NgramConfig
from ngram_npu.errors import InputError
from ngram_npu.store import BLOCK_TOKENS, NgramStore

from ngram_npu_cli.learn import stores
from ngram_npu_cli.learn.curve import MOST_TOKENS, Point, Replayed, holding, needed, split
from ngram_npu_cli.learn.fit_draft_costs import compare, fit
from ngram_npu_cli.learn.learn_report import LearnReport
from ngram_npu_cli.learn.reading import RECENT_TOKENS, Heard, LearnOptions, Tokenizing, read_logs
from ngram_npu_cli.logs.log_files import Progress, no_progress
from ngram_npu_cli.logs.stdlib_corpus import stdlib_conversations
from ngram_npu_cli.replay.environment import machine, versions
from ngram_npu_cli.replay.replay_report import TOKENIZER_WARNING

FEW = 20
"""Conversations; of fewer, the figures depend on chance."""


def learn(
    paths: Sequence[str | PathLike[str]] = (),
    output: str | PathLike[str] | None = None,
    options: LearnOptions | None = None,
    *,
    costs: str | PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
) -> LearnReport:
    """Fills a store from logs and files of stores, saves it, and replays what it would bring.

    What stores hold is taken as older than all logs. Logs are read in the order given, so the last
    ones are forgotten last.

    Args:
        paths: logs as for `replay`, and files of stores; empty for the standard library's sources.
        output: the file to write; None: only the report.
        options: see `LearnOptions`.
        costs: the file to write costs to that are fitted on the newest conversations, and
            compared on every second of them, not fitted on; None: none are fitted.
        progress: called often; must return quickly.
        command: command line to show in the report.

    Raises:
        InputError: options, input or output cannot be used; nothing is written then.
    """
    options = options or LearnOptions()
    started = time.monotonic()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    show = progress or no_progress
    config = _config(options)
    if output is not None:
        stores.check_output(Path(output))
    tokenizing = Tokenizing(options.tokenizer, options.chat_template)
    most = (options.store_tokens or MOST_TOKENS) + RECENT_TOKENS
    heard = Heard(-(-most // BLOCK_TOKENS))
    if options.store_tokens is not None:
        stores.new(options.store_tokens)
    files = [Path(path) for path in paths if stores.is_store(Path(path))]
    _read_stores(files, heard, tokenizing)
    logs = [path for path in paths if Path(path) not in files]
    if not paths:
        if options.scope_field is not None:
            raise InputError("scope_field: expected none for the standard library's sources")
        for conversation in stdlib_conversations(limit=options.limit)[0]:
            heard.add(tokenizing.talk_of(conversation))
    read_logs(logs, heard, tokenizing, options, progress)
    if not heard.texts:
        raise InputError("nothing to learn: no answer of 2 or more tokens")
    if tokenizing.is_guessed and paths:
        heard.notes.append(TOKENIZER_WARNING)

    def replaying(what: str, done: int, total: int) -> None:
        show(Progress(what, "replay", done, total))

    size = options.store_tokens
    curve: tuple[Point, ...] = ()
    tried: tuple[Point, ...] = ()
    by_k: dict[int, Point] = {}
    evaluated, earlier = split(heard.recent, heard.conversations, list(heard.texts))
    if evaluated and earlier:
        replayed = Replayed(evaluated, earlier, config, replaying)
        if size is None:
            size, tried = replayed.sizes()
        elif needed(earlier) > size:
            heard.notes.append(
                f"the earlier answers take {needed(earlier)} tokens of a store, and this one has "
                f"{size}: it forgets the oldest, so the curve ends flat"
            )
        curve, by_k = replayed.curve(size), replayed.by_k(size)
        if 10 * len(evaluated) < heard.conversations:
            heard.notes.append(f"replayed: the newest {len(evaluated)} conversations of the tenth")
        if len(evaluated) < FEW:
            heard.notes.append(
                f"TOO FEW: the figures are of {len(evaluated)} conversations and depend on chance"
            )
    else:
        heard.notes.append("no curve: it needs two conversations, or a store and a conversation")
    fitted = None
    if costs is not None:
        show(Progress("costs", "learn", 0, 1))
        fitted = _fit(heard, Path(costs), tokenizing.digest, config)
    size = size or holding(heard.texts)
    held = _save(heard, stores.new(size, tokenizing.digest), output, show)
    return LearnReport(
        command=command,
        date=date,
        machine=machine(None),
        versions=versions(),
        config={
            "k": options.k,
            "min_draft_probability": options.min_draft_probability,
            "cost": options.cost,
            "scope_field": options.scope_field,
            "limit": options.limit,
        },
        stores=tuple(map(str, files)),
        conversations=heard.conversations,
        answers=heard.answers,
        answer_tokens=heard.tokens,
        tokenizer=None if tokenizing.tokenizer is None else tokenizing.tokenizer.name,
        tokenizer_digest=tokenizing.digest,
        evaluated=len(evaluated) if curve else 0,
        sizes=tried,
        curve=curve,
        by_k=by_k,
        costs=fitted,
        store_tokens=size,
        tokens_held=held,
        output=None if output is None else str(output),
        file_bytes=None if output is None else Path(output).stat().st_size,
        notes=tuple(heard.notes),
        seconds=round(time.monotonic() - started, 2),
    )


def _config(options: LearnOptions) -> NgramConfig:
    least = options.min_draft_probability
    try:
        return NgramConfig(sizes="ladder", k=options.k, min_draft_probability=least)
    except ValueError as error:
        raise InputError(str(error)) from error


def _fit(heard: Heard, path: Path, tokenizer: str, config: NgramConfig) -> dict[str, Any]:
    """Fits costs, writes them, and says what they bring."""
    requests = [request for talk in heard.recent for request in talk.requests]
    assert config.cost_limit is not None
    found = compare(requests, min(config.k, 16), config.cost_limit)
    fit(requests, tokenizer).save(path)
    return {**vars(found), "gain": found.gain, "recommended": found.wins, "output": str(path)}


def _read_stores(files: Sequence[Path], heard: Heard, tokenizing: Tokenizing) -> None:
    """Adds what each holds; a text that an earlier one of them holds too is left out, because
    engines that began with one seed all have its text."""
    known: set[bytes] = set()
    for file in files:
        store = stores.load(file, tokenizing.digest)
        tokenizing.stored = tokenizing.stored or store.tokenizer
        texts = stores.texts_of(store)
        names = [hashlib.blake2b(b"%d " % scope + of.tobytes()).digest() for scope, of in texts]
        heard.add_texts(of for of, name in zip(texts, names, strict=True) if name not in known)
        known.update(names)


def _save(
    heard: Heard,
    store: NgramStore,
    output: str | PathLike[str] | None,
    show: Callable[[Progress], None],
) -> int:
    """Fills a store and saves it; returns how many tokens it holds."""
    for done, text in enumerate(heard.texts, 1):
        stores.enter(store, [text])
        if done % 1000 == 0 or done == len(heard.texts):
            show(Progress(f"{store.token_capacity} tokens", "learn", done, len(heard.texts)))
    if output is not None:
        stores.save(store, Path(output))
    return store.statistics.tokens_held
