"""A stand-in for the state of vLLM's V2 runner, of a few tensors."""

from __future__ import annotations

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
        idx_mapping=torch.tensor(rows),
        idx_mapping_np=np.array(rows, np.int32),
    )
