"""Recorded traffic for tuning: read once; a sample is kept if it is large."""

from __future__ import annotations

import copy
import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.log_files import Progress, Skipped, log_files
from ngram_npu_cli.logs.records import Conversation
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER, load_tokenizer
from ngram_npu_cli.replay.replay_report import TOKENIZER_WARNING
from ngram_npu_cli.replay.replaying import (
    IDS_ONLY,
    ReplayInput,
    TokenizerLike,
    load_inputs,
    request_maker,
)
from ngram_npu_cli.replay.simulation import TokenRequest

DEFAULT_SAMPLE = 10_000_000
"""Characters: all settings over it take two minutes on two cores."""


@dataclass(frozen=True)
class TuneOptions:
    """How to tune.

    Attributes:
        format, limit, strict, tokenizer, chat_template: as in `ReplayOptions`.
        sample: maximum number of characters to replay; None: all.
        jobs: processes; None: one per core.
        cache: file that keeps finished pieces for later runs; None: a file for this traffic, which
            is deleted after a complete run.
        runner: "gpu", "host" or "ascend": where drafts are made (`runners.RUNNERS`). None: the GPU
            and the host, each with a recommendation of its own.
        synchronous: what a step takes longer without asynchronous scheduling, as a share of it, for
            runners that lose it; None: an assumed 0.1, or 0 with step times of one's own server.
        store: whether to try ladders also with a store, from which requests draft other requests'
            text.
    """

    format: str | None = None
    limit: int | None = None
    strict: bool = False
    tokenizer: str | None = None
    chat_template: str = "auto"
    sample: int | None = DEFAULT_SAMPLE
    jobs: int | None = None
    cache: Path | None = None
    runner: str | None = None
    synchronous: float | None = None
    store: bool = False


@dataclass(frozen=True)
class Traffic:
    """Conversations with at least one step, as requests.

    Attributes:
        inputs: names, in order.
        input_of: [N], number of each conversation's input.
        names: id of each conversation.
        number_in_input: [N], number of each conversation among those kept of its input, from 0.
        requests: of all conversations. A conversation has several requests if its chat template
            changes earlier turns.
        conversation_of: [R], number of each request's conversation.
        tokens: [N], generated in steps.
        characters: of the conversations kept.
        found, found_characters: of all conversations read.
        left_out: kept conversations without a step.
        notes: records and conversations that were skipped, and files of folders that are no logs.
        tokenizer: name and source; None for token ids.
    """

    inputs: tuple[str, ...]
    input_of: npt.NDArray[np.int64]
    names: tuple[str, ...]
    number_in_input: npt.NDArray[np.int64]
    requests: tuple[TokenRequest, ...]
    conversation_of: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    characters: int
    found: int
    found_characters: int
    left_out: int
    notes: tuple[str, ...]
    tokenizer: str | None

    @property
    def is_sample(self) -> bool:
        return self.characters < self.found_characters

    @property
    def chosen_half(self) -> npt.NDArray[np.bool_]:
        """[N], whether settings are chosen on it: numbers 0, 2, 4, ... of each input."""
        even: npt.NDArray[np.bool_] = self.number_in_input % 2 == 0
        return even

    def streams(self) -> list[list[int]]:
        """Numbers of the requests that share a store: each half of each input, in order."""
        of_request = (
            self.input_of[self.conversation_of] * 2 + self.chosen_half[self.conversation_of]
        )
        return [np.flatnonzero(of_request == n).tolist() for n in np.unique(of_request)]


