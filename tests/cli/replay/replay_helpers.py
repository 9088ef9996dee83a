"""Shared by the replay's tests: an example by hand, a scripted proposer, recorded logs as files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ngram_npu_cli.replay import TokenRequest, TokenTurn

Turns = Sequence[tuple[Sequence[int], Sequence[int]]]

_FOLDER = tempfile.TemporaryDirectory(prefix="recorded-")
DATA = Path(_FOLDER.name)
"""The files of data/recorded.jsonl (data/README.md), while the tests run."""
for _line in (Path(__file__).parent / "data" / "recorded.jsonl").read_bytes().splitlines():
    _file = json.loads(_line)
    (DATA / _file["file"]).parent.mkdir(exist_ok=True)
    (DATA / _file["file"]).write_bytes(_file["text"].encode())

EXAMPLE: Turns = (
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 20, 21]),
    ([30, 31], [7, 20, 21, 30, 40]),
    ([50], []),
    ([51], [52]),
)
"""Worked through by hand, for earliest 2-5 and k=5.

Turn 1: 1 from prefill; `9 1` is new: no draft, yields 2. `1 2` is at the front: drafts 3 4 5 6 7,
all accepted, and yields 20. `7 20` is new: no draft, yields 21. 8 tokens in 3 steps.
Turn 2: 7 from prefill; `31 7` is new: yields 20. `7 20` is in turn 1: drafts 21 30 31 7 20, two
are accepted, and yields 40, the end. 4 tokens in 2 steps.
Turns 3 and 4 have no token after the first: no steps.
"""

EXAMPLE_LINE = {
    "id": "example",
    "turns": [{"prompt_token_ids": p, "completion_token_ids": c} for p, c in EXAMPLE],
}
"""The example as a line of a replay file."""


def token_request(turns: Turns, name: str = "r") -> TokenRequest:
    """A replay request made of token ids."""
    return TokenRequest(
        name,
        tuple(TokenTurn(np.array(p, np.int32), np.array(c, np.int32)) for p, c in turns),
    )


class ScriptedProposer:
    """Appends as a proposer must; a function of the row's tokens gives its drafts."""

    def __init__(self, k: int, draft: Callable[[list[int]], list[int]]) -> None:
        self.k = k
        self.draft = draft
        self.calls: list[SimpleNamespace] = []

    def step(
        self,
        token_ids: Any,
        num_tokens: Any,
        sampled_token_ids: Any,
        discard: Any = None,
        row_indices: Any = None,
        advance: bool = False,
    ) -> Any:
        assert advance, "the replay keeps no lengths of its own"
        for array in (token_ids, num_tokens, sampled_token_ids):
            assert array.dtype == np.int32
        batch = len(sampled_token_ids)
        rows = list(range(batch)) if row_indices is None else row_indices.tolist()
        drafts = np.full((batch, self.k), -1, np.int32)
        counts = np.zeros(batch, np.int32)
        sampled = [[t for t in row.tolist() if t >= 0] for row in sampled_token_ids]
        contexts = []
        for i, row in enumerate(rows):
            old = int(num_tokens[row])
            new = old + len(sampled[i])
            token_ids[row, old:new] = sampled[i]
            num_tokens[row] = new
            contexts.append(token_ids[row, :new].tolist())
            draft = self.draft(contexts[-1])
            drafts[i, : len(draft)] = draft
            counts[i] = len(draft)
        self.calls.append(
            SimpleNamespace(rows=rows, row_indices=row_indices, sampled=sampled, contexts=contexts)
        )
        return SimpleNamespace(draft_token_ids=drafts, num_draft_tokens=counts)
