"""The class behind vLLM's ``method="custom_class"``.

It does not use torch: the runner's token buffer is a numpy array, and drafts are returned as lists.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import numpy as np

from ngram_npu import _C
from ngram_npu.vllm.after_import import logger
from ngram_npu.vllm.engines import IndexEngine, Int32Array, ScanEngine, takes_index
from ngram_npu.vllm.options import Options, read_options
from ngram_npu.vllm.ranks import drafting_alike
from ngram_npu.vllm.runner_call import check_call
from ngram_npu.vllm.stats import Stats


class HostProposer:
    """The part that both host methods share: engine, options and counters."""

    def __init__(self, vllm_config: Any, method: Literal["custom_class", "ngram"]) -> None:
        self.options = options = read_options(vllm_config, method)
        self.k = options.ngram.k
        self.engine = ScanEngine(options.ngram)
        if takes_index(options):
            self.engine = IndexEngine(vllm_config, options)
        self.shared_store = self.engine.store
        speaks = start(self, vllm_config, options, method, self.engine.name)
        self._stats = Stats(self, vllm_config, options) if speaks else None

    def load_model(self, *args: object, **kwargs: object) -> None:
        """vLLM calls it; there is no model."""

    def _draft(
        self,
        k: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
    ) -> list[list[int]]:
        batch = len(sampled_token_ids)
        if batch == 0 or token_ids_cpu.shape[1] == 0:
            return [[] for _ in sampled_token_ids]
        started = time.perf_counter()
        num_sampled = np.fromiter(map(len, sampled_token_ids), np.int32, batch)
        lengths = num_tokens_no_spec[:batch]
        drafts, counts, match_len = self.engine.draft(
            token_ids_cpu[:batch], lengths, num_sampled, k
        )
        lists = [row[:n] for row, n in zip(drafts.tolist(), counts.tolist(), strict=True)]
        if self.options.keep_drafting and k > 0:
            limit = self.options.max_model_len
            for draft, sampled, n in zip(lists, sampled_token_ids, lengths.tolist(), strict=True):
                if sampled and not draft and n < limit:
                    draft.append(sampled[-1])
        if self._stats is not None:
            self._stats.observe(
                time.perf_counter() - started,
                slice(batch),
                (lengths, num_sampled, match_len, counts),
                self.engine.index,
            )
        return lists


def start(drafter: Any, vllm_config: Any, options: Options, method: str, engine: str) -> bool:
    """Sets the number of threads, logs the lines at start-up and lets the store be saved. Returns
    whether this rank logs and counts: the first of those that draft the same."""
    config, threads = options.ngram, options.num_threads
    # vLLM runs one drafter per tensor-parallel rank on the same cores, which also tokenise.
    _C.set_num_threads(threads)
    parallel = vllm_config.parallel_config
    if getattr(parallel, "rank", 0) != drafting_alike(parallel)[0]:
        return False
    lookup = f"prompt_lookup_min={config.min_n} prompt_lookup_max={config.max_n}"
    if options.lookup != "ngram":
        lookup = f"lookup={options.lookup}"
    if config.is_ladder:
        lookup += f" min_draft_probability={options.min_draft_probability}"
    logger.info(
        "ngram_npu %s drafts for this engine (method %s): %s num_speculative_tokens=%d "
        "match_policy=%s overlap=%s max_model_len=%d engine=%s device=%s num_threads=%s "
        "instruction_set=%s keep_drafting=%s%s; options from %s",
        _C.__version__,
        method,
        lookup,
        config.k,
        config.match_policy,
        config.overlap,
        options.max_model_len,
        engine,
        getattr(drafter, "device", "cpu"),
        threads or "as torch's",
        _C.instruction_set(),
        options.keep_drafting,
        f" drafts={options.drafts}" if method == "ngram_gpu" else "",
        " and ".join(options.sources) or "the defaults",
    )
    if options.min_draft_probability != config.min_draft_probability:
        logger.info(
            "ngram_npu: min_draft_probability=%s ends no draft here: vLLM verifies "
            "num_speculative_tokens=%d tokens of every request, however many are likely",
            options.min_draft_probability,
            config.k,
        )
    if options.overruled:
        logger.info(
            "ngram_npu: lookup=%s decides; %s has no effect", options.lookup, options.overruled
        )
    cores = os.environ.get("OMP_NUM_THREADS", "")
    if cores.isdigit() and 0 < int(cores) < threads:
        logger.warning(
            "ngram_npu: num_threads=%d has no effect beyond OMP_NUM_THREADS=%s", threads, cores
        )
    if drafter.shared_store is not None:
        drafter.shared_store.announce(drafter)
    return True


class NgramProposer(HostProposer):
    """N-gram drafts for vLLM's V1 model runner, synchronous scheduling.

    ``speculative_config={"method": "custom_class", "model": "ngram_npu.vllm.NgramProposer",
    "num_speculative_tokens": k}``. vLLM drops ``prompt_lookup_*`` for a custom class, so these are
    taken from ``additional_config={"ngram_npu": {...}}``, otherwise from the environment
    (``NGRAM_NPU_VLLM_PROMPT_LOOKUP_MIN``, ...), otherwise they are 2 and 5.

    Raises:
        ValueError: an option that is unknown, malformed, or contradicts another, or a runner that
            calls a custom class with other arguments; one line.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_call(self.propose)
        super().__init__(vllm_config, "custom_class")
        if getattr(vllm_config.speculative_config, "num_speculative_tokens_per_batch_size", None):
            logger.warning(
                "ngram_npu: num_speculative_tokens_per_batch_size has no effect: vLLM does not "
                "pass it to a custom class; use method 'ngram' with NGRAM_NPU_VLLM=1 instead"
            )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A draft for each request, possibly empty.

        Args:
            sampled_token_ids: tokens that this step sampled for each request; empty: the request is
                still in prefill and gets no draft.
            num_tokens_no_spec: [max_num_seqs] int32, lengths of the rows, sampled tokens included.
            token_ids_cpu: [max_num_seqs, max_model_len] int32; the first rows are the requests'.
            slot_mappings: not used.

        Raises:
            ValueError: an array of the wrong dtype, shape or stride.
        """
        return self._draft(self.k, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


class StockNgramProposer(HostProposer):
    """Replaces vLLM's ``NgramProposer``; n, k and limits are those of ``speculative_config``."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, "ngram")

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Int32Array,
        token_ids_cpu: Int32Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """As :meth:`ngram_npu.vllm.NgramProposer.propose`, with up to ``num_speculative_tokens``
        per draft, which vLLM may lower with the batch size."""
        k = min(num_speculative_tokens, self.k)
        return self._draft(k, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
