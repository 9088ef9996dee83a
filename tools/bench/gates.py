"""Measures the quality and the speed of drafts, and checks the limits that a change must keep.

    python -m tools.bench.gates [--quick] [--data FOLDER] [--json FILE]

The data are recorded conversations (``--data``, NGRAM_NPU_DATA or ../shared/data beside the
project). Without them, the sources of Python's standard library are replayed and nothing is
checked. Times need an installed vLLM, whose n-gram drafter is the peer. ``--quick`` replays fewer
settings and measures no times. The exit status is 1 if a value is outside its limit.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ngram_npu import NgramConfig, NgramProposer

from tools.bench import lookup
from tools.bench.measure import RESULTS, make_parser, write_result
from tools.bench.recorded import (
    Counts,
    PaddingDrafter,
    Sets,
    compute_mean,
    find_data,
    load_sets,
    make_store,
    replay,
)

TRAFFIC = {
    "gsm8k": "zeroeval-gsm8k-1319",
    "crux": "zeroeval-crux-800",
    "tau": "tau-bench-airline-200",
}
MAX_CONVERSATIONS = {"gsm8k": 500, "crux": 800, "tau": 200}
K, TRIMMED_K = (5, 8), 8
COST_LIMITS = (28, 34, 40, 46, 50, 58)
"""Limits of a draft's costs, in sixteenths of a bit. The best mean over the sets counts."""
VERIFICATION_COST = 0.05
"""Time to verify a drafted token, as a share of a step's time."""
GATES: dict[str, float] = {
    "padded k=5": 1.84,
    "padded k=8": 1.93,
    "padded k=5, store": 2.00,
    "padded k=8, store": 2.12,
    "padded k=5, store, gsm8k": 2.14,
    "padded k=5, store, crux": 2.13,
    "padded k=5, store, tau": 2.79,
    "trimmed": 1.645,
    "trimmed, store": 1.78,
    "trimmed, store, gsm8k": 1.81,
    "at equal drafts / suffix decoding": 1.0,
    "at equal drafts / suffix decoding, store": 1.0,
    "numba / scan at 128x32k, avx512": 12.0,
    "numba / scan at 128x32k, avx2": 8.0,
}
"""The least value of each measurement."""
TIME_GATES = {"128x1k": (55.0, 393.0), "128x8k": (250.0, 1463.0), "128x32k": (650.0, 5039.0)}
"""By size: the longest time of `propose` in microseconds on a machine (Intel Xeon with AVX-512, one
thread), and the time of vLLM's drafter there. The limit is scaled to this machine by the latter."""


def make_trimming_drafter(limit: int, has_store: bool) -> Any:
    """Returns a drafter that ends a draft where its cost exceeds a limit in sixteenths of a bit."""
    config = NgramConfig(k=TRIMMED_K, min_draft_probability=2 ** (-limit / 16))
    return NgramProposer(config, store=make_store() if has_store else None)


def measure_quality(data: Path | None, quick: bool) -> dict[str, Any]:
    """Replays the sets; returns values by name."""
    sets, values = load_sets(data), dict[str, Any]()
    for has_store, suffix in ((False, ""), (True, ", store")):
        for k in K[:1] if quick else K:
            values[f"padded k={k}{suffix}"] = mean_padded(sets, NgramConfig(k=k), has_store)
            for lowest, highest in () if has_store or quick else ((2, 5), (1, 16)):
                vllm = NgramConfig(k=k, min_n=lowest, max_n=highest, overlap=False)
                name = f"padded k={k}, vLLM's n-grams of {lowest} to {highest}"
                values[name] = mean_padded(sets, vllm, False)
        curve = replay_trimmed(sets, has_store, COST_LIMITS[3:5] if quick else COST_LIMITS)
        values[f"trimmed{suffix}"] = find_best_speedup(curve)
        if data is not None and not quick:
            name = f"at equal drafts / suffix decoding{suffix}"
            values[name] = compare_with_suffix_decoding(curve, has_store)
    if data is not None and not quick:
        for short, name in TRAFFIC.items():
            requests = load_sets(data, f"traffic/{name}.*")[name]
            traffic = {name: requests[: MAX_CONVERSATIONS[short]]}
            values[f"padded k=5, {short}"] = mean_padded(traffic, NgramConfig(k=5), False)
            values[f"padded k=5, store, {short}"] = mean_padded(traffic, NgramConfig(k=5), True)
            curve = replay_trimmed(traffic, True, COST_LIMITS)
            values[f"trimmed, store, {short}"] = find_best_speedup(curve)
    return values


