"""N-gram drafts for vLLM's V2 model runner, in place of its ``NgramGPUSpeculator``.

The runner gives a request one row of its token buffer for as long as it runs, and appends the
sampled tokens before it asks for drafts. So one lookup is all there is to do: the row of a request
is its slot of the index too, and nothing waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ngram_npu import _C, _library
from ngram_npu.config import SHORT_CONTEXT
from ngram_npu.index import DeviceNgramIndex, NgramIndex
from ngram_npu.ops import workspace_size
from ngram_npu.vllm.after_import import parameters
from ngram_npu.vllm.engines import MOST_TOKENS
from ngram_npu.vllm.options import Options, read_options

logger = logging.getLogger("vllm.ngram_npu")


class NgramSpeculator:
    """Drafts ``num_speculative_tokens`` tokens for every request, those of the stock speculator
    unless the options say otherwise.

    The runner verifies all of them. Where the lookup finds fewer, the newest token fills the rest.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another; one line.
    """

    # What the runner reads of any speculator.
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        options = read_options(vllm_config, "v2")
        self.k = options.ngram.k
        self.device = device
        self.engine = _engine(options, device)
        self._state = req_states.all_token_ids.gpu, req_states.total_len.gpu
        self._arguments = options.ngram.lookup_arguments
        self.index: NgramIndex | DeviceNgramIndex | None = None
        self._begun: list[int] = []  # rows given to new requests since the last lookup
        if self.engine == "index":
            self.index = _make_index(options, device)
            self._watch(req_states)
        if device.type != "cpu":
            op = "ngram_propose" if self.index is None else "ngram_index_propose_"
            size = workspace_size(op, options.max_num_seqs)
            self._arguments["workspace"] = torch.zeros(size, dtype=torch.int32, device=device)
        _C.set_num_threads(options.num_threads)
        parallel = vllm_config.parallel_config
        # Every tensor-parallel rank drafts the same; one of them speaks.
        if getattr(parallel, "rank", 0) % parallel.tensor_parallel_size == 0:
            self._announce(options, vllm_config.speculative_config.method)

    def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """The lookup is no part of the model's graphs."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        num_rejected: object,
        last_sampled: torch.Tensor,
        *args: object,
        dummy_run: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        """Drafts for the requests of a step, whose sampled tokens are in the buffer already.

        Args:
            input_batch: its ``idx_mapping`` [B] int64 has the requests' rows.
            num_sampled: [B] int32; 0: the request's prefill goes on.
            last_sampled: [max_num_reqs, 1] int64, the newest token of each row.
            dummy_run: a warm-up without requests; nothing is looked up.
            others: not used.

        Returns:
            [B, num_speculative_tokens] int64.
        """
        if dummy_run:
            shape = input_batch.num_reqs, self.k
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        rows = input_batch.idx_mapping
        drafts = self._look_up(rows, num_sampled)
        return torch.where(drafts < 0, last_sampled.view(-1, 1)[rows], drafts)

    def _look_up(self, rows: torch.Tensor, num_sampled: torch.Tensor) -> torch.Tensor:
        """[B, k] int32, -1 behind the last token that was found."""
        requests = {"row_indices": rows, "num_sampled": num_sampled, **self._arguments}
        ops = torch.ops.ngram_npu
        if self.index is None:
            found = ops.ngram_propose(*self._state, **requests)
        else:
            self._reset_begun(self.index)
            found = ops.ngram_index_propose_(
                *self._state, self.index.tensor, slot_indices=rows, **requests
            )
        drafts: torch.Tensor = found[0]
        return drafts

    def _watch(self, req_states: Any) -> None:
        """Notes which rows the runner gives to new requests."""
        add_request = req_states.add_request

        def added(req_id: str, *args: Any, **kwargs: Any) -> None:
            add_request(req_id, *args, **kwargs)
            self._begun.append(req_states.req_id_to_index[req_id])

        req_states.add_request = added

    def _reset_begun(self, index: NgramIndex | DeviceNgramIndex) -> None:
        if self._begun:
            # From pinned memory, without waiting for the device. A row twice is reset once.
            pinned = self.device.type == "cuda"
            slots = torch.tensor(sorted(set(self._begun)), dtype=torch.int32, pin_memory=pinned)
            index.reset(slots.to(self.device, non_blocking=True))
            self._begun.clear()

    def _announce(self, options: Options, method: str) -> None:
        config = options.ngram
        logger.info(
            "ngram_npu %s drafts for this engine (method %s, V2 runner): prompt_lookup_min=%d "
            "prompt_lookup_max=%d num_speculative_tokens=%d match_policy=%s overlap=%s "
            "max_model_len=%d engine=%s device=%s; options from %s",
            _C.__version__,
            method,
            config.min_n,
            config.max_n,
            config.k,
            config.match_policy,
            config.overlap,
            options.max_model_len,
            self.engine,
            self.device,
            " and ".join(options.sources) or "the defaults",
        )


def in_place_of(stock: Callable[..., Any], refuse: Callable[[str], None]) -> type:
    """The class that stands in for the stock speculator.

    Where the runner's state is not what the operators take, it makes a stock one and tells
    ``refuse`` why.
    """

    class Speculator(NgramSpeculator):
        def __new__(cls, vllm_config: Any, device: torch.device, req_states: Any) -> Any:
            doubt = _doubt(device, req_states)
            if not doubt:
                return super().__new__(cls)
            refuse(doubt)
            return stock(vllm_config, device, req_states)

    return Speculator


def _doubt(device: torch.device, req_states: Any) -> str:
    """Why the runner's state cannot be looked up in; empty: it can."""
    if device.type not in ("cpu", "cuda"):
        return f"no kernels for {device.type}"
    if not _library.has_kernel("ngram_propose", device.type):
        return f"no kernels for {device.type}: {_library.backends()[device.type].reason}"
    for name, rank in (("all_token_ids", 2), ("total_len", 1)):
        tensor = getattr(getattr(req_states, name, None), "gpu", None)
        if not isinstance(tensor, torch.Tensor):
            return f"the runner's state has no {name}.gpu"
        found = tensor.dim(), tensor.dtype, tensor.device.type, tensor.stride(-1)
        expected = rank, torch.int32, device.type, 1
        if found != expected:
            return f"{name}.gpu (rank, dtype, device, stride) is {found}, expected {expected}"
    for name in ("add_request", "req_id_to_index"):
        if not hasattr(req_states, name):
            return f"the runner's state has no {name}"
    found_arguments = parameters(req_states.add_request)
    if found_arguments[:1] != ["req_id"]:
        return f"add_request takes ({', '.join(found_arguments)}), expected (req_id, ...)"
    return ""


def _engine(options: Options, device: torch.device) -> str:
    """``auto``: the index where it was measured, can be and pays; on a GPU it was not measured."""
    if options.engine != "auto":
        return options.engine
    pays = options.ngram.fits_index and options.max_model_len > SHORT_CONTEXT
    return "index" if pays and device.type == "cpu" else "scan"


def _make_index(options: Options, device: torch.device) -> NgramIndex | DeviceNgramIndex:
    """Before vLLM measures how much memory is left for its KV cache; what this is to hold is then
    not known. In host memory only what is used is committed."""
    config, slots = options.ngram, options.max_num_seqs
    tokens = min(slots * options.max_model_len, MOST_TOKENS)
    if device.type == "cpu":
        return NgramIndex(slots, tokens, min_n=config.min_n, max_n=config.max_n, kind="torch")
    return DeviceNgramIndex(slots, tokens, min_n=config.min_n, max_n=config.max_n, device=device)