def read_traffic(
    paths: Sequence[str | PathLike[str]],
    options: TuneOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Traffic:
    """Read, sample and tokenize.

    Args:
        paths: files and folders; empty for the standard library's sources.
        options: how it is read; None: all of it. A sample has whole conversations, chosen with
            equal probability, the same ones for the same traffic.
        progress: called after each conversation that is read, and that is tokenized.

    Raises:
        InputError: as for `replay`, or fewer than two conversations have a step.
    """
    options = options or TuneOptions(sample=None)
    kept = _Sample(options.sample)
    inputs: list[str] = []
    notes: list[str] = []
    if not paths:
        item: ReplayInput
        (item,) = load_inputs((), options.limit)
        inputs.append(item.name)
        for conversation in item.conversations:
            kept.add(0, conversation)
    for log in log_files(paths, options.strict):
        before = kept.copy()
        try:
            for conversation in log.conversations(options.limit, options.format, progress):
                kept.add(len(inputs), conversation)
        except RecordError as error:
            notes.append(log.reason_to_leave_out(error))
            kept = before
        else:
            inputs.append(log.name)
            notes += [f"{log.name}: {note}" for note in log.notes]
    if not inputs:
        raise InputError(notes[0])
    chosen = kept.in_order()
    loaded: TokenizerLike | None = None
    texts = [c for _, c in chosen if not c.has_token_ids]
    if texts:
        if options.tokenizer != IDS_ONLY:
            loaded = load_tokenizer(options.tokenizer or DEFAULT_TOKENIZER)
        if options.tokenizer is None and paths:
            notes.append(TOKENIZER_WARNING)
    to_requests = request_maker(loaded, options.chat_template)
    requests: list[TokenRequest] = []
    owners: list[int] = []
    names: list[str] = []
    input_of: list[int] = []
    skipped = [Skipped("conversations", strict=options.strict) for _ in inputs]
    for done, (number, conversation) in enumerate(chosen, start=1):
        try:
            made = [r for r in to_requests(conversation) if r.spans()]
        except RecordError as error:
            skipped[number].add(error)
            made = []
        if made:
            owners += [len(names)] * len(made)
            requests += made
            names.append(conversation.id)
            input_of.append(number)
        if progress is not None:
            progress(Progress(inputs[number], "tokenize", done, len(chosen)))
    for number, of_input in enumerate(skipped):
        used = sum(of == number for of, _ in chosen) - of_input.number
        of_input.check(used)
        notes += [f"{inputs[number]}: {note}" for note in of_input.notes(used)]
    if len(names) < 2:
        raise InputError(
            f"expected 2 or more conversations with an answer of 2 or more tokens, got {len(names)}"
        )
    conversation_of = np.array(owners)
    generated = [sum(end - start - 1 for start, end in r.spans()) for r in requests]
    input_numbers = np.array(input_of)
    return Traffic(
        inputs=tuple(inputs),
        input_of=input_numbers,
        names=tuple(names),
        number_in_input=_numbers_within(input_numbers),
        requests=tuple(requests),
        conversation_of=conversation_of,
        tokens=np.bincount(conversation_of, generated, len(names)).astype(np.int64),
        characters=kept.characters,
        found=kept.found,
        found_characters=kept.found_characters,
        left_out=len(chosen) - len(names) - sum(of.number for of in skipped),
        notes=tuple(notes),
        tokenizer=None if loaded is None else f"{loaded.name}: {loaded.source}",
    )


class _Sample:
    """The conversations with the lowest hashes, as many as fit; no others are kept in memory.

    After one was left out, none with a higher hash is kept: short ones would be more likely.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.found = self.found_characters = self.characters = 0
        self._heap: list[tuple[int, int, int, Conversation]] = []
        self._bar = 1 << 64

    def add(self, number: int, conversation: Conversation) -> None:
        size = conversation.num_characters
        text = f"{self.found} {size} {conversation.id}".encode()
        rank = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        if rank < self._bar:
            heapq.heappush(self._heap, (-rank, self.found, number, conversation))
            self.characters += size
        self.found += 1
        self.found_characters += size
        while self.most is not None and self.characters > self.most and len(self._heap) > 2:
            left_out = heapq.heappop(self._heap)
            self._bar = -left_out[0]
            self.characters -= left_out[3].num_characters

    def copy(self) -> _Sample:
        """This state, to return to if the next file turns out to be no log."""
        other = copy.copy(self)
        other._heap = list(self._heap)
        return other

    def in_order(self) -> list[tuple[int, Conversation]]:
        return [(number, c) for _, _, number, c in sorted(self._heap, key=lambda entry: entry[1])]


def _numbers_within(of_input: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N], number of earlier conversations of the same input."""
    numbers = np.zeros(len(of_input), np.int64)
    for number in np.unique(of_input):
        own = np.flatnonzero(of_input == number)
        numbers[own] = np.arange(len(own))
    return numbers
