"""Computes the rotary positions of models with several position dimensions (M-RoPE)."""

from __future__ import annotations

import numpy as np

from ngram_npu.async_state.batch import Admission, AsyncConfig
from ngram_npu.async_state.host_state import RowChanges, Step, is_integer, to_int32_vector
from ngram_npu.async_state.upload import Int32Array

_INT32_MAX = 2**31 - 1


class RopeOffsets:
    """The rotary position minus the index of each token, in each of D dimensions.

    The host computes these offsets, and the device adds the corrected index. The offsets need no
    correction: the host's index of a token is exact until the request has drafts, and all tokens
    after the prompt have the same offset.
    """

    def __init__(self, config: AsyncConfig) -> None:
        dims = config.position_dims
        self._buffer = np.zeros((dims if dims > 1 else 0, config.max_step_tokens), np.int32)
        self._prompts = [np.zeros((dims, 0), np.int32)] * config.max_rows
        """[D,L] by slot: the offsets of the first L tokens."""
        self._lengths = np.zeros(config.max_rows, np.int32)
        self._deltas = np.zeros(config.max_rows, np.int32)
        """The offset of all later tokens, by slot."""

    def plan(self, changes: RowChanges) -> list[Int32Array]:
        """Returns the offsets [D,L] of the admitted prompts; changes nothing.

        Raises ValueError if the positions or the delta of an admission are invalid.
        """
        admissions = zip(changes.admissions, changes.token_ids, strict=True)
        if len(self._buffer):
            return [self._plan_prompt(admission, len(tokens)) for admission, tokens in admissions]
        for admission, _ in admissions:
            if admission.rope_positions is not None or admission.rope_delta:
                raise ValueError(
                    "new/resumed: rope_positions, rope_delta: expected None and 0 with "
                    "position_dims=1"
                )
        return []

    def _plan_prompt(self, admission: Admission, length: int) -> Int32Array:
        dims, delta = len(self._buffer), admission.rope_delta
        if not is_integer(delta) or abs(delta) > _INT32_MAX:
            raise ValueError(f"new/resumed: rope_delta: expected 32 bits, got {delta!r}")
        if admission.rope_positions is None:
            return np.zeros((dims, 0), np.int32)
        positions = np.asarray(admission.rope_positions)
        if positions.ndim != 2 or len(positions) != dims or positions.shape[1] > length:
            raise ValueError(
                f"new/resumed: rope_positions: expected [{dims}, at most {length}], "
                f"got {list(positions.shape)}"
            )
        flat = to_int32_vector(positions.reshape(-1), "new/resumed: rope_positions")
        return flat.reshape(positions.shape) - np.arange(positions.shape[1], dtype=np.int32)

    def commit(self, changes: RowChanges, prompts: list[Int32Array]) -> None:
        if not prompts:
            return
        slots = changes.admitted
        self._deltas[slots] = [admission.rope_delta for admission in changes.admissions]
        self._lengths[slots] = [prompt.shape[1] for prompt in prompts]
        for slot, prompt in zip(slots.tolist(), prompts, strict=True):
            self._prompts[slot] = prompt

    def collect(self, step: Step) -> Int32Array:
        """Returns the offsets of the step's tokens, [D * max_step_tokens]; empty without M-RoPE.

        The next call overwrites the result.
        """
        if len(self._buffer):
            counts, computed = step.num_scheduled_tokens, step.host_num_computed
            self._buffer[:, : step.num_step_tokens] = self._deltas[step.slots].repeat(counts)
            for i in np.flatnonzero(computed < self._lengths[step.slots]).tolist():
                prompt = self._prompts[step.slots[i]][:, computed[i] : computed[i] + counts[i]]
                begin = step.query_start_loc[i]
                self._buffer[:, begin : begin + prompt.shape[1]] = prompt
        return self._buffer.reshape(-1)
