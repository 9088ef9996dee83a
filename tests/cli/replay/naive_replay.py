"""A second, deliberately naive replay to compare with: lists, one conversation at a time, no batch.

It shares no code with the package. The loop follows the definition in docs/guides/replay.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ops.reference import drafting

Turns = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt, completion) of each turn, as token ids."""


@dataclass
class NaiveCounts:
    """Tokens and steps; steps by number of drafted and of accepted tokens."""

    tokens: int = 0
    steps: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


def draft_ngram(
    context: list[int], match_policy: str, max_len: int | None, **lookup: int
) -> list[int]:
    limit = drafting.UNLIMITED if max_len is None else max_len
    policy = int(match_policy == "latest")
    return drafting.draft_for(context, match_policy=policy, max_len=limit, **lookup)[0]


def naive_replay(
    conversations: Sequence[Turns], draft_of: Callable[[list[int]], list[int]]
) -> NaiveCounts:
    """Counts a replay. ``draft_of`` returns the draft for a context."""
    counts = NaiveCounts()
    for turns in conversations:
        context: list[int] = []
        for prompt, completion in turns:
            context += prompt
            todo = list(completion)
            if todo:
                context.append(todo.pop(0))  # the first token comes from prefill
            while todo:
                draft = draft_of(context)
                accepted = 0
                for drafted, recorded in zip(draft, todo, strict=False):
                    if drafted != recorded:
                        break
                    accepted += 1
                yielded = todo[: accepted + 1]
                del todo[: accepted + 1]
                context += yielded
                counts.steps += 1
                counts.tokens += len(yielded)
                counts.drafted[len(draft)] += 1
                counts.accepted[accepted] += 1
    return counts
