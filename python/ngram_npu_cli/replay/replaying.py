"""From paths and options to a report."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from ngram_npu.config import STORE_TOKENS
from ngram_npu.draft_costs import FORMAT, Costs
from ngram_npu.errors import InputError, RecordError, one_line

from ngram_npu_cli.logs.answers import checked_text
from ngram_npu_cli.logs.chat_template import ChatTemplate, load_chat_template, texts
from ngram_npu_cli.logs.log_files import Progress, Skipped, log_files, no_progress
from ngram_npu_cli.logs.records import Conversation
from ngram_npu_cli.logs.stdlib_corpus import stdlib_conversations
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER, load_tokenizer
from ngram_npu_cli.replay.environment import machine, versions
from ngram_npu_cli.replay.figures import ReplayFigures
from ngram_npu_cli.replay.replay_report import ReplayReport
from ngram_npu_cli.replay.simulation import Int32Array, Proposer, TokenRequest, TokenTurn, simulate

if TYPE_CHECKING:
    from ngram_npu.config import NgramConfig

IDS_ONLY = "ids"
"""Tokenizer name that refuses text: conversations without token ids are skipped."""

_LOOKUP = (
    "min_n",
    "max_n",
    "k",
    "match_policy",
    "overlap",
    "max_len",
    "sizes",
    "min_draft_probability",
    "store",
    "store_tokens",
)
"""Fields that the options share with `NgramConfig`."""


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay.

    Attributes:
        min_n, max_n, k, match_policy, overlap, sizes: as in `NgramConfig`; None: its defaults,
            except that `sizes` is a ladder if `min_draft_probability` is given.
        max_len: no draft reaches beyond this context length; None: no limit.
        min_draft_probability: as in `NgramConfig`; None: drafts of k tokens.
        costs: file of `ngram_npu.Costs` or of `python -m tools.fit_costs`; None: the package's.
        store, store_tokens: as in `NgramConfig`. Each input has its own store, empty at first, and
            its conversations are replayed one after the other unless `batch_size` is given.
        drafts: what the runner verifies: "trimmed", the tokens that were found; "padded", k tokens,
            of which the newest token fills those that were not found (vLLM's V2 runner; in V1 the
            plugin's option of this name).
        generated_only: with a store, each turn is a request with the earlier turns as its prompt,
            so that only completions enter the store.
        engine: how drafts are found; the drafts do not depend on it. "auto" is the index unless
            max_n - min_n exceeds 7, because a replay's rows soon are long enough for it.
        batch_size: conversations replayed together; None: 32, with a store 1.
        limit: conversations per input; None: all.
        format: of the files, one of `formats.FORMATS`; None: detected from their content.
        strict: whether a record that is not a conversation, or that the chat template refuses, is
            an error. If not, it is skipped, and the figures' notes say how many were.
        tokenizer: as for `load_tokenizer`, or "ids" to accept only recorded token ids; None:
            mistral-v1, and the report warns that it is not the model's own.
        chat_template: "auto", the template in the tokenizer's folder, or the package's if there is
            none; "default", the package's; "none", texts as they are.
        threads: maximum number of CPU threads for drafting; None: the library's default.
    """

    min_n: int | None = None
    max_n: int | None = None
    k: int | None = None
    match_policy: Literal["earliest", "latest"] | None = None
    overlap: bool | None = None
    max_len: int | None = None
    sizes: Literal["consecutive", "ladder"] | None = None
    min_draft_probability: float | None = None
    costs: str | PathLike[str] | None = None
    store: Literal["live", "finish"] | None = None
    store_tokens: int = STORE_TOKENS
    drafts: Literal["padded", "trimmed"] = "trimmed"
    generated_only: bool = False
    engine: Literal["index", "scan", "auto"] = "auto"
    batch_size: int | None = None
    limit: int | None = None
    format: str | None = None
    strict: bool = False
    tokenizer: str | None = None
    chat_template: Literal["auto", "default", "none"] = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.drafts not in ("padded", "trimmed"):
            raise ValueError(f"drafts must be 'padded' or 'trimmed', got {self.drafts!r}")
        for name in ("batch_size", "limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def config(self) -> NgramConfig:
        """The drafting settings.

        Raises:
            InputError: an option out of its range, one that contradicts another, or a `costs` file
                that cannot be read.
        """
        from ngram_npu.config import NgramConfig

        least = self.min_draft_probability
        if self.costs is not None and least is None:
            raise InputError("costs: expected none without min_draft_probability")
        if self.generated_only and self.store is None:
            raise InputError("generated_only: expected False without a store")
        given = {name: getattr(self, name) for name in _LOOKUP}
        given["sizes"] = self.sizes or ("consecutive" if least is None else "ladder")
        costs = {} if self.costs is None else _read_costs(Path(self.costs), self.store)
        try:
            return NgramConfig(**given, **costs)
        except ValueError as error:
            raise InputError(str(error)) from error


class TokenizerLike(Protocol):
    """The tokenizer interface that the replay needs; `ReplayTokenizer` implements it."""

    @property
    def name(self) -> str:
        """For the record."""

    @property
    def source(self) -> str:
        """For the record."""

    @property
    def vocab_size(self) -> int | None:
        """For the record."""

    @property
    def encode(self) -> Callable[[str], list[int]]:
        """Text to token ids, without special tokens."""


@dataclass(frozen=True)
class ReplayInput:
    """A named list of conversations; `notes` are copied to its figures."""

    name: str
    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...] = ()


