"""How drafts are found: the seam between what vLLM hands over and the kernels."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ngram_npu import _C
from ngram_npu.config import NgramConfig

Int32Array = npt.NDArray[np.int32]


class Engine(Protocol):
    """Drafts for the rows of vLLM's token buffer."""

    name: str

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> tuple[Int32Array, Int32Array]:
        """Up to ``k`` tokens for each row in which something was sampled.

        Args:
            token_ids: [B, max_model_len], the live rows, the sampled tokens already in them.
            num_tokens: [B], their lengths.
            num_sampled: [B], how many of their last tokens this step sampled; 0: a row whose
                prefill goes on, which drafts nothing.

        Returns:
            Drafts [B, k] and how many of each row count [B].
        """


class ScanEngine:
    """Looks through the whole of each row at every step. It keeps nothing from one step to the
    next, so that it does not matter to it which request a row holds."""

    name = "scan"

    def __init__(self, config: NgramConfig) -> None:
        self._min_n = config.min_n
        self._max_n = config.max_n
        self._policy = (config.match_code, config.overlap, config.max_len_or_unlimited)

    def draft(
        self, token_ids: Int32Array, num_tokens: Int32Array, num_sampled: Int32Array, k: int
    ) -> tuple[Int32Array, Int32Array]:
        drafts, counts, _ = _C.ngram_propose(
            token_ids, num_tokens, None, num_sampled > 0, self._min_n, self._max_n, k, *self._policy
        )
        return drafts, counts
