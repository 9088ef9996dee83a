"""What vLLM's V1 runner calls for ``method="ngram_gpu"``, its asynchronous n-gram method."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from ngram_npu import _C
from ngram_npu.config import MAX_INDEX_SPAN, SHORT_CONTEXT
from ngram_npu.index import DeviceNgramIndex, NgramIndex
from ngram_npu.vllm.device import DeviceDrafter, Found, look_up
from ngram_npu.vllm.engines import MOST_TOKENS
from ngram_npu.vllm.options import Options, read_options
from ngram_npu.vllm.proposer import announce


class AsyncNgramProposer(DeviceDrafter):
    """Stands in for vLLM's ``NgramProposerGPU``.

    Its drafts are padded or trimmed. Padded, each request has as many as were asked for, the newest
    token in place of those not found: nobody has to be told how many there are. Trimmed, as vLLM's
    own, the host waits for that number before it prepares the next step.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        options = read_options(vllm_config, "ngram_gpu")
        super().__init__(options, vllm_config.model_config.get_vocab_size(), device)
        self._runner = runner
        self._padded = options.drafts == "padded"
        self._keep_drafting = self._keep_drafting and not self._padded
        config = options.ngram
        self._lookup.update(match_policy=config.match_policy_code, overlap=config.overlap)
        _C.set_num_threads(options.num_threads)
        self._slots: _IndexSlots | None = None
        if _takes_index(options, device):
            self._slots = _IndexSlots(options, vllm_config, device)
        parallel = vllm_config.parallel_config
        if getattr(parallel, "rank", 0) % parallel.tensor_parallel_size == 0:
            announce(options, "ngram_gpu", "index" if self._slots else "scan")

    def load_model(self, *args: object, **kwargs: object) -> None:
        """There is no model. The runner calls it before its first step."""
        if self._padded:
            self._runner._num_valid_draft_tokens_event = None

    def _look_up(
        self, token_ids: torch.Tensor, num_tokens: torch.Tensor, sampled: torch.Tensor, k: int
    ) -> Found:
        if self._slots is None:
            return super()._look_up(token_ids, num_tokens, sampled, k)
        requests = self._runner.input_batch.req_ids[: len(num_tokens)]
        return look_up(
            token_ids,
            num_tokens,
            sampled,
            None,
            index=self._slots.index.tensor,
            slot_indices=self._slots.of(requests, self._runner.requests),
            **{**self._lookup, "k": k},
        )

    def _given(self, found: Found, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._padded:
            return super()._given(found, k)
        drafts = found.draft_token_ids[:, :k]
        return torch.where(drafts < 0, found.next_token_ids.unsqueeze(1), drafts), None


def unless_padded(trim: Callable[..., None]) -> Callable[..., None]:
    """vLLM's ``update_scheduler_for_invalid_drafts`` for a runner whose drafts may be padded."""

    def update_scheduler_for_invalid_drafts(
        num_valid_draft_tokens_event: Any,
        num_valid_draft_tokens_cpu: Any,
        scheduler_output: Any,
        req_id_to_index: Any,
    ) -> None:
        if num_valid_draft_tokens_event is not None:
            trim(
                num_valid_draft_tokens_event,
                num_valid_draft_tokens_cpu,
                scheduler_output,
                req_id_to_index,
            )

    return update_scheduler_for_invalid_drafts


class _IndexSlots:
    """An index, and which slot of it each request has."""

    def __init__(self, options: Options, vllm_config: Any, device: torch.device) -> None:
        config, count = options.ngram, 2 * options.max_num_seqs
        tokens = options.max_num_seqs * config.max_len_or_unlimited
        self.index: Any
        bounds: dict[str, Any] = {"min_n": config.min_n, "max_n": config.max_n}
        if device.type == "cpu":
            self.index = NgramIndex(count, min(tokens, MOST_TOKENS), kind="torch", **bounds)
        else:
            self.index = DeviceNgramIndex(count, min(tokens, MOST_TOKENS), device=device, **bounds)
        self._device = device
        self._free = list(range(count))
        self._slot_of: dict[str, int] = {}
        self._requests: Sequence[str] = ()
        self._slots = self._tensor([])

    def of(self, requests: Sequence[str], alive: Container[str]) -> torch.Tensor:
        """The slots of a step's requests; those of requests that are no longer alive are freed."""
        if requests != self._requests:
            self._change(requests, alive)
        return self._slots

    def _change(self, requests: Sequence[str], alive: Container[str]) -> None:
        freed = [name for name in self._slot_of if name not in alive]
        new = [name for name in requests if name not in self._slot_of]
        lacking = len(new) - len(self._free) - len(freed)
        if lacking > 0:  # preempted requests give way, those known longest first
            here = {*requests, *freed}
            freed += [name for name in self._slot_of if name not in here][:lacking]
        if freed:
            slots = [self._slot_of.pop(name) for name in freed]
            self.index.reset(self._tensor(slots))
            self._free += slots
        for name in new:
            self._slot_of[name] = self._free.pop()
        self._requests = list(requests)
        self._slots = self._tensor([self._slot_of[name] for name in requests])

    def _tensor(self, slots: list[int]) -> torch.Tensor:
        pinned = self._device.type == "cuda"  # else the copy would wait
        host = torch.tensor(slots, dtype=torch.int32, pin_memory=pinned)
        return host.to(self._device, non_blocking=True)


def _takes_index(options: Options, device: torch.device) -> bool:
    """``auto``: not on a GPU, where it has not been measured."""
    if options.engine != "auto":
        return options.engine == "index"
    config = options.ngram
    possible = config.max_n - config.min_n < MAX_INDEX_SPAN
    return device.type == "cpu" and possible and config.max_len_or_unlimited > SHORT_CONTEXT
