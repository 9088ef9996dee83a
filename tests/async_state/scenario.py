"""A random scenario: its target model, its requests and its options."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ngram_npu import NgramConfig
from ngram_npu.async_state import AsyncConfig, AsyncSpecState, KVGroup, MergeConfig

from async_state.devices import POLICIES, Countdown, LateDevice, PlainDevice

DEVICES = ("cpu", *POLICIES)
DRAFTING = ("padded", "trimmed", "any")
RECONCILING = ("late", "at once", "any")

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
    """The target model, with a KV cache of `slots[g]` slots for each group g.

    Its next token depends on every token, position and KV slot of the context. The value stored for
    a token mixes the token, its position and the hash of all earlier tokens. The hash at a token is
    the sum of the values read through the block table. The model knows the hashes of all correct
    contexts and predicts WRONG for any other, so that every error gives a wrong token at once.
    """

    slots: Sequence[int]
    seed: int
    next_token: dict[int, int] = field(default_factory=dict)
    kv: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.kv = [[rng.getrandbits(64) for _ in range(count)] for count in self.slots]

    def decode(self, prompt: Sequence[int], length: int, period: int, repeats: float) -> list[int]:
        """Decodes one request greedily, one token at a time, and learns its contexts.

        The result is the expected text of the request.
        """
        tokens = list(prompt)
        context = 0
        for position in range(length):
            before = context
            for group in range(len(self.slots)):
                stored = _stored(tokens[position], position, before, group)
                context = (context + stored * _weight(position)) & _MASK
            if position < len(tokens) - 1:
                # Inside the prompt, the prediction is not used, but must be deterministic.
                self.next_token.setdefault(context, context % VOCAB)
                continue
            repeat = (context >> 20) % 1000 < repeats * 1000 and len(tokens) >= period
            following = tokens[-period] if repeat else context % VOCAB
            tokens.append(self.next_token.setdefault(context, following))
        return tokens[:length]

    def store(self, group: int, slot: int, token: int, position: int, before: int) -> None:
        self.kv[group][slot] = _stored(token, position, before, group)

    def attend(self, slots: Sequence[Sequence[int]], before: int, first: int) -> int:
        """Returns the hash of a context after the slots of each group, from position `first`."""
        for group, listed in enumerate(slots):
            kv = self.kv[group]
            for position, slot in enumerate(listed, first):
                stored = kv[slot] if 0 <= slot < len(kv) else slot
                before = (before + stored * _weight(position)) & _MASK
        return before

    def predict(self, context: int) -> int:
        return self.next_token.get(context, WRONG)


@dataclass
class Request:
    uid: int
    prompt: list[int]
    decoded: list[int]
    """Prompt and output of plain decoding, up to the capacity of a row."""
    expected_tokens: list[int]
    """The expected text: `decoded` up to the stop token or the maximum length."""
    arrival: int
    tokens: list[int] = field(default_factory=list)
    """The tokens known to the scheduler."""
    computed: int = 0
    """Upper bound, with all drafts in flight accepted; likewise `upper`, the length."""
    upper: int = 0
    exact_computed: int = 0
    row: int = -1
    residency: int = 0
    """Number of admissions so far."""
    blocks: list[list[int]] = field(default_factory=list)
    kept_blocks: bool = False
    drops_in_flight: bool = False
    """Whether the tokens of steps in flight are dropped when the request is preempted."""
    position: int = -1
    """Batch position in the last step if it sampled there, otherwise -1."""
    faulty: bool = False
    """Whether the host knows that the sampler returned an invalid result."""
    finished: bool = False

    @property
    def is_running(self) -> bool:
        return self.row >= 0


class Scenario:
    """The random choices of a run."""

    def __init__(
        self, rng: random.Random, device: str | None = None, draft_on: Any = "auto"
    ) -> None:
        self.rng = rng
        pick = rng.choice
        self.device_name = device or pick(DEVICES)
        self.k = rng.randint(1, 4)
        self.drafting = pick(DRAFTING)
        self.reconciling = pick(RECONCILING)
        self.dense_rows = pick((True, False))
        self.static_sampled = pick((True, False))
        self.unpadded = pick((True, False))
        self.max_rows = rng.randint(1, 5)
        self.capacity = rng.randint(12, 40)
        self.step_tokens = rng.randint(self.k + 2, 24)
        self.block_sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 2))]
        # From just enough for one request to enough for all requests.
        self.num_blocks = [
            -(-self.capacity // size) * rng.randint(1, self.max_rows) + rng.randint(0, 3)
            for size in self.block_sizes
        ]
        self.preemption = pick((0.0, 0.0, 0.1, 0.3))
        self.skipping = pick((0.0, 0.0, 0.1, 0.3))
        self.shuffling = pick((0.0, 0.2, 0.8))
        self.failing = pick((0.0, 0.0, 0.1))
        self.bad_samples = pick((0.0, 0.0, 0.05))
        self.engine = pick(("scan", "index"))
        self.ladder = self.engine == "index" and pick((False, False, True))
        self.chunk = rng.randint(1, self.step_tokens)
        self.target = Target(
            [n * size for n, size in zip(self.num_blocks, self.block_sizes, strict=True)],
            rng.getrandbits(32),
        )
        # A separate generator, so that the other choices do not depend on the neural drafter.
        self.neural_rng = random.Random(self.target.seed)
        self.neural = self.neural_rng.random() < 0.4
        self.neural_width = self.neural_rng.randint(1, self.k)
        self.neural_ragged, self.neural_has_costs, extend = (
            self.neural_rng.random() < 0.5 for _ in range(3)
        )
        self.neural_hits = self.neural_rng.choice((0.0, 0.2, 0.5, 1.0))
        self.requests = list(self._draw_requests())
        self.config = replace(self._draw_config(extend), draft_on=draft_on)

    def _draw_requests(self) -> Iterator[Request]:
        rng = self.rng
        repeats = rng.choice((0.0, 0.5, 0.8, 0.95, 1.0))
        for uid in range(rng.randint(1, 7)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, self.capacity - 1))]
            if rng.random() < 0.5:
                prompt = prompt[: rng.randint(1, 6)]
            length = rng.randint(len(prompt) + 1, self.capacity)
            decoded = self.target.decode(prompt, self.capacity, rng.randint(1, 4), repeats)
            expected = decoded[:length]
            stop = rng.choice((None, None, rng.randrange(VOCAB)))
            for n in range(len(prompt), length):
                if expected[n] == stop:
                    expected = expected[: n + 1]
                    break
            yield Request(uid, prompt, decoded, expected, rng.choice((0, 0, rng.randint(0, 12))))

    def _draw_sizes(self) -> dict[str, Any]:
        if self.ladder:
            probability = self.rng.choice((None, 0.5, 0.1))
            costs = np.random.default_rng(self.rng.getrandbits(32)).integers(0, 40, (16, 32))
            return {
                "sizes": "ladder",
                "min_draft_probability": probability,
                "costs": None if probability is None else costs,
            }
        min_n = self.rng.randint(1, 2)
        return {
            "min_n": min_n,
            "max_n": min_n + self.rng.randint(0, 2),
            "match_policy": self.rng.choice(("earliest", "latest")),
        }

    def _draw_merge(self, ngram: NgramConfig, extend: bool) -> MergeConfig:
        pick, costs = self.neural_rng.choice, None
        if ngram.cost_table is None:
            max_cost = pick((2, 8, 40))
            costs = sorted(self.neural_rng.randint(0, max_cost) for _ in range(16))[::-1]
        return MergeConfig(pick((0, 1, 2)), pick((0.0, 0.4)), extend, costs)

    def _draw_config(self, extend: bool) -> AsyncConfig:
        ngram = NgramConfig(
            **self._draw_sizes(),
            k=self.k,
            overlap=self.rng.choice((False, True)),
            max_len=self.rng.choice((None, self.capacity)),
            vocab_size=self.rng.choice((None, VOCAB + 1)),
        )
        return AsyncConfig(
            ngram=ngram,
            merge=self._draw_merge(ngram, extend) if self.neural else None,
            max_rows=self.max_rows,
            row_capacity=self.capacity,
            max_step_tokens=self.step_tokens,
            kv_groups=tuple(
                KVGroup(block_size=size, max_blocks=-(-self.capacity // size))
                for size in self.block_sizes
            ),
            engine=self.engine,
            disable_padded_drafter_batch=self.unpadded,
            slot_dtype=self.rng.choice(("int32", "int64")),
        )

    def make_state(self) -> tuple[AsyncSpecState, LateDevice | PlainDevice, Countdown]:
        late = self.device_name != "cpu"
        device = LateDevice(self.device_name, self.rng) if late else PlainDevice()
        state = AsyncSpecState(self.config, runtime=device)
        return state, device, Countdown(state)
