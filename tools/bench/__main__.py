"""Implements the command ``python -m tools.bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ngram_npu import _C
from ngram_npu_cli.replay import InputError

from tools.bench import device, report
from tools.bench.ops import OPS
from tools.bench.ops.base import Result, SkipReasons
from tools.bench.options import (
    CACHE_STATES,
    DATA_KINDS,
    DEVICES,
    FRONTENDS,
    MATCH_POLICY_CODES,
    BenchError,
    Options,
    Size,
    UnavailableError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run_op(vars(make_parser().parse_args(arguments)), arguments)
    except (BenchError, InputError, UnavailableError) as error:
        print(f"tools.bench: {error}", file=sys.stderr)
        return 2


def _run_op(arguments: dict[str, Any], command: Sequence[str]) -> int:
    op, options = OPS[arguments["op"]], make_options(arguments)
    is_on_device = options.device != "cpu"
    if is_on_device:
        if op.device_peers is None:
            device_ops = [name for name, op in OPS.items() if op.device_peers is not None]
            known = ", ".join(device_ops)
            raise BenchError(f"{op.name}: --device: expected an op of {known}, got {op.name}")
        name = device.require_device(op.name, options.device)
        options = replace(options, device=name, frontend="torch")
    num_threads = _C.num_threads()
    results: list[Result] = []
    skip_reasons: SkipReasons = {}

    def write_json(**fields: Any) -> None:
        if (file := arguments.get("json")) is not None:
            document = report.make_document(op, command, options, results, skip_reasons)
            report.write_document(file, document | fields)

    print(report.HEADER, flush=True)
    try:
        for result in op.run(options, skip_reasons):
            print(*report.format_rows(result), sep="\n", flush=True)
            results.append(result)
            if is_on_device:  # because a fault or a time limit may end the process
                write_json(unfinished=True)
    finally:
        _C.set_num_threads(num_threads)
    for peer, reason in skip_reasons.items():
        print(f"skipped {peer}: {reason}")
    write_json()
    return 0


def make_options(arguments: dict[str, Any]) -> Options:
    values = dict(arguments)
    if "config" in values:
        try:
            values["min_n"], values["max_n"] = (int(part) for part in values["config"].split(","))
        except ValueError:
            message = f"--config: expected MIN_N,MAX_N, for example 2,4, got {values['config']!r}"
            raise BenchError(message) from None
    if "sizes" in values:
        values["sizes"] = tuple(Size.parse(text) for text in values["sizes"])
    if "peers" in values:
        values["peers"] = tuple(peer for peer in values["peers"] if peer != "none")
    names = {field.name for field in fields(Options)}
    return Options(**{name: value for name, value in values.items() if name in names})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measures one of our ops and its peers in alternation, in one process.",
        epilog="ops: " + "; ".join(f"{op.name}: {op.help}" for op in OPS.values()),
        argument_default=argparse.SUPPRESS,  # Options has the defaults
    )
    add = parser.add_argument
    add("op", choices=list(OPS), metavar="OP", help="the op to measure")
    add("--sizes", nargs="+", metavar="BxC", help="batch x context, such as 128x32k")
    peer_help = (
        "one of the op's peers, ours:key=value,... (ours with other options), or none; may be "
    )
    peer_help += "repeated (default: the op's own)"
    add("--peer", action="append", dest="peers", metavar="NAME", help=peer_help)
    add("--engine", help="scan or index (default: the op's first)")
    add("--config", metavar="MIN_N,MAX_N", help="(default: 2,4)")
    add("--k", type=int, help="draft tokens (default: 4)")
    add("--match-policy", choices=list(MATCH_POLICY_CODES))
    add("--threads", type=int, help="maximum number of our threads (default: 1)")
    add("--cache", choices=list(CACHE_STATES), help="reads 0, 4 MB or 256 MB between steps")
    add("--frontend", choices=FRONTENDS)
    add("--device", choices=DEVICES, help="a GPU or an NPU is timed with the device's events")
    add("--rounds", type=int)
    add("--steps", type=int, help="timed steps per round (default: by duration)")
    add("--data-kind", choices=DATA_KINDS)
    add("--data", type=Path, help="recorded conversations: a *.jsonl[.gz] file or a folder of them")
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
