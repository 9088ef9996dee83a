"""A stand-in for the state of vLLM's V2 runner, of a few tensors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class RequestState:
    """The part of vLLM's ``RequestState`` that is read, with its arguments."""

    def __init__(self, rows: int, length: int) -> None:
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(rows, length, dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(rows, dtype=torch.int32))
        self.last_sampled_tokens = torch.zeros(rows, 1, dtype=torch.int64)
        self.req_id_to_index: dict[str, int] = {}
        self.free_indices = list(range(rows))
        self.max_model_len = length

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: list[int],
        num_computed_tokens: int,
        max_tokens: int,
    ) -> None:
        row = self.req_id_to_index[req_id] = self.free_indices.pop()
        self.total_len.gpu[row] = 0
        self._write(row, all_token_ids)

    def remove_request(self, req_id: str) -> int | None:
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self.free_indices.append(row)
        return row

    # What a test calls in the runner's place.

    def begin(self, name: str, row: int, tokens: list[int]) -> None:
        """A request in this row, in place of the one there."""
        for other, its_row in list(self.req_id_to_index.items()):
            if its_row == row:
                self.remove_request(other)
        self.free_indices.remove(row)
        self.free_indices.append(row)
        self.add_request(
            req_id=name,
            prompt_len=len(tokens),
            all_token_ids=tokens,
            num_computed_tokens=0,
            max_tokens=1 << 20,
        )

    def sample(self, row: int, tokens: list[int]) -> None:
        """What the runner does before it asks for drafts."""
        self._write(row, tokens)

    def _write(self, row: int, tokens: list[int]) -> None:
        begin = int(self.total_len.gpu[row])
        end = begin + len(tokens)
        self.all_token_ids.gpu[row, begin:end] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len.gpu[row] = end
        self.last_sampled_tokens[row] = tokens[-1]


def batch_of(rows: list[int], names: list[str] | None = None) -> Any:
    """The runner's input batch with the requests of these rows."""
    return SimpleNamespace(
        req_ids=names or ["request"] * len(rows),
        num_reqs=len(rows),
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        idx_mapping_np=np.array(rows, np.int32),
    )


def propose(
    speculator: Any,
    state: RequestState,
    rows: list[int],
    sampled: list[int],
    names: list[str] | None = None,
    **more: Any,
) -> torch.Tensor:
    """As the runner calls it."""
    counts = torch.tensor(sampled, dtype=torch.int32)
    rest = counts, None, state.last_sampled_tokens, *[None] * 3
    drafts: torch.Tensor = speculator.propose(batch_of(rows, names), *[None] * 4, *rest, **more)
    assert drafts.dtype == torch.int64
    return drafts


class RandomState(RequestState):
    """Requests of few different tokens. ``most``: sampled by one in a step."""

    def __init__(self, rows: int, length: int, most: int, seed: int = 0) -> None:
        super().__init__(rows, length)
        self.rng = np.random.default_rng(seed)
        self._most = most

    def fill(self) -> None:
        for row in range(len(self.total_len.gpu)):
            self.begin_one(f"{row}", row)

    def begin_one(self, name: str, row: int, length: int = 40) -> None:
        self.begin(name, row, self.rng.integers(0, 3, length).tolist())

    def steps(self, most: int) -> Iterator[tuple[list[int], list[int]]]:
        """At most so many rows of random steps, and how many tokens each has just sampled."""
        count, length = self.all_token_ids.gpu.shape
        for step in range(60):
            rows = self.rng.permutation(count)[: 1 + step % most].tolist()
            sampled = self.rng.integers(0, self._most + 1, len(rows)).tolist()
            for i, (row, new) in enumerate(zip(rows, sampled, strict=True)):
                if self.total_len.gpu[row] + new > length:
                    self.begin_one(f"{step}", row)
                    sampled[i] = 0
                elif new:
                    self.sample(row, self.rng.integers(0, 3, new).tolist())
            yield rows, sampled
