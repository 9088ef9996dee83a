"""Results as a file for machines and a table for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ngram_npu.replay.output import atomic_output

from tools.bench import environment
from tools.bench.ops.base import Result, Skipped
from tools.bench.options import Options

SCHEMA = 1
_PRIVATE = ("--json", "--data", "--vllm-path")


def document(
    op: str, arguments: Sequence[str], options: Options, results: list[Result], skipped: Skipped,
    note: str = "",
) -> dict[str, Any]:  # fmt: skip
    """All that a run found, and with what."""
    return {
        "schema": SCHEMA,
        "op": op,
        "command": command_line(arguments),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "note": note,
        "machine": environment.machine(options.device),
        "versions": environment.versions(options.device),
        "settings": {
            "config": [options.min_n, options.max_n],
            "k": options.k,
            "match": options.match,
            "frontend": options.frontend,
            "threads": options.threads,
            "cache": options.cache,
            "idle_ms": options.idle_ms,
            "rounds": options.rounds,
            "data_kind": options.data_kind,
            "device": options.device,
        },
        "skipped": skipped,
        "results": results,
    }


def command_line(arguments: Sequence[str]) -> str:
    """The command without what only says where things lie on one machine."""
    kept: list[str] = []
    drop = False
    for argument in arguments:
        if drop:
            drop = False
        elif argument in _PRIVATE:
            drop = True
        elif argument.partition("=")[0] not in _PRIVATE:
            kept.append(f'"{argument}"' if " " in argument else argument)
    return " ".join(["python -m tools.bench", *kept])


def write(path: Path, found: dict[str, Any]) -> None:
    """Whole, or not at all."""
    text = json.dumps(found, indent=1, ensure_ascii=False)
    with atomic_output(path) as scratch:
        scratch.write_text(text + "\n", encoding="utf-8")


def lines(result: Result) -> list[str]:
    """One size's part of the table."""
    if "model_us" in result:
        against = f", {result['model_to_floor']:.2f}x" if "model_to_floor" in result else ""
        return [
            f"{result['size']:>15}  {result['op']:<28} {result.get('data_kind', ''):<9} MODELLED "
            f"{result['model_us']:.2f} us, work {result['work_us']:.2f} us, floor "
            f"{result['floor_us']:.2f} us{against}"
        ]
    if "host_us" in result:
        parts = ", ".join(f"{part} {us['median']:.1f}" for part, us in result["host_us"].items())
        return [f"{result['size']:>10}  churn {result['churn']:.0%}: host us a step: {parts}"]
    if "growth_bytes" in result:
        mb = 1 << 20
        return [
            f"{result['size']:>10}  {result['variant']:<18} {result['steps']} steps of "
            f"{result['us_per_step']:.1f} us: grew {result['growth_bytes'] / mb:.2f} MB, "
            f"peak {result['peak_growth_bytes'] / mb:.2f} MB above "
            f"(token buffer {result['token_buffer_bytes'] / mb:.0f} MB)"
        ]
    if "build_ns_per_token" in result:
        threaded = result.get("threaded_ns_per_token")
        return [
            f"{result['size']:>10}  {result['config']} {result['match']:<9}"
            f"{result['data_kind']:<11}{result['build_ns_per_token']['median']:>7.2f} ns/token"
            + (f", {threaded['threads']} threads {threaded['median']:.2f}" if threaded else "")
            + f", {result['bytes_per_token']:.2f} bytes and {result['entries_per_token']:.2f} "
            "entries per token"
        ]
    if "growth_steps" in result:
        return [
            f"{result['size']:>10}  {result['growth_steps']} steps, {result['growth_page_splits']} "
            f"page splits: median {result['growth_median_us']:.1f} us, p99 "
            f"{result['growth_p99_us']:.1f} us, longest {result['growth_worst_us']:.1f} us"
        ]
    text = []
    state = result["cache"] + (f"+{result['idle_ms']:g}ms" if result["idle_ms"] else "")
    for name, figures in [("ours", result["ours"]), *result["peers"].items()]:
        ratio = result["ratio_spread"].get(name)
        text.append(
            f"{result['size']:>10}  {result['frontend']:<6} {state:<9} {name:<18}"
            f"{_time(figures['median_us'])} {_time(figures['p10_us'])} {_time(figures['p90_us'])}"
            f"{_time(figures['mad_us'])} {figures['ns_per_token']:>9.4f}  "
            + (f"{ratio['median']:.2f}x ({ratio['p10']:.2f}-{ratio['p90']:.2f})" if ratio else "")
        )
    if "floors" in result:
        floors = result["floors"]
        reading = ""
        if "ours_over_read" in floors:
            reading = (
                f"{floors['ours_over_read']:.2f}x of reading the live tokens "
                f"({floors['read_us']:.2f} us at {floors['copy_gb_per_s']:.0f} GB/s), "
            )
        above = f"{floors['ours_above_empty_us']:.2f} us above an empty graph node"
        text.append(f"{'':>10}  {reading}{above}")
    if result.get("disturbed_rounds"):
        text.append(
            f"{'':>10}  {result['disturbed_rounds']} of {result['rounds']} rounds disturbed"
        )
    return text


def header() -> str:
    return (
        f"{'size':>10}  {'front':<6} {'cache':<9} {'':<18}{'median':>10} {'p10':>10} {'p90':>10}"
        f"{'mad':>10} {'ns/token':>9}  peer/ours (p10-p90)"
    )


def _time(us: float) -> str:
    if us < 1000:
        return f"{us:>8.2f}us"
    return f"{us / 1000:>8.3f}ms"
