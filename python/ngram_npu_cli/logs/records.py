"""Recorded conversations: the data classes. `formats` reads them from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""A message for chat templates: "role" and "content", both text, possibly "tool_calls", ..."""


@dataclass(frozen=True)
class Turn:
    """One turn: the model's input and its answer.

    It has either both lists of token ids, or the completion's text with a prompt or messages.
    Token ids are used if they are present.

    Attributes:
        prompt: text given to the model; tool outputs are part of the text.
        completion: text of the answer; may be empty.
        prompt_token_ids: token ids of the whole prompt, used as they are (no template).
        completion_token_ids: token ids of the completion, used as they are.
        messages: instead of a prompt, the messages since the last turn (system, user, tools).
        answer: the completion as a message, if it was recorded as one.
        tools: definitions of the tools offered to the model from this turn on.
        raw: whether the prompt is the model's whole input, including the template.
    """

    prompt: str | None = None
    completion: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    answer: Message | None = None
    tools: tuple[Any, ...] = ()
    raw: bool = False

    @property
    def has_token_ids(self) -> bool:
        """Whether this turn needs no tokenizer."""
        return self.prompt_token_ids is not None and self.completion_token_ids is not None

    def messages_or_prompt(self) -> tuple[Message, ...]:
        """The messages, or the prompt as a user message."""
        return self.messages or ({"role": "user", "content": self.prompt or ""},)


@dataclass(frozen=True)
class Conversation:
    """A recorded conversation: turns that share one growing context.

    Attributes:
        id: its name in the recording; need not be unique.
        turns: in order, at least one.
        where: file and line for messages ("file.jsonl:3"); empty if it is not from a file.
        scope: value of the record's field that says whose text it is; None if none was asked for.
    """

    id: str
    turns: tuple[Turn, ...]
    where: str = ""
    scope: str | int | None = None

    @property
    def has_token_ids(self) -> bool:
        """Whether the turns have token ids (either all turns of a conversation or none)."""
        return all(turn.has_token_ids for turn in self.turns)

    @property
    def num_characters(self) -> int:
        """Characters of all prompts and completions; a token id counts as four."""
        total = 0
        for turn in self.turns:
            total += len(turn.prompt or "") + len(turn.completion or "")
            total += sum(len(message["content"]) for message in turn.messages)
            if not turn.completion:
                ids = (turn.prompt_token_ids or (), turn.completion_token_ids or ())
                total += 4 * sum(map(len, ids))
        return total