def mean_padded(sets: Sets, config: NgramConfig, has_store: bool) -> float:
    """Returns tokens per step, the mean over the sets."""
    drafters = ((r, PaddingDrafter(config, has_store)) for r in sets.values())
    return compute_mean(replay(r, d, config.k, padded=True).tokens_per_step for r, d in drafters)


Curve = dict[str, list[Counts]]
"""Counts by set, one for each limit of a draft's costs."""


def replay_trimmed(sets: Sets, has_store: bool, limits: Sequence[int]) -> Curve:
    return {
        name: [
            replay(requests, make_trimming_drafter(n, has_store), TRIMMED_K, padded=False)
            for n in limits
        ]
        for name, requests in sets.items()
    }


def find_best_speedup(curve: Curve) -> float:
    """Returns the computed speed-up at the best limit."""
    means = []
    for counts in zip(*curve.values(), strict=True):
        means.append(compute_mean(c.compute_speedup(VERIFICATION_COST) for c in counts))
    return max(means)


def compare_with_suffix_decoding(curve: Curve, has_store: bool) -> float:
    """Returns tokens per step divided by suffix decoding's at as many drafted tokens per step,
    linear between two limits; the mean over the sets."""
    peers = json.loads((RESULTS / "suffix-decoding.json").read_text())[
        "shared" if has_store else "single"
    ]
    ratios = []
    for name, counts in curve.items():
        peer = Counts(**peers[name])
        drafted = peer.drafted_per_step
        low, high = next(
            (pair for pair in pairwise(counts) if drafted <= pair[1].drafted_per_step), counts[-2:]
        )
        share = (drafted - low.drafted_per_step) / (high.drafted_per_step - low.drafted_per_step)
        tokens = low.tokens_per_step + share * (high.tokens_per_step - low.tokens_per_step)
        ratios.append(tokens / peer.tokens_per_step)
    return compute_mean(ratios)


def measure_speed(data: Path | None) -> dict[str, float]:
    """Returns microseconds per step of the whole batch, and ratios, on one thread."""
    values: dict[str, float] = {}
    sets = load_sets(data)
    for size in TIME_GATES:
        for where in lookup.find_instruction_sets() if size == "128x32k" else ["auto"]:
            times = lookup.measure_on_cpu(sets, size, 60, where)
            for name, us in times.items():
                values.setdefault(f"{name} {size}", us)  # of the widest instruction set
                if name in lookup.SETTINGS and size == "128x32k":
                    values[f"numba / {name} at {size}, {where}"] = round(times["numba"] / us, 2)
    return values


def check(values: dict[str, float]) -> dict[str, Any]:
    """Returns the limit of each value that has one, and whether the value keeps it."""
    results: dict[str, Any] = {}
    for name, low in GATES.items():
        if name in values:
            results[name] = {"value": values[name], "min": low, "pass": values[name] >= low}
    for size, (high, numba_us) in TIME_GATES.items():
        for name in ("propose", "propose, vLLM's n-grams"):
            if (us := values.get(f"{name} {size}")) is not None:
                scaled = round(high * values[f"numba {size}"] / numba_us, 1)
                results[f"{name} {size}"] = {"value": us, "max": scaled, "pass": us <= scaled}
    return results


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("gates", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer settings, and no times")
    options = parser.parse_args(arguments)
    data, notes = find_data(options.data), []
    if data is None:
        notes.append(
            "no recorded data: the standard library's sources are replayed, without limits"
        )
    values = measure_quality(data, options.quick)
    if importlib.util.find_spec("vllm") is None:
        notes.append("vLLM is not installed: no times")
    elif not options.quick:
        values |= measure_speed(data)
    gates = check(values) if data is not None else {}
    for name, value in values.items():
        gate = gates.get(name, {})
        limit = f">= {gate['min']}" if "min" in gate else f"<= {gate['max']}" if gate else ""
        print(f"{name:45} {value:10.4g}  {limit:10} {'' if gate.get('pass', True) else 'FAILED'}")
    print(*notes, sep="\n")
    passed = all(gate["pass"] for gate in gates.values())
    write_result(options.json, arguments, notes=notes, values=values, gates=gates, passed=passed)
    if not passed:
        print("gates: a value is outside its limit", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
