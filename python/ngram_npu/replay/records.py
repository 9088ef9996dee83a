"""Recorded conversations: the data classes. `formats` reads them from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Conversation", "Message", "Turn"]

Message = Mapping[str, Any]
"""As chat templates take it: "role" and "content", both text, perhaps "tool_calls" and others."""


@dataclass(frozen=True)
class Turn:
    """One exchange: what the model was given and what it answered.

    Either token ids, both lists of them, or the completion's text with a prompt or messages.
    Where there are token ids, they are used.

    Attributes:
        prompt: text given to the model; tool outputs and the like are just text in it.
        completion: text the model answered; may be empty.
        prompt_token_ids: token ids of the whole prompt, used as they are (no template).
        completion_token_ids: token ids of the completion, used as they are.
        messages: in place of a prompt, what came since the turn before: of system, user, tools.
        answer: the completion as a message, where it was one.
        tools: definitions of the tools offered to the model from this turn on.
        raw: the prompt is what the model was given, its template included.
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
        """The messages; a prompt is one of the user's."""
        return self.messages or ({"role": "user", "content": self.prompt or ""},)


@dataclass(frozen=True)
class Conversation:
    """A recorded conversation: one growing context over its turns.

    Attributes:
        id: the recording's own name for it; need not be unique.
        turns: in order, at least one.
        where: where it was read, for messages ("file.jsonl:3"); empty if it was not read.
    """

    id: str
    turns: tuple[Turn, ...]
    where: str = ""

    @property
    def has_token_ids(self) -> bool:
        """Whether every turn carries token ids (turns of one conversation are all alike)."""
        return all(turn.has_token_ids for turn in self.turns)

    @property
    def num_characters(self) -> int:
        """Of all texts, prompts and completions; of token ids, four for each."""
        total = 0
        for turn in self.turns:
            total += len(turn.prompt or "") + len(turn.completion or "")
            total += sum(len(message["content"]) for message in turn.messages)
            if not turn.completion:
                ids = (turn.prompt_token_ids or (), turn.completion_token_ids or ())
                total += 4 * sum(map(len, ids))
        return total
