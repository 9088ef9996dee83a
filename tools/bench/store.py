"""Times a step with a full store of 2^20 tokens, and the choice between neural and n-gram drafts.

    python -m tools.bench.store [--sizes 128x8k ...] [--device cuda] [--data FOLDER] [--json FILE]

A step appends two tokens per request and drafts from the store. The lookup in the requests' own
rows, which comes between the two, is timed by tools.bench.lookup.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ngram_npu import _C, NgramStore

from tools.bench.measure import make_parser, time_alternately, time_on_device, write_result
from tools.bench.recorded import STORE_TOKENS, Sets, find_data, load_sets, make_steps

SIZES = ("1x8k", "32x8k", "128x8k")
K = 5
SEED = 1


def make_functions(sets: Sets, size: str, device: str) -> dict[str, Callable[[int], Any]]:
    """Returns functions of a step's number: append, propose, both, and the merge of drafts."""
    steps = make_steps(sets, size)
    batch = len(steps.rows)
    store = NgramStore(STORE_TOKENS, device=device, num_slots=batch, max_batch=batch)
    rng = np.random.default_rng(SEED)
    store.warm(rng.integers(0, 32_000, (batch, STORE_TOKENS // batch), np.int32))
    store.warm(steps.rows[:, : steps.lengths[0][0]])

    def place(array: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    rows, lengths = place(steps.rows), [place(length) for length in steps.lengths]
    num_sampled = place(np.full(batch, 2, np.int32))
    drafts = {
        "draft_token_ids": place(np.zeros((batch, K), np.int32)),
        "num_draft_tokens": place(np.zeros(batch, np.int32)),
        "match_len": place(np.zeros(batch, np.int32)),
        "agreement": place(np.zeros(batch, np.int32)),
    }

    def append(step: int) -> None:
        store.append(rows, lengths[step], num_sampled, max_new=K + 1)

    def propose(step: int) -> None:
        store.propose(rows, lengths[step], num_sampled, fill=True, **drafts)

    def append_and_propose(step: int) -> None:
        append(step)
        propose(step)

    merged = {
        "neural_draft_token_ids": place(rng.integers(0, 32_000, (batch, K))),
        "ngram_draft_token_ids": place(rng.integers(0, 32_000, (batch, K), np.int32)),
        "num_ngram_draft_tokens": place(rng.integers(0, K + 1, batch, np.int32)),
        "match_len": place(rng.integers(0, 17, batch, np.int32)),
        "draft_costs": place(rng.integers(0, 20, (batch, K), np.uint8)),
        "row_indices": place(rng.permutation(batch).astype(np.int32)),
        "num_sampled": num_sampled,
        "neural_acceptance": place(rng.integers(1, K + 1, (batch, 2), np.int32)),
    }
    merge = torch.ops.ngram_npu.merge_drafts_
    return {
        "append": append,
        "propose": propose,
        "append and propose": append_and_propose,
        "merge_drafts_": lambda step: merge(**merged),
    }


def measure(sets: Sets, size: str, rounds: int, device: str) -> dict[str, float]:
    """Returns microseconds of the whole batch by function, on one thread or on a device."""
    functions = make_functions(sets, size, device)
    if device == "cpu":
        _C.set_num_threads(1)
        torch.set_num_threads(1)
        return time_alternately(functions, steps=12, rounds=rounds)
    return {
        n: time_on_device(lambda f=f: f(1), device, rounds=rounds) for n, f in functions.items()
    }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("store", __doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="requests x tokens per request")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    sets, results = load_sets(find_data(options.data)), []
    for size in options.sizes:
        times = measure(sets, size, options.rounds, options.device)
        print(f"{size:8}", *(f"{name}: {us} us;" for name, us in times.items()))
        results.append({"size": size, **times})
    settings = {"device": options.device, "store_tokens": STORE_TOKENS, "k": K}
    write_result(options.json, arguments, **settings, results=results)


if __name__ == "__main__":
    main(sys.argv[1:])
