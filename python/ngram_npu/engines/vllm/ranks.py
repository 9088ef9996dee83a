"""Makes the ranks of an engine draft the same.

In the V2 runner and in V1's asynchronous one, each rank puts its own drafts into the model's input,
so the text is wrong if one rank drafts differently. The ranks therefore compare at the start
everything that drafts depend on. Every rank has its own store. All of them begin with the same
contents and get the same tokens, so their contents stay equal; one rank writes the file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import ngram_npu._C as _C
from ngram_npu.engines.vllm.options import Options, engine_index
from ngram_npu.engines.vllm.patching import logger

RANK_TIMEOUT_S = 60.0
"""How long a rank waits for the others."""
_NOT_COMPARED = "sources", "num_threads", "metrics", "store_seed", "store_file"
"""Options that change no draft. Instead of the store's files, their contents are compared."""
_STORE = "store's contents"

RankState = dict[str, str]
"""Options of a rank and the digest of its store, by name."""
Call = TypeVar("Call", bound=Callable[..., Any])


class Ranks(NamedTuple):
    """What a comparison with the other ranks found."""

    has_others: bool = False
    have_equal_stores: bool = True


def ranks_of_stage(parallel_config: Any) -> range:
    """Returns the ranks of the engine that draft for the same requests as this one: those of its
    pipeline stage."""
    size = parallel_config.tensor_parallel_size
    size *= getattr(parallel_config, "prefill_context_parallel_size", 1)
    first = getattr(parallel_config, "rank", 0) // size * size
    return range(first, first + size)


def is_first_rank(parallel_config: Any) -> bool:
    """Returns whether this rank logs and saves: it is the first of those that draft the same."""
    return getattr(parallel_config, "rank", 0) == ranks_of_stage(parallel_config)[0]


def compare_ranks(
    vllm_config: Any, options: Options, store_digest: str, timeout: float = RANK_TIMEOUT_S
) -> Ranks:
    """Compares this rank's options and store with those of the other ranks.

    Ranks communicate through the key-value store of vLLM's process group, because a rank without
    ngram_npu would not join a collective.

    Args:
        store_digest: Digest of the store's contents; empty: none.

    Raises:
        ValueError: Other options, or no answer within ``timeout`` seconds. One line.
    """
    ranks = ranks_of_stage(vllm_config.parallel_config)
    if len(ranks) == 1:
        return Ranks()
    values = asdict(options)
    values = values.pop("ngram") | values
    state = {name: repr(value) for name, value in values.items() if name not in _NOT_COMPARED}
    state |= {"version of ngram_npu": _C.__version__, _STORE: store_digest}
    states = _exchange(vllm_config.parallel_config, ranks, state, timeout)
    first, expected = ranks[0], states[ranks[0]]
    for rank, other in states.items():
        for name in sorted((expected.keys() | other.keys()) - {_STORE}):
            if expected.get(name) != other.get(name):
                raise ValueError(
                    f"ngram_npu: {name}: expected the same on all ranks of an engine, got "
                    f"{expected.get(name)} on rank {first} and {other.get(name)} on rank {rank}"
                )
    different = [rank for rank, other in states.items() if other[_STORE] != expected[_STORE]]
    if different and is_first_rank(vllm_config.parallel_config):
        logger.warning(
            f"ngram_npu: store_seed, store_file: rank {different[0]} loaded another store than "
            f"rank {first}: all ranks begin with an empty one, and none saves it; give all of "
            "them the same files"
        )
    return Ranks(has_others=True, have_equal_stores=not different)


def _exchange(
    parallel_config: Any, ranks: range, state: RankState, timeout: float
) -> dict[int, RankState]:
    """Publishes this rank's state, and returns that of all ranks."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # Engines of a data-parallel server may have one process group.
    prefix = f"ngram_npu/{engine_index(parallel_config)}"
    shared = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
    keys = {rank: str(rank) for rank in ranks}
    shared.set(keys[parallel_config.rank], json.dumps(state))
    try:
        shared.wait(list(keys.values()), timedelta(seconds=timeout))
    except dist.DistStoreError:
        silent = [key for key in keys.values() if not shared.check([key])]
        raise ValueError(
            f"ngram_npu: no answer in {timeout:g} s from rank {', '.join(silent)}, expected one "
            "from all ranks of the engine: each needs this ngram_npu, and NGRAM_NPU_VLLM=1"
        ) from None
    return {rank: json.loads(shared.get(key)) for rank, key in keys.items()}


def exit_worker_on_error(call: Call) -> Call:
    """Decorates a drafter's method: an exception ends the worker if ``has_other_ranks``. vLLM would
    only log it on a rank that does not answer, and the other ranks would continue."""

    @functools.wraps(call)
    def wrapped(drafter: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(drafter, *args, **kwargs)
        except Exception as error:
            if not drafter.has_other_ranks:
                raise
            logger.critical(
                "ngram_npu: this rank cannot draft, so its worker ends: the other ranks would "
                "continue with other drafts, and the text would be wrong",
                exc_info=True,
            )
            raise SystemExit(1) from error

    return wrapped  # type: ignore[return-value]
