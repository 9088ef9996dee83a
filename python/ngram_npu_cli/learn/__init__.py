"""Fills a store from logs, and measures its gain.

    >>> from ngram_npu_cli.learn import learn
    >>> report = learn(["yesterday.jsonl"], "learned.store")  # doctest: +SKIP
    >>> report.curve[-1].tokens_per_step  # doctest: +SKIP
    2.87

Functions of this package do not print.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from ngram_npu.config import NgramConfig
from ngram_npu.errors import InputError
from ngram_npu.store import BLOCK_TOKENS, scope_of

from ngram_npu_cli.learn import curve
from ngram_npu_cli.learn.curve import Evaluation, Point, ScopedText, TokenConversation, describe
from ngram_npu_cli.learn.learn_report import LearnReport, format_report
from ngram_npu_cli.logs.reader import Progress, ignore_progress, read_requests
from ngram_npu_cli.logs.remote import LogPath, make_path
from ngram_npu_cli.logs.tokenization import Tokenization, TokenizedConversation
from ngram_npu_cli.options import LearnOptions
from ngram_npu_cli.report import TOKENIZER_WARNING, Run

__all__ = ["LearnOptions", "LearnReport", "Point", "describe", "format_report", "learn"]

RECENT_TOKENS = 1 << 22
"""Maximum number of tokens, prompts included, of the conversations that are kept completely."""


@dataclass
class LogSample:
    """The newest texts and conversations that were read, oldest first.

    Attributes:
        max_blocks: Maximum number of store blocks for the kept texts.
        texts: The newest answers from stores and logs.
        recent: The newest conversations of the logs, with prompts, so that they can be replayed.
        conversations, answers, tokens: Numbers of conversations, answers and answer tokens that
            were read from logs.
        notes: Notes about skipped records, and about files that are not logs.
    """

    max_blocks: int
    texts: deque[ScopedText] = field(default_factory=deque)
    recent: deque[TokenConversation] = field(default_factory=deque)
    conversations: int = 0
    answers: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    _blocks: int = 0
    _recent_tokens: int = 0

    def add_texts(self, texts: Iterable[ScopedText]) -> None:
        """Adds the newest texts, and removes the oldest ones that do not fit into a store."""
        for text in texts:
            self.texts.append(text)
            self._blocks += curve.count_blocks(len(text[1]))
            while self._blocks > self.max_blocks and len(self.texts) > 1:
                self._blocks -= curve.count_blocks(len(self.texts.popleft()[1]))

    def add(self, conversation: TokenConversation) -> None:
        """Adds a conversation, which is newer than all others."""
        answers = conversation.answers
        self.conversations += 1
        self.answers += len(answers)
        self.tokens += sum(len(tokens) for _, tokens in answers)
        self.add_texts(answers)
        self.recent.append(conversation)
        self._recent_tokens += conversation.num_tokens
        while self._recent_tokens > RECENT_TOKENS and len(self.recent) > 1:
            self._recent_tokens -= self.recent.popleft().num_tokens


class StoreTokenization(Tokenization):
    """Tokenizes for a store, with the vocabulary of the stores that were read."""

    store_digest = ""

    @property
    def digest(self) -> str:
        """Digest of the vocabulary of the tokenizer or of the stores; empty if unknown."""
        return super().digest if self.tokenizer is not None else self.store_digest

    def load(self) -> None:
        """Loads the tokenizer. Raises an InputError if its vocabulary differs from the stores'."""
        is_loaded = self.tokenizer is not None
        super().load()
        if not is_loaded and self.is_guessed and self.store_digest not in ("", self.digest):
            assert self.tokenizer is not None
            raise InputError(
                f"tokenizer: expected the one of the stores, vocabulary {self.store_digest}, got "
                f"{self.tokenizer.name}, {self.digest}; choose --tokenizer"
            )


