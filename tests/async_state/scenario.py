"""What varies from one scenario to the next, and the requests of one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import AsyncConfig, AsyncSpecState, CpuDevice, KVGroup, MergeConfig
from ngram_npu.host_drafting import Stop

from async_state.failing import Countdown
from async_state.late import POLICIES, LateDevice
from async_state.model import VOCAB, Target

DEVICES = ("cpu", *POLICIES)
DRAFTING = ("padded", "trimmed", "any")
RECONCILING = ("late", "at once", "any")


class PlainDevice(CpuDevice):
    """The plain CPU with the test interface of a LateDevice."""

    def __init__(self) -> None:
        self.without: set[str] = set()

    def launch(self, work: Any, stream: str = "main") -> None:
        work()

    def drain(self) -> None:
        pass

    def critical(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class Request:
    uid: int
    prompt: list[int]
    decoded: list[int]
    """Prompt and output, as plain decoding gives them, as far as a row reaches."""
    wanted: list[int]
    """Up to its stop token or its last."""
    arrival: int
    tokens: list[int] = field(default_factory=list)
    """The scheduler's knowledge of the request."""
    computed: int = 0
    """Counting all drafts in flight as accepted; so does `upper`."""
    upper: int = 0
    exact_computed: int = 0
    row: int = -1
    residency: int = 0
    """Counts its admissions."""
    blocks: list[list[int]] = field(default_factory=list)
    kept_blocks: bool = False
    drops_in_flight: bool = False
    """Preempted, it forgets what steps in flight sample for it."""
    position: int = -1
    """In the last step, if it sampled there."""
    faulty: bool = False
    """The sampler broke its contract for it, as the host knows by now."""
    finished: bool = False
    stop: Stop | None = None
    """What the drafter knows of its end."""

    @property
    def running(self) -> bool:
        return self.row >= 0


class Scenario:
    """Drawn from `rng`, which may be hypothesis's."""

    def __init__(self, rng: random.Random, device: str | None = None, **fixed: Any) -> None:
        self.rng = rng
        pick = rng.choice
        self.device_name = device or pick(DEVICES)
        self.k = fixed.get("k", rng.randint(1, 4))
        self.drafting = fixed.get("drafting", pick(DRAFTING))
        self.reconciling = fixed.get("reconciling", pick(RECONCILING))
        self.dense_rows = pick((True, False))
        self.static_sampled = pick((True, False))
        self.unpadded = fixed.get("unpadded", pick((True, False)))
        self.max_rows = rng.randint(1, 5)
        self.capacity = rng.randint(12, 40)
        self.step_tokens = rng.randint(self.k + 2, 24)
        self.block_sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 2))]
        # From barely enough for one request to more than is ever needed.
        self.num_blocks = [
            -(-self.capacity // size) * rng.randint(1, self.max_rows) + rng.randint(0, 3)
            for size in self.block_sizes
        ]
        self.preemption = pick((0.0, 0.0, 0.1, 0.3))
        self.skipping = pick((0.0, 0.0, 0.1, 0.3))
        self.shuffling = pick((0.0, 0.2, 0.8))
        self.failing = fixed.get("failing", pick((0.0, 0.0, 0.1)))
        self.bad_samples = fixed.get("bad_samples", pick((0.0, 0.0, 0.05)))
        self.engine = fixed.get("engine", pick(("scan", "index")))
        self.ladder = self.engine == "index" and pick((False, False, True))
        self.chunk = rng.randint(1, self.step_tokens)
        self.target = Target(
            [n * size for n, size in zip(self.num_blocks, self.block_sizes, strict=True)],
            rng.getrandbits(32),
        )
        # Drawn apart, so that the other scenarios stay those of a loop without a neural drafter.
        self.neural_rng = random.Random(self.target.seed)
        self.neural = fixed.get("neural", self.neural_rng.random() < 0.4)
        self.neural_width = self.neural_rng.randint(1, self.k)
        self.neural_ragged, self.neural_confident, extend = (
            self.neural_rng.random() < 0.5 for _ in range(3)
        )
        self.neural_hits = self.neural_rng.choice((0.0, 0.2, 0.5, 1.0))
        self.requests = list(self._requests())
        self.config = replace(self._config(extend), draft_on=fixed.get("draft_on", "auto"))

    def _requests(self) -> Iterator[Request]:
        rng = self.rng
        repeats = rng.choice((0.0, 0.5, 0.8, 0.95, 1.0))
        for uid in range(rng.randint(1, 7)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, self.capacity - 1))]
            if rng.random() < 0.5:
                prompt = prompt[: rng.randint(1, 6)]
            length = rng.randint(len(prompt) + 1, self.capacity)
            decoded = self.target.decode(prompt, self.capacity, rng.randint(1, 4), repeats)
            wanted = decoded[:length]
            stop = rng.choice((None, None, rng.randrange(VOCAB)))
            for n in range(len(prompt), length):
                if wanted[n] == stop:
                    wanted = wanted[: n + 1]
                    break
            yield Request(uid, prompt, decoded, wanted, rng.choice((0, 0, rng.randint(0, 12))))

    def _sizes(self) -> dict[str, Any]:
        if self.ladder:
            least = self.rng.choice((None, 0.5, 0.1))
            costs = np.random.default_rng(self.rng.getrandbits(32)).integers(0, 40, (16, 32))
            return {
                "sizes": "ladder",
                "min_draft_probability": least,
                "costs": None if least is None else costs,
            }
        min_n = self.rng.randint(1, 2)
        return {
            "min_n": min_n,
            "max_n": min_n + self.rng.randint(0, 2),
            "match_policy": self.rng.choice(("earliest", "latest")),
        }

    def _merge(self, ngram: NgramConfig, extend: bool) -> MergeConfig:
        pick, costs = self.neural_rng.choice, None
        if ngram.cost_table is None:
            dearest = pick((2, 8, 40))
            costs = sorted(self.neural_rng.randint(0, dearest) for _ in range(16))[::-1]
        return MergeConfig(pick((0, 1, 2)), pick((0.0, 0.4)), extend, costs)

    def _config(self, extend: bool) -> AsyncConfig:
        ngram = NgramConfig(
            **self._sizes(),
            k=self.k,
            overlap=self.rng.choice((False, True)),
            max_len=self.rng.choice((None, self.capacity)),
            vocab_size=self.rng.choice((None, VOCAB + 1)),
        )
        return AsyncConfig(
            ngram=ngram,
            merge=self._merge(ngram, extend) if self.neural else None,
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

    def state(self) -> tuple[AsyncSpecState, LateDevice | PlainDevice, Countdown]:
        late = self.device_name != "cpu"
        device = LateDevice(self.device_name, self.rng) if late else PlainDevice()
        state = AsyncSpecState(self.config, runtime=device)
        return state, device, Countdown(state)


def as_rows(tensor: torch.Tensor, count: int) -> Sequence[int]:
    listed: list[int] = tensor[:count].tolist()
    return listed
