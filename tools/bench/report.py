"""Results as a file for machines and a table for people."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ngram_npu.output import atomic_output

from tools.bench import provenance
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import Options

SCHEMA = 2
_WIDTH = 160
_PRIVATE = ("--json", "--data", "--vllm-path")
_SETTINGS = ("cache", "idle_ms", "frontend", "engine", "data")
"""Facts that a comparison reports for each size, though they are mostly the same for all."""


def document(
    op: Op, arguments: Sequence[str], options: Options, results: list[Result], skipped: Skipped,
    note: str = "",
) -> dict[str, Any]:  # fmt: skip
    """A run's results, settings and environment."""
    settings = {
        "config": [options.min_n, options.max_n],
        "k": options.k,
        "match_policy": options.match_policy,
        "threads": options.threads,
        "rounds": options.rounds,
        "device": options.device,
    }
    common, results = hoisted(results)
    return {
        "schema": SCHEMA,
        "op": op.name,
        "command": command_line(arguments),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **({"note": note} if note else {}),
        "machine": provenance.machine(options.device),
        "versions": provenance.versions(),
        "settings": {k: v for k, v in settings.items() if k not in op.unused_settings} | common,
        "skipped": skipped,
        **({"assumptions": op.assumptions} if op.assumptions else {}),
        "results": results,
    }


def hoisted(results: list[Result]) -> tuple[dict[str, Any], list[Result]]:
    """The settings that all results share, and the results without them."""
    common = {
        key: results[0][key]
        for key in _SETTINGS
        if results and all(key in r and r[key] == results[0][key] for r in results)
    }
    return common, [{k: v for k, v in result.items() if k not in common} for result in results]


def command_line(arguments: Sequence[str]) -> str:
    """The command without options that only name places on one machine."""
    kept: list[str] = []
    drop = False
    for argument in arguments:
        if not drop and argument.partition("=")[0] not in _PRIVATE:
            kept.append(argument)
        drop = argument in _PRIVATE
    return shlex.join(["python", "-m", "tools.bench", *kept])


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes the file atomically."""
    with atomic_output(path) as scratch:
        scratch.write_text(format_json(found) + "\n", encoding="utf-8")


def format_json(value: Any, indent: int = 0) -> str:
    """As JSON, with as much per line as fits."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or indent + len(flat) <= _WIDTH:
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {format_json(v, indent + 1)}" for k, v in value.items()]
    else:
        parts = [format_json(v, indent + 1) for v in value]
    margin, lines = "\n" + " " * (indent + 1), [""]
    for part in parts:
        longer = f"{lines[-1]} {part},"
        if lines[-1] and "\n" not in part and indent + 1 + len(longer) <= _WIDTH:
            lines[-1] = longer
        else:
            lines.append(f"{part},")
    inside = margin.join(lines)
    return f"{flat[0]}{inside[:-1]}\n{' ' * indent}{flat[-1]}"


def lines(result: Result) -> list[str]:
    """One size's part of the table."""
    if "ours" not in result:
        shown = {k: v for k, v in _medians(result).items() if k not in ("size", "set", "data")}
        name = result["set"] if "set" in result else result["size"]
        return [f"{name:>10}  " + ", ".join(f"{k} {v}" for k, v in shown.items())]
    text = []
    for name, figures in [("ours", result["ours"]), *result["peers"].items()]:
        times = "".join(_time(figures[f"{of}_us"]) for of in ("median", "p10", "p90"))
        against = ""
        if name in result["ratio"]:
            spread = result["ratio_spread"][name]
            against = f"  {result['ratio'][name]:.2f}x ({spread['p10']:.2f}-{spread['p90']:.2f})"
        text.append(f"{result['size']:>10}  {name:<18}{times}{against}")
    if disturbed := result.get("disturbed_rounds"):
        text.append(f"{'':>10}  disturbed_rounds: {_medians(disturbed)}")
    return text


def header() -> str:
    return f"{'size':>10}  {'':<18}{'median':>11}{'p10':>11}{'p90':>11}  peer/ours (p10-p90)"


def _medians(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return value["median"] if "median" in value else {k: _medians(v) for k, v in value.items()}


def _time(us: float) -> str:
    return f"{us:>9.2f}us" if us < 1000 else f"{us / 1000:>9.3f}ms"
