"""A second, deliberately naive replay to compare with: lists, one conversation at a time, no batch.

It shares no code with the package. The lookup follows the definition in docs/ops/ngram_propose.md,
the loop the one in docs/guides/replay.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Turns = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt, completion) of each turn, as token ids."""


@dataclass
class NaiveCounts:
    """Tokens and steps; steps by number of drafted and of accepted tokens."""

    tokens: int = 0
    steps: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


def naive_draft(
    context: Sequence[int],
    min_n: int,
    max_n: int,
    k: int,
    match_policy: str = "earliest",
    overlap: bool = False,
    max_len: int | None = None,
) -> list[int]:
    t = list(context)
    best_length, best_end = 0, -1
    for end in range(len(t) - 1):
        length = 0
        while length < max_n and length <= end and t[end - length] == t[len(t) - 1 - length]:
            length += 1
        if length > best_length or (length == best_length and match_policy == "latest"):
            best_length, best_end = length, end
    if best_length < min_n:
        return []
    wanted = k if max_len is None else min(k, max_len - len(t))
    draft: list[int] = []
    while len(draft) < wanted:
        source = best_end + 1 + len(draft)
        if source < len(t):
            draft.append(t[source])
        elif overlap:
            draft.append(draft[source - len(t)])
        else:
            break
    return draft


def naive_replay(
    conversations: Sequence[Turns],
    draft_of: Callable[..., list[int]] = naive_draft,
    **lookup: object,
) -> NaiveCounts:
    """Counts a replay. ``draft_of`` returns the draft for a context and ``lookup``."""
    counts = NaiveCounts()
    for turns in conversations:
        context: list[int] = []
        for prompt, completion in turns:
            context += prompt
            todo = list(completion)
            if todo:
                context.append(todo.pop(0))  # the first token comes from prefill
            while todo:
                draft = draft_of(context, **lookup)
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
