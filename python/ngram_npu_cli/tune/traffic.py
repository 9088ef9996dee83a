"""Reads recorded traffic for tuning. Of large traffic, only a sample is kept."""

from __future__ import annotations

import hashlib
import heapq
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.conversations import Conversation, TokenRequest
from ngram_npu_cli.logs.reader import Progress, Skipped, ignore_progress, read_logs
from ngram_npu_cli.logs.tokenization import Tokenization
from ngram_npu_cli.options import TuneOptions
from ngram_npu_cli.report import TOKENIZER_WARNING


@dataclass(frozen=True)
class Traffic:
    """The conversations that have at least one step, as requests.

    Attributes:
        inputs: Names of the inputs, in the order in which they were read.
        input_of, names: [N], number of each conversation's input, and ID of each conversation.
        requests: Requests of all conversations. A conversation has several if its chat template
            changes earlier turns.
        conversation_of: [R], number of each request's conversation.
        characters, characters_read: Number of characters of the kept conversations, and of all
            conversations.
        num_read: Number of conversations that were read.
        left_out: Number of kept conversations without a step.
    """

    inputs: tuple[str, ...]
    input_of: npt.NDArray[np.int64]
    names: tuple[str, ...]
    requests: tuple[TokenRequest, ...]
    conversation_of: npt.NDArray[np.int64]
    characters: int
    num_read: int
    characters_read: int
    left_out: int
    notes: tuple[str, ...]
    tokenizer: str | None

    @property
    def is_sample(self) -> bool:
        return self.characters < self.characters_read

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[N], number of tokens of each conversation that are generated in steps."""
        generated = [request.num_generated for request in self.requests]
        return np.bincount(self.conversation_of, generated).astype(np.int64)

    @property
    def selection_half(self) -> npt.NDArray[np.bool_]:
        """[N], true for conversations 0, 2, 4, ... of each input, on which settings are chosen."""
        is_selected = np.zeros(len(self.names), bool)
        for number in range(len(self.inputs)):
            is_selected[np.flatnonzero(self.input_of == number)[::2]] = True
        return is_selected

    def list_streams(self) -> list[list[int]]:
        """Returns lists of the numbers of requests that share a store: one list for each half of
        each input."""
        stream_of_conversation = self.input_of * 2 + self.selection_half
        stream_of_request = stream_of_conversation[self.conversation_of]
        return [
            np.flatnonzero(stream_of_request == stream).tolist()
            for stream in np.unique(stream_of_request)
        ]

    def describe(self) -> dict[str, Any]:
        """Returns the description of the traffic for a report."""
        return {
            "inputs": list(self.inputs),
            "conversations": len(self.names),
            "conversations_without_a_step": self.left_out,
            "characters": self.characters,
            "conversations_found": self.num_read,
            "characters_found": self.characters_read,
            "is_sample": self.is_sample,
            "tokens": int(self.tokens.sum()),
            "held_out_conversations": int((~self.selection_half).sum()),
            "tokenizer": self.tokenizer,
            "notes": list(self.notes),
        }


def read_traffic(
    paths: Sequence[str | PathLike[str]],
    options: TuneOptions | None = None,
    progress: Callable[[Progress], None] = ignore_progress,
) -> Traffic:
    """Reads, samples and tokenizes conversations.

    A sample consists of complete conversations, chosen with equal probability. The same traffic
    always results in the same sample. Without options, everything is read.

    Raises:
        InputError: The errors of `replay`, or fewer than two conversations have a step.
    """
    options = options or TuneOptions(sample=None)
    sample = _Sample(options.sample)
    logs, omissions = read_logs(
        paths, options, sample.add, convert=PickledConversation.of, progress=progress
    )
    notes = [f"{log.name}: {note}" for log in logs for note in log.notes] + omissions
    conversations = sample.list_in_order()
    tokenization = Tokenization(options.tokenizer, options.chat_template)
    if not all(conversation.has_token_ids for _, conversation in conversations):
        tokenization.load()
        if tokenization.is_guessed and paths:
            notes.append(TOKENIZER_WARNING)
    requests: list[TokenRequest] = []
    conversation_of: list[int] = []
    names: list[str] = []
    input_of: list[int] = []
    skipped = [Skipped("conversations", strict=options.strict) for _ in logs]
    for done, (number, conversation) in enumerate(conversations, start=1):
        tokenized: list[TokenRequest] = []
        try:
            tokenized = tokenization.make_requests(conversation)
            skipped[number].used += 1
        except RecordError as error:
            skipped[number].add(error)
        if with_steps := [request for request in tokenized if request.spans()]:
            conversation_of += [len(names)] * len(with_steps)
            requests += with_steps
            names.append(conversation.id)
            input_of.append(number)
        progress(Progress(logs[number].name, "tokenize", done, len(conversations)))
    for log, log_skipped in zip(logs, skipped, strict=True):
        notes += [f"{log.name}: {note}" for note in log_skipped.list_notes()]
    if len(names) < 2:
        raise InputError(
            f"expected 2 or more conversations with an answer of 2 or more tokens, got {len(names)}"
        )
    tokenizer = tokenization.tokenizer
    return Traffic(
        inputs=tuple(log.name for log in logs),
        input_of=np.array(input_of),
        names=tuple(names),
        requests=tuple(requests),
        conversation_of=np.array(conversation_of),
        characters=sample.characters,
        num_read=sample.num_read,
        characters_read=sample.characters_read,
        left_out=sum(log_skipped.used for log_skipped in skipped) - len(names),
        notes=tuple(notes),
        tokenizer=None if tokenizer is None else f"{tokenizer.name}: {tokenizer.source}",
    )


class PickledConversation(NamedTuple):
    """A conversation that is read only if it stays in the sample."""

    id: str
    num_characters: int
    data: bytes

    @classmethod
    def of(cls, conversation: Conversation) -> PickledConversation:
        return cls(conversation.id, conversation.num_characters, pickle.dumps(conversation, -1))


class _Sample:
    """Keeps the conversations with the lowest hashes, up to a number of characters.

    After a conversation was removed, no conversation with a higher hash is added. Otherwise short
    conversations, which still fit, would be sampled more often.
    """

    def __init__(self, max_characters: int | None) -> None:
        self.max_characters = max_characters
        self.num_read = self.characters_read = self.characters = 0
        self._heap: list[tuple[int, int, int, PickledConversation]] = []
        self._max_hash = 1 << 64

    def add(self, number: int, conversation: PickledConversation) -> None:
        """Adds a conversation of the input `number`."""
        size = conversation.num_characters
        text = f"{self.num_read} {size} {conversation.id}".encode()
        # The hash depends only on position, size and id, so the sample is reproducible.
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        if key < self._max_hash:
            heapq.heappush(self._heap, (-key, self.num_read, number, conversation))
            self.characters += size
        self.num_read += 1
        self.characters_read += size
        if self.max_characters is None:
            return
        while self.characters > self.max_characters and len(self._heap) > 2:
            negative_hash, _, _, removed = heapq.heappop(self._heap)
            self._max_hash = -negative_hash
            self.characters -= removed.num_characters

    def list_in_order(self) -> list[tuple[int, Conversation]]:
        """Returns numbers of inputs and conversations in the order in which they were added."""
        entries = sorted(self._heap, key=lambda entry: entry[1])
        return [(number, pickle.loads(pickled.data)) for _, _, number, pickled in entries]
