"""What each runner's drafter calls when it starts: whether the ranks agree, the log.

The ranks of an engine that draft must draft alike. In the V2 runner and in V1's asynchronous one,
each rank puts its own drafts into the model's input: if one drafts differently, the text is wrong.
So they compare at the start what drafts depend on.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import ngram_npu._C as _C
from ngram_npu.engines.vllm.admission import expect_checks
from ngram_npu.engines.vllm.options import Options, engine_index
from ngram_npu.engines.vllm.patching import logger
from ngram_npu.engines.vllm.sharing import SharedStore
from ngram_npu.index import NgramIndex, make_index
from ngram_npu.store import Kind

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 1 << 26
"""Capacity of an index in tokens if the KV cache's capacity is not known."""

PATIENCE_S = 60.0
"""How long a rank waits for the others."""

_FREE = ("sources", "num_threads", "metrics", "store_seed", "store_file", "store_save_minutes")
"""Options that change no draft. Of the store's files, the contents are compared."""
_STORE = "store's contents"

Said = dict[str, str]
P = ParamSpec("P")
T = TypeVar("T")


def index_for(options: Options, slots: int, kind: Kind, most: int = MOST_TOKENS) -> NgramIndex:
    """An index for all requests of a batch, but of at most ``most`` tokens."""
    tokens = min(options.max_num_seqs * options.max_model_len, most)
    return make_index(options.ngram, slots, tokens, kind=kind)


def workspace(op: str, options: Options, device: torch.device) -> torch.Tensor | None:
    """The workspace of ``op`` on a GPU. Without it each call would allocate and zero one."""
    if device.type == "cpu":
        return None
    import torch

    from ngram_npu.ops import workspace_size

    size = workspace_size(op, options.max_num_seqs)
    return torch.zeros(size, dtype=torch.int32, device=device)


def start(drafter: Any, vllm_config: Any, options: Options, method: str, engine: str) -> bool:
    """Sets the number of threads, logs the lines at start-up and lets the store be saved. Returns
    whether this rank logs and counts: the first of those that draft the same."""
    if drafter.shared_store is not None:
        expect_checks()
    config, threads = options.ngram, options.num_threads
    # vLLM runs one drafter per tensor-parallel rank on the same cores, which also tokenise.
    _C.set_num_threads(threads)
    parallel = vllm_config.parallel_config
    if getattr(parallel, "rank", 0) != drafting_alike(parallel)[0]:
        return False
    lookup = f"prompt_lookup_min={config.min_n} prompt_lookup_max={config.max_n}"
    if options.lookup != "ngram":
        lookup = f"lookup={options.lookup}"
    least, shown = options.min_draft_probability, threads or "as torch's"
    drafts = f" drafts={options.drafts}" if method == "ngram_gpu" else ""
    if config.is_ladder:
        lookup += f" min_draft_probability={least}"
    logger.info(
        f"ngram_npu {_C.__version__} drafts for this engine (method {method}): {lookup} "
        f"num_speculative_tokens={config.k} match_policy={config.match_policy} "
        f"overlap={config.overlap} max_model_len={options.max_model_len} engine={engine} "
        f"device={getattr(drafter, 'device', 'cpu')} num_threads={shown} "
        f"instruction_set={_C.instruction_set()} keep_drafting={options.keep_drafting}{drafts}; "
        f"options from {' and '.join(options.sources) or 'the defaults'}"
    )
    if least != config.min_draft_probability:
        logger.info(
            f"ngram_npu: min_draft_probability={least} ends no draft here: vLLM verifies "
            f"num_speculative_tokens={config.k} tokens of every request, however many are likely"
        )
    if options.overruled:
        logger.info(
            f"ngram_npu: lookup={options.lookup} decides; {options.overruled} has no effect"
        )
    cores = os.environ.get("OMP_NUM_THREADS", "")
    if cores.isdigit() and 0 < int(cores) < threads:
        logger.warning(
            f"ngram_npu: num_threads={threads} has no effect beyond OMP_NUM_THREADS={cores}"
        )
    if drafter.shared_store is not None:
        drafter.shared_store.announce(drafter)
    return True