def load_inputs(
    paths: Sequence[str | PathLike[str]],
    limit: int | None = None,
    format_name: str | None = None,
    *,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[ReplayInput, ...]:
    """Read all files in `paths` (in a folder: its replay files); without a path, the default input.

    Records that are not conversations are skipped, and in a folder files that are no logs; `notes`
    of the inputs say so.

    Args:
        paths: files and folders.
        limit: conversations per input; None: all.
        format_name: one of `formats.FORMATS`; None: detected from the content.
        strict: whether a record that is not a conversation is an error.
        progress: called after each conversation.

    Raises:
        InputError: a file or folder is missing, not readable or empty, or more than half of a
            file's records are not conversations.
    """
    if not paths:
        conversations, missing = stdlib_conversations(limit=limit)
        notes = (f"{len(missing)} modules are not installed: {' '.join(missing)}",)
        return (ReplayInput("python-stdlib", tuple(conversations), notes if missing else ()),)
    loaded: list[ReplayInput] = []
    left_out: list[str] = []
    for log in log_files(paths, strict):
        try:
            read = tuple(log.conversations(limit, format_name, progress))
        except RecordError as error:
            left_out.append(log.reason_to_leave_out(error))
        else:
            loaded.append(ReplayInput(log.name, read, log.notes))
    if not loaded:
        raise InputError(left_out[0])
    loaded[0] = replace(loaded[0], notes=(*loaded[0].notes, *left_out))
    return tuple(loaded)


def replay(
    paths: Sequence[str | PathLike[str]] = (),
    options: ReplayOptions | None = None,
    *,
    inputs: Sequence[ReplayInput] | None = None,
    tokenizer: TokenizerLike | None = None,
    make_proposer: Callable[[ReplayOptions], Proposer] | None = None,
    progress: Callable[[Progress], None] | None = None,
    command: str = "",
) -> ReplayReport:
    """Replay recorded conversations and report the results of drafting.

    All files are read before the replay starts, so that a malformed file is reported early.

    Args:
        paths: files and folders; empty for the standard library's sources.
        options: see `ReplayOptions`; `make_proposer` gets them with the defaults filled in.
        inputs: used instead of `paths`.
        tokenizer: used instead of `options.tokenizer`.
        make_proposer: makes the proposer of each input; default: `NgramProposer` as configured.
        progress: called often; must return quickly. Its time is not counted.
        command: command line to show in the report.

    Raises:
        InputError: options, input, tokenizer or proposer cannot be used; the message says why.
    """
    options = options or ReplayOptions()
    config = options.config()
    options = replace(options, **{name: getattr(config, name) for name in _LOOKUP})
    batch_size = options.batch_size or (32 if config.store is None else 1)
    least = 1024 * batch_size
    if config.store is not None and config.store_tokens < least:
        raise InputError(
            f"store_tokens: expected at least {least}, 1024 for each conversation at once, got "
            f"{config.store_tokens}"
        )
    make_proposer = make_proposer or _ngram_proposer
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with _thread_limit(options.threads):
        # A wrong option is reported before any work, and the time to load libraries and to start
        # threads is not measured.
        _warm_up(make_proposer(options))
        loaded = (
            load_inputs(
                paths, options.limit, options.format, strict=options.strict, progress=progress
            )
            if inputs is None
            else tuple(inputs)
        )
        chosen = True
        texts = [c for item in loaded for c in item.conversations if not c.has_token_ids]
        if texts and tokenizer is None:
            if options.tokenizer != IDS_ONLY:
                tokenizer = load_tokenizer(options.tokenizer or DEFAULT_TOKENIZER)
            chosen = options.tokenizer is not None or not paths
        report = progress or no_progress
        figures: list[ReplayFigures] = []
        for item in loaded:
            skipped = Skipped("conversations", strict=options.strict)
            requests = tokenize(item, tokenizer, report, options.chat_template, skipped)
            used = len(item.conversations) - skipped.number
            skipped.check(used)
            if options.generated_only:
                requests = [turn for request in requests for turn in request.turns_apart()]
            proposer = make_proposer(options)
            counted = simulate(
                item.name,
                requests,
                proposer,
                k=config.k,
                batch_size=batch_size,
                padded=options.drafts == "padded",
                progress=_phase(report, item.name),
            )
            figures.append(replace(counted, notes=(*item.notes, *skipped.notes(used))))
    return ReplayReport(
        command=command,
        date=date,
        machine=machine(options.threads),
        versions=versions(),
        config={
            **{name: getattr(config, name) for name in _LOOKUP},
            "costs": None if options.costs is None else str(options.costs),
            "drafts": options.drafts,
            "generated_only": options.generated_only,
        },
        batch_size=batch_size,
        limit=options.limit,
        tokenizer=_describe(tokenizer, chosen) if texts and tokenizer is not None else None,
        inputs=tuple(figures),
    )


def tokenize(
    item: ReplayInput,
    tokenizer: TokenizerLike | None,
    progress: Callable[[Progress], None] | None = None,
    chat_template: Literal["auto", "default", "none"] = "auto",
    skipped: Skipped | None = None,
) -> list[TokenRequest]:
    """Convert one input's conversations to token ids, each prompt in its chat template.

    Args:
        item: the input.
        tokenizer: for turns without token ids.
        progress: called after each conversation.
        chat_template: as in `ReplayOptions`.
        skipped: counts conversations that cannot be converted; None: one of them is an error.

    Raises:
        InputError: a turn has no token ids and there is no tokenizer, or the template refuses a
            conversation; the message names file and line.
    """
    skipped = skipped or Skipped("conversations", strict=True)
    to_requests = request_maker(tokenizer, chat_template)
    requests: list[TokenRequest] = []
    for done, conversation in enumerate(item.conversations, start=1):
        try:
            requests += to_requests(conversation)
        except RecordError as error:
            skipped.add(error)
        if progress is not None:
            progress(Progress(item.name, "tokenize", done, len(item.conversations)))
    return requests


def request_maker(
    tokenizer: TokenizerLike | None, chat_template: str
) -> Callable[[Conversation], list[TokenRequest]]:
    """Returns a function from a conversation to its requests. There is one request unless the
    template changes earlier turns. It raises RecordError, naming file and line, for a conversation
    that the template refuses, and for text without a tokenizer."""
    folder: Path | None = getattr(tokenizer, "folder", None)
    template: ChatTemplate | None = None
    if chat_template == "auto" and folder is not None:
        template = load_chat_template(folder)

    def requests_of(conversation: Conversation) -> list[TokenRequest]:
        if conversation.has_token_ids:
            turns = conversation.turns
            ids = [(t.prompt_token_ids or (), t.completion_token_ids or ()) for t in turns]
            return [TokenRequest(conversation.id, _token_turns(ids))]
        if tokenizer is None:
            raise RecordError(f'{conversation.where}: missing key "prompt_token_ids"')
        # Prompt and answer are tokenized separately, because no token of the answer can begin in
        # the prompt that the model was given.
        encode = tokenizer.encode
        return [
            TokenRequest(conversation.id, _token_turns((encode(p), encode(c)) for p, c in turns))
            for turns in _texts(conversation, template, as_is=chat_template == "none")
        ]

    return requests_of


def _texts(
    conversation: Conversation, template: ChatTemplate | None, *, as_is: bool
) -> list[list[tuple[str, str]]]:
    """`texts`, all of which a tokenizer takes."""
    try:
        found = texts(conversation, template, as_is=as_is)
        for text in chain.from_iterable(chain.from_iterable(found)):
            checked_text(text, "the text in its template")
    except (InputError, RecursionError) as error:
        raise RecordError(f"{conversation.where}: {one_line(error)}") from error
    return found


def _token_turns(turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[TokenTurn, ...]:
    return tuple(TokenTurn(_int32(prompt), _int32(completion)) for prompt, completion in turns)


def _int32(token_ids: Sequence[int]) -> Int32Array:
    return np.asarray(token_ids, dtype=np.int32)


def _ngram_proposer(options: ReplayOptions) -> Proposer:
    from ngram_npu.proposer import NgramProposer

    config = options.config()
    engine = "index" if options.engine == "auto" and config.fits_index else options.engine
    try:
        return NgramProposer(config, engine)
    except ValueError as error:
        raise InputError(str(error)) from error


def _read_costs(file: Path, store: str | None) -> dict[str, Any]:
    try:
        tables = json.loads(file.read_text(encoding="utf-8"))
        if tables.get("format") == FORMAT:
            return {"costs": Costs.load(file)}
        costs = {"costs": np.array(tables["row"])}
        return costs if store is None else {**costs, "store_costs": np.array(tables["store"])}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: no table of costs: {one_line(error):.200}") from error


def _warm_up(proposer: Proposer) -> None:
    """One step of one request on a scratch buffer."""
    token_ids = np.zeros((1, 8), np.int32)
    proposer.step(token_ids, np.full(1, 4, np.int32), np.zeros((1, 1), np.int32), advance=True)


@contextmanager
def _thread_limit(threads: int | None) -> Iterator[None]:
    if threads is None:
        yield
        return
    from ngram_npu._C import num_threads, set_num_threads

    before = num_threads()
    set_num_threads(threads)
    try:
        yield
    finally:
        set_num_threads(before)


def _phase(report: Callable[[Progress], None], name: str) -> Callable[[int, int], None]:
    return lambda done, total: report(Progress(name, "replay", done, total))


def _describe(tokenizer: TokenizerLike, chosen: bool) -> dict[str, Any]:
    return {
        "name": tokenizer.name,
        "source": tokenizer.source,
        "vocab_size": tokenizer.vocab_size,
        **({} if chosen else {"chosen": False}),
    }
