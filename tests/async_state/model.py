"""A target model whose next token depends on every token, position and KV slot of the context.

The value that a layer stores for a token mixes the token, its position and the hash of all earlier
tokens. A token's hash is the sum of the values that it reads through the block table. The model
knows the hashes of all correct contexts and outputs WRONG for any other, so that every error gives
a wrong token at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

VOCAB = 11
WRONG = VOCAB
_MASK = (1 << 64) - 1


def _stored(token: int, position: int, before: int, group: int) -> int:
    mixed = (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + group) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 + before * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 32)


def _weight(position: int) -> int:
    return position * 0xD6E8FEB86659FD93 | 1


@dataclass
class Target:
    """The model; `groups` KV caches of `slots[g]` slots each."""

    slots: Sequence[int]
    seed: int
    next_token: dict[int, int] = field(default_factory=dict)
    kv: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.kv = [[rng.getrandbits(64) for _ in range(count)] for count in self.slots]

    def decode(self, prompt: Sequence[int], length: int, period: int, repeats: float) -> list[int]:
        """Plain greedy decoding of one request, a token at a time: what must come out. All right
        contexts are learnt from it."""
        tokens = list(prompt)
        context = 0
        for position in range(length):
            before = context
            for group in range(len(self.slots)):
                stored = _stored(tokens[position], position, before, group)
                context = (context + stored * _weight(position)) & _MASK
            if position < len(tokens) - 1:
                # Within the prompt: its continuation is known, the model's own word for it too.
                self.next_token.setdefault(context, context % VOCAB)
                continue
            again = (context >> 20) % 1000 < repeats * 1000 and len(tokens) >= period
            following = tokens[-period] if again else context % VOCAB
            tokens.append(self.next_token.setdefault(context, following))
        return tokens[:length]

    def store(self, group: int, slot: int, token: int, position: int, before: int) -> None:
        self.kv[group][slot] = _stored(token, position, before, group)

    def attend(self, slots: Sequence[Sequence[int]], before: int, first: int) -> int:
        """The hash of a context that goes on at position `first` with what the slots of each group
        hold."""
        for group, listed in enumerate(slots):
            kv = self.kv[group]
            for position, slot in enumerate(listed, first):
                found = kv[slot] if 0 <= slot < len(kv) else slot
                before = (before + found * _weight(position)) & _MASK
        return before

    def says(self, context: int) -> int:
        return self.next_token.get(context, WRONG)
