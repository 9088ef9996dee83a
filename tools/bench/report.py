"""Formats results as a file (JSON) and as a table on the screen."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ngram_npu.output import atomic_output

from tools.bench import provenance
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import Options

SCHEMA = 2
HEADER = f"{'size':>10}  {'':<18}{'median':>11}{'p10':>11}{'p90':>11}  peer/ours (p10-p90)"
_PRIVATE_OPTIONS = ("--json", "--data")


def make_document(
    op: Op,
    arguments: Sequence[str],
    options: Options,
    results: list[Result],
    skip_reasons: SkipReasons,
) -> dict[str, Any]:
    """Returns a run's results, settings and environment."""
    settings = {
        "config": [options.min_n, options.max_n],  # lengths of n-grams
        "k": options.k,
        "match_policy": options.match_policy,
        "threads": options.threads,
        "rounds": options.rounds,
        "device": options.device,
    }
    return {
        "schema": SCHEMA,
        "op": op.name,
        "command": format_command(arguments),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": provenance.describe_machine(options.device),
        "versions": provenance.find_versions(),
        "settings": settings,
        "skipped": skip_reasons,
        **({"assumptions": op.assumptions} if op.assumptions else {}),
        "results": results,
    }


def format_command(arguments: Sequence[str]) -> str:
    """Returns the command without options that only name paths of this machine."""
    public_arguments: list[str] = []
    is_private_value = False
    for argument in arguments:
        if not is_private_value and argument.partition("=")[0] not in _PRIVATE_OPTIONS:
            public_arguments.append(argument)
        is_private_value = argument in _PRIVATE_OPTIONS
    return shlex.join(["python", "-m", "tools.bench", *public_arguments])


def write_document(path: Path, document: dict[str, Any]) -> None:
    with atomic_output(path) as scratch:
        scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def format_rows(result: Result) -> list[str]:
    """Returns the lines of one result in the table."""
    if "ours" not in result:  # an op that reports other values than times
        return [json.dumps(result)]
    rows = []
    for name, figures in [("ours", result["ours"]), *result["peers"].items()]:
        times = "".join(_format_time(figures[f"{key}_us"]) for key in ("median", "p10", "p90"))
        ratio = ""
        if name in result["ratio"]:
            spread = result["ratio_spread"][name]
            ratio = f"  {result['ratio'][name]:.2f}x ({spread['p10']:.2f}-{spread['p90']:.2f})"
        rows.append(f"{result['size']:>10}  {name:<18}{times}{ratio}")
    if num_disturbed := result.get("disturbed_rounds"):  # other processes used the CPU
        rows.append(f"{'':>10}  disturbed_rounds: {num_disturbed}")
    return rows


def _format_time(us: float) -> str:
    return f"{us:>9.2f}us" if us < 1000 else f"{us / 1000:>9.3f}ms"
