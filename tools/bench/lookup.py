"""Times the lookup in the requests' own rows, on a CPU with each instruction set or on a device.

    python -m tools.bench.lookup [--sizes 128x32k ...] [--device cuda] [--data FOLDER] [--json FILE]

On a CPU, if vLLM is installed, `propose()` of its V1 runner is timed too, ours and vLLM's numba
code, on one thread as vLLM uses it. On a GPU, the peer is a sum over the rows, which reads the same
memory.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ngram_npu import _C, NgramConfig

from tools.bench.measure import make_parser, time_alternately, time_on_device, write_result
from tools.bench.recorded import Sets, Steps, find_data, load_sets, make_steps

K = 5
SIZES = ("1x1k", "1x4k", "32x1k", "128x1k", "128x8k", "128x32k")
SETTINGS: Mapping[str, NgramConfig] = {
    "scan": NgramConfig(k=K),
    "scan, vLLM's n-grams": NgramConfig(
        min_n=2, max_n=5, k=K, match_policy="earliest", overlap=False
    ),
}


def find_instruction_sets() -> list[str]:
    """Returns the vector instruction sets of this machine, the widest first."""
    widest = _C.instruction_set()
    return ["avx512", "avx2"] if widest == "avx512" else [widest]


def measure_on_cpu(sets: Sets, size: str, rounds: int, instruction_set: str) -> dict[str, float]:
    """Returns microseconds per step of the whole batch on one thread: the scans, and the drafters
    of the V1 runner if vLLM is installed."""
    _C.set_num_threads(1)
    steps = make_steps(sets, size)
    functions = {name: make_scan(steps, config) for name, config in SETTINGS.items()}
    if importlib.util.find_spec("vllm") is not None:
        functions["propose"] = make_propose(steps)
        functions["propose, vLLM's n-grams"] = make_propose(steps, lookup="ngram")
        functions["numba"] = make_numba(steps)
    _C.set_instruction_set(instruction_set)
    try:
        return time_alternately(functions, steps=len(steps.lengths) - 1, rounds=rounds)
    finally:
        _C.set_instruction_set("auto")


def make_scan(steps: Steps, config: NgramConfig) -> Callable[[int], Any]:
    arguments = config.lookup_arguments
    return lambda step: _C.ngram_propose(steps.rows, steps.lengths[step], **arguments)


def make_propose(steps: Steps, **section: Any) -> Callable[[int], Any]:
    """Returns a step of our drafter with options of the section "ngram_npu"."""
    from ngram_npu.engines.vllm import NgramProposer

    propose = NgramProposer(make_vllm_config(steps, **section)).propose
    return lambda step: propose(steps.sampled[step], steps.lengths[step], steps.rows)


def make_numba(steps: Steps) -> Callable[[int], Any]:
    """Returns a step of vLLM's drafter, which chooses one thread."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    propose = NgramProposer(make_vllm_config(steps)).propose
    return lambda step: propose(K, steps.sampled[step], steps.lengths[step], steps.rows)


def make_vllm_config(steps: Steps, **section: Any) -> Any:
    """Returns the parts of a VllmConfig that drafters of the V1 runner read."""
    batch, capacity = steps.rows.shape
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="ngram",
            prompt_lookup_min=2,
            prompt_lookup_max=5,
            num_speculative_tokens=K,
        ),
        model_config=SimpleNamespace(
            max_model_len=capacity, served_model_name="bench", get_vocab_size=lambda: 32_000
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=batch),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        additional_config={"ngram_npu": section},
    )


def measure_on_device(sets: Sets, size: str, rounds: int, device: str) -> dict[str, float]:
    """Returns microseconds per launch of the lookups and of a sum over the same tokens."""
    import torch
    from ngram_npu import ops

    launch = torch.ops.ngram_npu.ngram_propose_
    steps = make_steps(sets, size)
    rows, lengths = torch.tensor(steps.rows).to(device), torch.tensor(steps.lengths[0]).to(device)
    read = rows[:, : int(steps.lengths[0][0])]
    times = {"read": time_on_device(lambda: read.sum(1), device, rounds=rounds)}
    for name, config in SETTINGS.items():
        drafts = {
            "draft_token_ids": torch.empty(len(rows), K, dtype=torch.int32, device=device),
            "num_draft_tokens": torch.empty(len(rows), dtype=torch.int32, device=device),
            "match_len": torch.empty(len(rows), dtype=torch.int32, device=device),
        }
        size_of_workspace = ops.workspace_size("ngram_propose_", len(rows))
        workspace = torch.zeros(size_of_workspace, dtype=torch.int32, device=device)
        arguments = config.lookup_arguments
        del arguments["k"]
        times[name] = time_on_device(
            lambda a=arguments, d=drafts, w=workspace: launch(rows, lengths, workspace=w, **a, **d),
            device,
            rounds=rounds,
        )
    return times


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("lookup", __doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="requests x tokens per request")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu")
    options = parser.parse_args(arguments)
    sets, results = load_sets(find_data(options.data)), []
    is_cpu = options.device == "cpu"
    for size in options.sizes:
        for where in find_instruction_sets() if is_cpu else [options.device]:
            measure = measure_on_cpu if is_cpu else measure_on_device
            times = measure(sets, size, options.rounds, where)
            print(f"{size:8} {where:8}", *(f"{name}: {us} us;" for name, us in times.items()))
            results.append({"size": size, "where": where, **times})
    write_result(options.json, arguments, k=K, results=results)


if __name__ == "__main__":
    main(sys.argv[1:])