def drafting_alike(parallel_config: Any) -> range:
    """The ranks of the engine that draft for the same requests as this one: those of its stage of
    the pipeline."""
    size = parallel_config.tensor_parallel_size
    size *= getattr(parallel_config, "prefill_context_parallel_size", 1)
    first = getattr(parallel_config, "rank", 0) // size * size
    return range(first, first + size)


def compare_ranks(
    vllm_config: Any, options: Options, store: SharedStore | None, timeout: float = PATIENCE_S
) -> bool:
    """Compares this rank's options and store with the other ranks', and returns whether there are
    others. If only the stores differ, all ranks begin with an empty one. They talk through the
    key-value store of vLLM's process group: a rank without ngram_npu would join no collective.

    Raises:
        ValueError: other options, or no answer within ``timeout`` seconds; one line.
    """
    ranks = drafting_alike(vllm_config.parallel_config)
    if len(ranks) == 1:
        return False
    given = asdict(options)
    given = given.pop("ngram") | given
    own = {name: repr(value) for name, value in given.items() if name not in _FREE}
    own |= {"version of ngram_npu": _C.__version__, _STORE: store.digest if store else ""}
    said = _exchange(vllm_config.parallel_config, ranks, own, timeout)
    first, here = ranks[0], said[ranks[0]]
    for rank, there in said.items():
        for name in sorted((here.keys() | there.keys()) - {_STORE}):
            if here.get(name) != there.get(name):
                raise ValueError(
                    f"ngram_npu: {name}: expected the same on all ranks of an engine, got "
                    f"{here.get(name)} on rank {first} and {there.get(name)} on rank {rank}"
                )
    if store is not None:
        unlike = [rank for rank, there in said.items() if there[_STORE] != here[_STORE]]
        store.is_one_of_many(alike=not unlike)
        if unlike and vllm_config.parallel_config.rank == first:
            logger.warning(
                f"ngram_npu: store_seed, store_file: rank {unlike[0]} loaded another store than "
                f"rank {first}: all ranks begin with an empty one, and none saves it; give all of "
                "them the same files"
            )
    return True


def or_end(draft: Callable[P, T]) -> Callable[P, T]:
    """For a method that drafts: an exception ends this worker if it is ``one_of_many``. vLLM would
    only log it, unless this rank is the one that answers, and the others would go on."""

    @functools.wraps(draft)
    def drafted(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return draft(*args, **kwargs)
        except Exception as error:
            drafter: Any = args[0]
            if not drafter.one_of_many:
                raise
            logger.critical(
                "ngram_npu: this rank cannot draft, so its worker ends: the others would go on "
                "with other drafts, and the text would be wrong",
                exc_info=True,
            )
            raise SystemExit(1) from error

    return drafted


def _exchange(parallel_config: Any, ranks: range, own: Said, timeout: float) -> dict[int, Said]:
    """What each of the ranks says of itself."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # Engines of a data-parallel server may have one process group.
    prefix = f"ngram_npu/{engine_index(parallel_config)}"
    shared = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
    keys = {rank: str(rank) for rank in ranks}
    shared.set(keys[parallel_config.rank], json.dumps(own))
    try:
        shared.wait(list(keys.values()), timedelta(seconds=timeout))
    except dist.DistStoreError:
        silent = [key for key in keys.values() if not shared.check([key])]
        raise ValueError(
            f"ngram_npu: no answer in {timeout:g} s from rank {', '.join(silent)}, expected one "
            "from all ranks of the engine: each needs this ngram_npu, and NGRAM_NPU_VLLM=1"
        ) from None
    return {rank: json.loads(shared.get(key)) for rank, key in keys.items()}
