"""A random scenario: its target model, its requests and its options."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ngram_npu import NgramConfig
from ngram_npu.async_state import AsyncConfig, KVGroup, MergeConfig

from async_state.devices import POLICIES, LateDevice

DRAFTING_MODES = ("padded", "trimmed", "any")
"""Number of drafts per request and step: always k, the number found, or a random one."""
RECONCILING_MODES = ("late", "at once", "any")
"""When a step is reconciled: in the next step, at its end, or at a random time."""

VOCAB_SIZE = 11
WRONG_TOKEN = VOCAB_SIZE
_MASK = (1 << 64) - 1


def _mix_kv_value(token: int, positions: Sequence[int], context: int, group: int) -> int:
    mixed = 0
    for position in positions:
        mixed = mixed * 0xA0761D6478BD642F + position * 0xC2B2AE3D27D4EB4F
    mixed = (token * 0x9E3779B97F4A7C15 + mixed + group) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 + context * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 32)


def _compute_weight(position: int) -> int:
    return position * 0xD6E8FEB86659FD93 | 1


@dataclass
class Rope:
    """The rotary positions of a request, in each of D dimensions."""

    dims: int
    prompt: Any = None
    """[D,L], the positions of the first L tokens, if any."""
    delta: int = 0
    """Position minus index of all later tokens."""

    def get_positions(self, index: int) -> list[int]:
        if self.prompt is not None and index < self.prompt.shape[1]:
            return [int(position) for position in self.prompt[:, index]]
        return [index + self.delta] * self.dims


@dataclass
class Target:
    """The target model, with a KV cache of `num_slots[g]` slots for each KV group g in each stage
    of the pipeline. A stage reads the hash of the stage before it instead of the token.

    Its next token depends on every token, position and KV slot of the context. The value stored for
    a token mixes the token, its rotary positions and the hash of all earlier tokens. The hash at a
    token is the sum of the values read through the block table. The model knows the hashes of all
    correct contexts and predicts WRONG_TOKEN for any other, so every error gives a wrong token at
    once.
    """

    num_slots: Sequence[int]
    seed: int
    num_stages: int = 1
    next_token: dict[int, int] = field(default_factory=dict)
    kv: list[list[list[int]]] = field(init=False)
    """[stage][group][slot]"""

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.kv = [
            [[rng.getrandbits(64) for _ in range(count)] for count in self.num_slots]
            for _ in range(self.num_stages)
        ]

    def decode(
        self,
        prompt: Sequence[int],
        rope: Rope,
        length: int,
        period: int,
        repeat_probability: float,
    ) -> list[int]:
        """Decodes one request greedily, one token at a time, and records its contexts. Returns the
        expected text of the request, in which some tokens equal those `period` positions before."""
        tokens = list(prompt)
        contexts = [0] * self.num_stages
        for position in range(length):
            context, positions = tokens[position], rope.get_positions(position)
            for stage, earlier_context in enumerate(contexts):
                token, context = context, earlier_context
                for group in range(len(self.num_slots)):
                    value = _mix_kv_value(token, positions, earlier_context, group)
                    context = (context + value * _compute_weight(position)) & _MASK
                contexts[stage] = context
            if position < len(tokens) - 1:
                # Inside the prompt, the prediction is not used, but must be deterministic.
                self.next_token.setdefault(context, context % VOCAB_SIZE)
                continue
            repeats = (context >> 20) % 1000 < repeat_probability * 1000 and len(tokens) >= period
            token = tokens[-period] if repeats else context % VOCAB_SIZE
            tokens.append(self.next_token.setdefault(context, token))
        return tokens[:length]

    def store(
        self, stage: int, group: int, slot: int, token: int, positions: Sequence[int], context: int
    ) -> None:
        self.kv[stage][group][slot] = _mix_kv_value(token, positions, context, group)

    def attend(self, stage: int, slots: Sequence[Sequence[int]], context: int, first: int) -> int:
        """Returns the hash of `context` with more tokens: those whose values are in `slots[g]` for
        each KV group g, the first of them at position `first`."""
        for group, group_slots in enumerate(slots):
            kv = self.kv[stage][group]
            for position, slot in enumerate(group_slots, first):
                value = kv[slot] if 0 <= slot < len(kv) else slot
                context = (context + value * _compute_weight(position)) & _MASK
        return context

    def predict(self, context: int) -> int:
        return self.next_token.get(context, WRONG_TOKEN)


@dataclass
class Request:
    """A request, and what the scheduler knows of it."""

    uid: int
    prompt: list[int]
    rope: Rope
    decoded_tokens: list[int]
    """Prompt and output of plain decoding, up to the capacity of a row."""
    expected_tokens: list[int]
    """The expected text: `decoded_tokens` up to the stop token or the maximum length."""
    arrival_step: int
    scope: int = 0
    store_ends: dict[int, int] = field(default_factory=dict)
    """By admission: length after the step in which the text reached its end. Tokens of later steps
    must not be stored."""
    tokens: list[int] = field(default_factory=list)
    """The tokens known to the scheduler."""
    upper_computed: int = 0
    """Number of computed tokens if all drafts in flight are accepted."""
    upper_length: int = 0
    """Length if all drafts in flight are accepted."""
    exact_computed: int = 0
    """Number of computed tokens after the last reconciled step."""
    row: int = -1
    num_admissions: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    keeps_blocks: bool = False
    """Whether the preempted request keeps its KV blocks."""
    ignores_results_in_flight: bool = False
    """Whether the tokens of steps in flight are dropped when the request is preempted."""
    position: int = -1
    """Batch position in the last step if it sampled there, otherwise -1."""
    is_invalid: bool = False
    """Whether the host knows that the sampler returned an invalid result."""
    is_finished: bool = False

    @property
    def is_running(self) -> bool:
        return self.row >= 0


class Scenario:
    """The random choices of a run."""

    def __init__(self, rng: random.Random, policy: str, has_all_options: bool = False) -> None:
        """
        Args:
            policy: when the device of the last stage runs its work, one of POLICIES.
            has_all_options: whether device graphs, M-RoPE and two pipeline stages are combined;
                otherwise, each is used in half of the scenarios.
        """
        self.rng = rng
        pick = rng.choice
        self.policy = policy
        self.k = rng.randint(1, 4)
        self.drafting_mode = pick(DRAFTING_MODES)
        self.reconciling_mode = pick(RECONCILING_MODES)
        self.dense_rows = pick((True, False))
        self.reuses_sampled_tensor = pick((True, False))
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
        self.preempt_probability = pick((0.0, 0.0, 0.1, 0.3))
        self.skip_probability = pick((0.0, 0.0, 0.1, 0.3))
        self.shuffle_probability = pick((0.0, 0.2, 0.8))
        self.failure_probability = pick((0.0, 0.0, 0.1))
        self.invalid_probability = pick((0.0, 0.0, 0.05))
        self.max_chunk = rng.randint(1, self.step_tokens)
        num_slots = zip(self.num_blocks, self.block_sizes, strict=True)
        seed = rng.getrandbits(32)
        # Separate generators, so that the other choices do not depend on the options.
        self._draw_options(random.Random(seed + 1), has_all_options)
        self.target = Target([count * size for count, size in num_slots], seed, self.num_stages)
        self.neural_rng = random.Random(seed)
        self.neural = self.neural_rng.random() < 0.4
        self.neural_width = self.neural_rng.randint(1, self.k)
        self.neural_has_counts, self.neural_has_costs, extend = (
            self.neural_rng.random() < 0.5 for _ in range(3)
        )
        self.sends_drafts |= self.neural
        self.neural_accuracy = self.neural_rng.choice((0.0, 0.2, 0.5, 1.0))
        self.requests = list(self._draw_requests())
        self.config = self._draw_config(extend)
        is_alone = self.num_stages == 1 or self.sends_drafts
        self.has_store = is_alone and not self.neural and rng.random() < 0.6
        """Whether the last stage has a store. After a failure in one stage, stores of several
        stages could differ."""

    def _draw_options(self, rng: random.Random, has_all: bool) -> None:
        self.uses_graphs = rng.random() < 0.5 or has_all
        """Whether the corrections are replayed from a device graph."""
        self.has_padded_graphs = rng.random() < 0.5
        """Whether a graph contains the corrections of all rows, not only those of the batch."""
        self.position_dims = 3 if rng.random() < 0.5 or has_all else 1
        self.num_stages = 2 if rng.random() < 0.5 or has_all else 1
        """Number of pipeline stages."""
        self.sends_drafts = rng.random() < 0.5
        """Whether the last stage sends its drafts. Otherwise all stages draft alike, unless there
        is a neural drafter."""
        self._stage_rng = rng

    def _draw_requests(self) -> Iterator[Request]:
        rng = self.rng
        repeat_probability = rng.choice((0.0, 0.5, 0.8, 0.95, 1.0))
        for uid in range(rng.randint(1, 7)):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, self.capacity - 1))]
            if rng.random() < 0.5:
                prompt = prompt[: rng.randint(1, 6)]
            length = rng.randint(len(prompt) + 1, self.capacity)
            period = rng.randint(1, 4)
            rope = self._draw_rope(uid, len(prompt))
            decoded = self.target.decode(prompt, rope, self.capacity, period, repeat_probability)
            expected = decoded[:length]
            stop = rng.choice((None, None, rng.randrange(VOCAB_SIZE)))
            for n in range(len(prompt), length):
                if expected[n] == stop:
                    expected = expected[: n + 1]
                    break
            arrival_step = rng.choice((0, 0, rng.randint(0, 12)))
            scope = uid % 3 - 1
            yield Request(uid, prompt, rope, decoded, expected, arrival_step, scope)

    def _draw_rope(self, uid: int, length: int) -> Rope:
        """Returns the positions of a text, or of a prompt with images."""
        rng = np.random.default_rng((self.target.seed, uid))
        if self.position_dims == 1 or rng.random() < 0.3:
            return Rope(self.position_dims)
        shape = self.position_dims, rng.integers(1, length + 1)
        return Rope(self.position_dims, rng.integers(0, 50, shape), int(rng.integers(-9, 10)))

    def _draw_sizes(self) -> dict[str, Any]:
        min_n = self.rng.randint(1, 2)
        return {
            "min_n": min_n,
            "max_n": min_n + self.rng.choice((0, 1, 2, 14)),
            "match_policy": self.rng.choice(("earliest", "latest")),
            "min_draft_probability": self.rng.choice((None, None, 0.5, 0.1)),
        }

    def _draw_merge(self, extend: bool) -> MergeConfig:
        pick = self.neural_rng.choice
        return MergeConfig(pick((0, 1, 2)), pick((0.0, 0.4)), extend)

    def _draw_config(self, extend: bool) -> AsyncConfig:
        ngram = NgramConfig(
            **self._draw_sizes(),
            k=self.k,
            overlap=self.rng.choice((False, True)),
            max_len=self.rng.choice((None, self.capacity)),
            vocab_size=self.rng.choice((None, VOCAB_SIZE + 1)),
        )
        return AsyncConfig(
            ngram=ngram,
            merge=self._draw_merge(extend) if self.neural else None,
            max_rows=self.max_rows,
            row_capacity=self.capacity,
            max_step_tokens=self.step_tokens,
            kv_groups=tuple(
                KVGroup(block_size=size, max_blocks=-(-self.capacity // size))
                for size in self.block_sizes
            ),
            disable_padded_drafter_batch=self.unpadded,
            slot_dtype=self.rng.choice(("int32", "int64")),
            position_dims=self.position_dims,
        )

    def make_device(self, stage: int) -> LateDevice:
        """Returns the device of a pipeline stage. All but the last have a random policy."""
        if stage == self.num_stages - 1:
            return LateDevice(self.policy, self.rng)
        return LateDevice(self._stage_rng.choice(POLICIES), self._stage_rng)
