"""Reads logs for a store in one pass, and keeps of them what a store can hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike

from ngram_npu.errors import InputError, RecordError
from ngram_npu.scopes import scope_of

from ngram_npu_cli.learn.stores import Text, blocks_of
from ngram_npu_cli.logs.log_files import Progress, Skipped, log_files
from ngram_npu_cli.logs.records import Conversation
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER, ReplayTokenizer, load_tokenizer
from ngram_npu_cli.replay.replaying import IDS_ONLY, request_maker
from ngram_npu_cli.replay.simulation import TokenRequest

RECENT_TOKENS = 1 << 22
"""Maximum number of tokens, prompts included, of the conversations that are kept whole."""


@dataclass(frozen=True)
class LearnOptions:
    """How to learn.

    Attributes:
        format, limit, strict, tokenizer, chat_template: as in `ReplayOptions`.
        scope_field: the field of a record that says whose text it is, with dots between keys; its
            value is the scope, as a request of a server names it. None: everybody shares.
        store_tokens: size of the store; None: the smallest power of two that yields at least 99.8 %
            of the tokens per step of a store that holds everything, up to 64 Mi.
        k, min_draft_probability: of the drafts that the curve is replayed with; 8, 16 and 32
            tokens are tried too, with all known.
        cost: of verifying a drafted token, as a share of a step.
    """

    format: str | None = None
    limit: int | None = None
    strict: bool = False
    tokenizer: str | None = None
    chat_template: str = "auto"
    scope_field: str | None = None
    store_tokens: int | None = None
    k: int = 8
    min_draft_probability: float = 0.177
    cost: float = 0.05


@dataclass(frozen=True)
class Talk:
    """A conversation of the logs as token ids; it has at least one step."""

    scope: int
    requests: tuple[TokenRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_generated(self) -> int:
        return sum(end - start - 1 for r in self.requests for start, end in r.spans())

    @property
    def answers(self) -> list[Text]:
        """As a server's requests put them into its store: one text for each turn. One token alone
        is never drafted from."""
        said = (turn.completion for request in self.requests for turn in request.turns)
        return [(self.scope, tokens) for tokens in said if len(tokens) > 1]


@dataclass
class Heard:
    """What was read, oldest first.

    Attributes:
        most_blocks: of a store, for the texts that are kept.
        texts: the newest answers, those of stores and of logs.
        recent: the newest conversations of the logs, whole, so that they can be replayed.
        conversations, answers, tokens: read from logs; the tokens are those of the answers.
        notes: what was skipped, and which files are no logs.
    """

    most_blocks: int
    texts: deque[Text] = field(default_factory=deque)
    recent: deque[Talk] = field(default_factory=deque)
    conversations: int = 0
    answers: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    _blocks: int = 0
    _recent_tokens: int = 0

    def add_texts(self, texts: Iterable[Text]) -> None:
        """Adds texts that are newer than all others, and forgets the oldest ones beyond what a
        store can hold."""
        for text in texts:
            self.texts.append(text)
            self._blocks += blocks_of(len(text[1]))
            while self._blocks > self.most_blocks and len(self.texts) > 1:
                self._blocks -= blocks_of(len(self.texts.popleft()[1]))

    def add(self, talk: Talk | None) -> None:
        """Adds the newest conversation, if it has a step."""
        if talk is None:
            return
        answers = talk.answers
        self.conversations += 1
        self.answers += len(answers)
        self.tokens += sum(len(tokens) for _, tokens in answers)
        self.add_texts(answers)
        self.recent.append(talk)
        self._recent_tokens += talk.num_tokens
        while self._recent_tokens > RECENT_TOKENS and len(self.recent) > 1:
            self._recent_tokens -= self.recent.popleft().num_tokens


class Tokenizing:
    """Makes requests of conversations; the arguments are as in `ReplayOptions`.

    Attributes:
        tokenizer: the one asked for; without a name the default one, from the first text on.
        stored: the digest that stores name; empty: none was read.

    Raises:
        InputError: there is no such tokenizer.
    """

    def __init__(self, name: str | None, chat_template: str) -> None:
        self.tokenizer: ReplayTokenizer | None = None
        self.stored = ""
        self._name, self._chat_template = name, chat_template
        if name not in (None, IDS_ONLY):
            self.tokenizer = load_tokenizer(str(name))
        self._requests_of = request_maker(self.tokenizer, chat_template)

    @property
    def digest(self) -> str:
        """The digest of the vocabulary; empty if it is not known."""
        return self.stored if self.tokenizer is None else self.tokenizer.digest

    @property
    def is_guessed(self) -> bool:
        return self._name is None and self.tokenizer is not None

    def talk_of(self, conversation: Conversation) -> Talk | None:
        """None: it has no step.

        Raises:
            RecordError: it is text, and only token ids were asked for; its template refuses it.
            InputError: the stores are of another vocabulary than the default tokenizer.
        """
        if self.tokenizer is None and self._name is None and not conversation.has_token_ids:
            self.tokenizer = load_tokenizer(DEFAULT_TOKENIZER)
            if self.stored not in ("", self.digest):
                raise InputError(
                    f"tokenizer: expected the one of the stores, vocabulary {self.stored}, got "
                    f"{DEFAULT_TOKENIZER}, {self.digest}; choose --tokenizer"
                )
            self._requests_of = request_maker(self.tokenizer, self._chat_template)
        requests = tuple(r for r in self._requests_of(conversation) if r.spans())
        return Talk(scope_of(conversation.scope), requests) if requests else None


def read_logs(
    paths: Sequence[str | PathLike[str]],
    heard: Heard,
    tokenizing: Tokenizing,
    options: LearnOptions,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Adds the conversations of files and folders to `heard`.

    Raises:
        InputError: as for `replay`; also if a folder has a file of which more than half, but not
            all, is no conversations.
    """
    left_out: list[str] = []
    logs = log_files(paths, options.strict, options.scope_field)
    for log in logs:
        try:
            skipped = Skipped("conversations", strict=options.strict)
            used = 0
            for conversation in log.conversations(options.limit, options.format, progress):
                try:
                    heard.add(tokenizing.talk_of(conversation))
                    used += 1
                except RecordError as error:
                    skipped.add(error)
            skipped.check(used)
        except RecordError as error:
            if log.found:  # its conversations are among the others by now
                raise
            left_out.append(log.reason_to_leave_out(error))
        else:
            notes = (*log.notes, *skipped.notes(used))
            heard.notes += [f"{log.name}: {note}" for note in notes]
    if logs and len(left_out) == len(logs):
        raise InputError(left_out[0])
    heard.notes += left_out
