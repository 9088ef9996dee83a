"""N-gram drafts for vLLM's V2 model runner, in place of its ``NgramGPUSpeculator``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ngram_npu.vllm.engines import drafts_on_host
from ngram_npu.vllm.options import Method, read_options
from ngram_npu.vllm.row_lookup import RowLookup, doubt_of_state, is_warm_up


class NgramSpeculator(RowLookup):
    """Drafts those of the stock speculator unless the options say otherwise, for every request
    ``num_speculative_tokens``: the newest token fills the rest.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    _method: Method = "v2"

    # Attributes that the runner reads of any speculator.
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        options = read_options(vllm_config, self._method)
        speculative = vllm_config.speculative_config
        super().__init__(
            vllm_config, options, device, req_states, f"{speculative.method}, V2 runner"
        )
        asked = getattr(speculative, "enable_adaptive_verification", False)
        self.enable_adaptive_verification = asked and options.ngram.cost_limit is not None
        """Whether the runner asks how likely each draft token is to be accepted."""
        self._gives_costs = self.enable_adaptive_verification
        if self._gives_costs:
            shape = options.max_num_seqs, self.k
            self.draft_token_confidence_probs = torch.zeros(shape, device=device)
            """[max_num_seqs, k] in the order of the batch: of each token, if those before it are
            accepted."""

    def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """Does nothing: the lookup is not part of the model's graphs."""

    def capture(self) -> None:
        """Does nothing: there is nothing to capture."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        num_rejected: object,
        last_sampled: object,
        *args: object,
        dummy_run: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        """[B, num_speculative_tokens] int64, for the requests of a step, whose sampled tokens are
        already in the buffer. With ``num_sampled`` 0 a request is still in prefill; a dummy run is
        a warm-up without requests."""
        if dummy_run or is_warm_up(input_batch):
            if self.enable_adaptive_verification:
                self._round_trip()
            shape = input_batch.num_reqs, self.k
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        started = time.perf_counter()
        rows = input_batch.idx_mapping
        drafts, counts, match_len = self._look_up(input_batch, num_sampled, int64=True)
        if self.enable_adaptive_verification:
            confidence = self.draft_token_confidence_probs[: len(rows)]
            torch.exp2(self._draft_costs[: len(rows)] / -16, out=confidence)
        if self._stats is not None:
            values = self._state[1][rows], num_sampled, match_len, counts
            self._stats.observe_tensors(started, input_batch.idx_mapping_np, *values)
        return drafts.to(torch.int64)


def in_place_of(
    stock: Callable[..., Any], refuse: Callable[[str], None], method: Method = "v2"
) -> type:
    """The class that replaces the stock speculator. If the operators cannot use the runner's state,
    it makes a stock one and passes the reason to ``refuse``."""

    class Speculator(NgramSpeculator):
        _method = method

        def __new__(cls, vllm_config: Any, device: torch.device, req_states: Any) -> Any:
            on_host = drafts_on_host(read_options(vllm_config, method), device.type)
            doubt = doubt_of_state(device, req_states, "" if on_host else "ngram_propose")
            if not doubt:
                return super().__new__(cls)
            refuse(doubt)
            return stock(vllm_config, device, req_states)

    return Speculator
