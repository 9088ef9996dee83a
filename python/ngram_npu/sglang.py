"""An n-gram drafter for SGLang: ``--speculative-algorithm NGRAM_NPU``. See docs/guides/sglang.md.

SGLang's own ``NGRAM`` drafts trees from one trie of what it generated. Here each request drafts a
chain from its own context, with the worker, the verification and the relay of SGLang's ``NGRAM``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ngram_npu.config import NgramConfig
from ngram_npu.drafting import Drafting

ALGORITHM = "NGRAM_NPU"
DRAFT_TOKENS = 6
"""SGLang counts the last sampled token with the draft: five drafted tokens."""
LOOKUP = (1, 16)
"""All of a draft is verified, so the longest match is the best guess, however short."""


def register() -> None:
    """SGLang's entry point (group ``sglang.srt.plugins``): makes the algorithm known by name."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """Handled like ``NGRAM`` wherever SGLang asks."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            """As SGLang's ``_handle_ngram``, but a chain: one branch per token.

            Raises:
                ValueError: a device or a setting that SGLang's ``NGRAM`` does not support.
            """
            if server_args.device not in ("cuda", "cpu", "xpu"):
                raise ValueError(
                    f"{ALGORITHM}: device: expected cuda, cpu or xpu, got {server_args.device!r}"
                )
            if server_args.enable_dp_attention:
                raise ValueError(f"{ALGORITHM}: enable_dp_attention: expected False, got True")
            if server_args.max_running_requests is None:
                server_args.max_running_requests = 48
            if server_args.speculative_num_draft_tokens is None:
                server_args.speculative_num_draft_tokens = DRAFT_TOKENS
            server_args.speculative_eagle_topk = 1
            server_args.speculative_num_steps = server_args.speculative_num_draft_tokens
            server_args.enable_mixed_chunk = False
            if server_args.device == "cpu":
                server_args.disable_overlap_schedule = True

    register_algorithm = SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, spec_class=Algorithm
    )
    register_algorithm(lambda server_args: worker_class())


def worker_class() -> Any:
    """SGLang's worker of ``NGRAM``, with drafts from :class:`Contexts`."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class NgramWorker(NGRAMWorker):  # type: ignore[misc]
        def alloc_memory_pool(self, **kwargs: Any) -> None:
            super().alloc_memory_pool(**kwargs)
            capacity = self.model_runner.model_config.context_len
            # In the place of the trie: the worker tells it which requests have left.
            self.ngram_corpus = Contexts(self.max_batch_size, capacity, self.draft_token_num)

        def add_external_corpus(self, corpus_id: str, token_chunks: Any) -> int:
            raise ValueError(f"{ALGORITHM}: external corpora belong to SGLang's NGRAM")

        def _prepare_draft_tokens(self, batch: Any) -> tuple[Any, Any]:
            """The draft tokens [B * n] and the mask of their tree [B * n * n]."""
            newest: list[Sequence[int]] = [()] * len(batch.reqs)
            if self.enable_overlap and not batch.grammar_needs_sync():
                # The requests do not have the tokens of the last step yet.
                tokens = batch.spec_info.accept_tokens.cpu().view(len(batch.reqs), -1).tolist()
                counts = batch.spec_info.accept_lens.cpu().tolist()
                newest = [row[:n] for row, n in zip(tokens, counts, strict=True)]
            return self.ngram_corpus.draft(
                [request.rid for request in batch.reqs],
                [request.origin_input_ids_unpadded for request in batch.reqs],
                [request.output_ids for request in batch.reqs],
                newest,
            )

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing is learned from other requests."""

    return NgramWorker


class Contexts:
    """The context of each request in a row of its own, and drafts from it."""

    def __init__(self, max_requests: int, capacity: int, draft_token_num: int) -> None:
        """
        Args:
            max_requests: requests in a batch; those of the last batch stay until the next.
            capacity: most tokens of a request.
            draft_token_num: n, of each request: its newest token and the draft.
        """
        rows = 2 * max_requests
        self._rows = np.zeros((rows, capacity + draft_token_num), np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._settled = [0] * rows
        """Tokens of each row that came from the request itself."""
        self._free = list(range(rows))
        self._row_of: dict[str, int] = {}
        low, high = LOOKUP
        config = NgramConfig(
            prompt_lookup_min=low,
            prompt_lookup_max=high,
            num_speculative_tokens=draft_token_num - 1,
            match_policy="latest",
            overlap=True,
        )
        self._drafting = Drafting(config, kind="numpy")
        self._mask = np.tri(draft_token_num, dtype=np.bool_).ravel()

    def draft(
        self,
        requests: Sequence[str],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        newest: Sequence[Sequence[int]],
    ) -> tuple[Any, Any]:
        """One chain per request: its newest token, then the draft, filled up with that token.

        Args:
            outputs: the tokens that each request has.
            newest: those it does not have yet.

        Returns:
            Tokens [B * n] int64, and for each of them those before it in its chain and itself,
            [B * n * n] bool.
        """
        rows = np.array([self._row(name) for name in requests], np.int64)
        for row, prompt, output, following in zip(rows, prompts, outputs, newest, strict=True):
            settled, length = self._settled[row], len(prompt) + len(output)
            if settled < len(prompt):
                self._rows[row, settled : len(prompt)] = prompt[settled:]
                settled = len(prompt)
            self._rows[row, settled:length] = output[settled - len(prompt) :]
            self._rows[row, length : length + len(following)] = following
            self._settled[row] = length
            self._lengths[row] = length + len(following)
        drafts = self._drafting.propose(self._rows, self._lengths, row_indices=rows, fill=True)
        last = self._rows[rows, self._lengths[rows] - 1][:, None]
        tokens = np.concatenate([last, drafts.draft_token_ids], axis=1).astype(np.int64)
        return tokens.ravel(), np.tile(self._mask, len(rows))

    def erase_match_state(self, requests: Sequence[str]) -> None:
        """Forgets requests that have left the batch; they may come back."""
        for name in requests:
            if (row := self._row_of.pop(name, None)) is not None:
                self._free.append(row)

    def reset(self) -> None:
        """Forgets all requests."""
        self.erase_match_state(list(self._row_of))

    def _row(self, name: str) -> int:
        if name not in self._row_of:
            row = self._row_of[name] = self._free.pop()
            self._settled[row] = 0
        return self._row_of[name]