def learn(
    paths: Sequence[str | PathLike[str]] = (),
    output: str | PathLike[str] | None = None,
    options: LearnOptions | None = None,
    *,
    progress: Callable[[Progress], None] = ignore_progress,
    command: str = "",
) -> LearnReport:
    """Fills a store from logs and files of stores, saves it, and measures its gain.

    Texts of stores are treated as older than all logs. Logs are read in the order of the paths, and
    a full store evicts the oldest text, so pass the newest logs last.

    Args:
        paths: Logs as for `replay`, and files of stores; empty for the standard library's sources.
        output: The file to write; None: only the report.
        options: See `LearnOptions`.
        progress: Called often; must return quickly.
        command: Command line to show in the report.

    Raises:
        InputError: Options, input or output cannot be used. Nothing is written in this case.
    """
    options = options or LearnOptions()
    run = Run(command)
    with curve.input_errors():
        config = NgramConfig(
            sizes="ladder", k=options.k, min_draft_probability=options.min_draft_probability
        )
    if output is not None:
        curve.check_output(Path(output))
    tokenization = StoreTokenization(options.tokenizer, options.chat_template)
    if options.tokenizer is not None:
        tokenization.load()
    if options.store_tokens is not None:
        curve.make_store(options.store_tokens)  # checks the size before any work
    max_tokens = (options.store_tokens or curve.MAX_STORE_TOKENS) + RECENT_TOKENS
    sample = LogSample(-(-max_tokens // BLOCK_TOKENS))
    all_paths = [make_path(path) for path in paths]
    stores = [path for path in all_paths if curve.is_store_file(path)]
    _read_stores(stores, sample, tokenization)
    logs = [path for path, log in zip(paths, all_paths, strict=True) if log not in stores]
    if logs or not paths:
        _read_sample(logs, sample, tokenization, options, progress)
    if not sample.texts:
        raise InputError("nothing to learn: no answer of 2 or more tokens")
    if tokenization.is_guessed and paths:
        sample.notes.append(TOKENIZER_WARNING)
    evaluation = Evaluation(sample.recent, sample.conversations, sample.texts, config, progress)
    size = options.store_tokens or curve.compute_full_size(sample.texts)
    points: tuple[Point, ...] = ()
    by_k: dict[int, Point] = {}
    if evaluation.conversations and evaluation.earlier:
        points = evaluation.replay_curve(size)
        by_k = evaluation.replay_lengths(points[-1])
        sample.notes += evaluation.list_notes(options.store_tokens)
    else:
        sample.notes.append("no curve: this needs two conversations, or a store and a conversation")
    store = curve.make_store(size, tokenization.digest)
    for done, (scope, tokens) in enumerate(sample.texts, 1):
        store.add_text(tokens, scope)
        if done % 1000 == 0 or done == len(sample.texts):
            progress(Progress(f"{size} tokens", "learn", done, len(sample.texts)))
    if output is not None:
        with curve.input_errors(output):
            store.save(Path(output))
    names = ("k", "min_draft_probability", "cost", "scope_field", "limit")
    return LearnReport(
        about={
            **run.describe(),
            "config": {name: getattr(options, name) for name in names},
            "stores": list(map(str, stores)),
            "conversations": sample.conversations,
            "answers": sample.answers,
            "answer_tokens": sample.tokens,
            "tokenizer": None if tokenization.tokenizer is None else tokenization.tokenizer.name,
            "tokenizer_digest": tokenization.digest,
            "evaluated": len(evaluation.conversations) if points else 0,
            "seconds": run.seconds,
        },
        curve=points,
        by_k=by_k,
        store_tokens=size,
        tokens_held=store.statistics.tokens_held,
        output=None if output is None else str(output),
        file_bytes=None if output is None else Path(output).stat().st_size,
        notes=tuple(sample.notes),
    )


def _read_sample(
    paths: Sequence[str | PathLike[str]],
    sample: LogSample,
    tokenization: StoreTokenization,
    options: LearnOptions,
    progress: Callable[[Progress], None],
) -> None:
    """Adds the conversations of files and folders to the sample."""

    def receive(_: int, conversation: TokenizedConversation) -> None:
        if with_steps := tuple(r for r in conversation.requests if r.spans()):
            sample.add(TokenConversation(scope_of(conversation.scope), with_steps))

    logs, omissions = read_requests(
        paths,
        options,
        tokenization,
        receive,
        scope_field=options.scope_field,
        progress=progress,
    )
    sample.notes += [f"{log.name}: {note}" for log in logs for note in log.notes]
    sample.notes += omissions


def _read_stores(
    files: Sequence[LogPath], sample: LogSample, tokenization: StoreTokenization
) -> None:
    """Adds the texts of stores. A text that an earlier store also contains is omitted: stores of
    engines that were started with the same seed store all contain the seed's texts."""
    known_keys: set[bytes] = set()
    for file in files:
        store = curve.load_store(file, tokenization.digest)
        tokenization.store_digest = tokenization.store_digest or store.tokenizer
        texts = store.texts()
        # Only digests are compared, so that the texts of all stores need not fit into memory.
        keys = [hashlib.blake2b(b"%d " % scope + text.tobytes()).digest() for scope, text in texts]
        sample.add_texts(
            text for key, text in zip(keys, texts, strict=True) if key not in known_keys
        )
        known_keys.update(keys)
