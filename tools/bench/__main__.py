"""The command line: ``python -m tools.bench``."""

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
from tools.bench.ops.base import Result, Skipped
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
        return _run(_parser().parse_args(arguments), arguments)
    except (BenchError, InputError, UnavailableError) as error:
        print(f"tools.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tools.bench: interrupted", file=sys.stderr)
        return 130


def _run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    op = OPS[given.op]
    options = _options(vars(given))
    on_device = options.device != "cpu"
    if on_device:
        if op.device_peers is None:
            measured = [name for name, op in OPS.items() if op.device_peers is not None]
            raise BenchError(f"{op.name}: expected one measured on a device: {', '.join(measured)}")
        there = device.require(op.name, options.device)
        options = replace(options, device=there, frontend="torch", idle_ms=0.0)
    limit = _C.num_threads()
    results: list[Result] = []
    skipped: Skipped = {}

    def write(**more: Any) -> None:
        if given.json is not None:
            found = report.document(op, arguments, options, results, skipped, given.note)
            report.write(given.json, found | more)

    print(report.header(), flush=True)
    try:
        for result in op.run(options, skipped):
            print(*report.lines(op.shown(result)), sep="\n", flush=True)
            results.append(result)
            if on_device:  # its time is limited, and a fault ends the process
                write(unfinished=True)
    finally:
        _C.set_num_threads(limit)
    for peer, reason in skipped.items():
        print(f"skipped {peer}: {reason}")
    write()
    return 0


def _options(given: dict[str, Any]) -> Options:
    if "config" in given:
        try:
            given["min_n"], given["max_n"] = (int(part) for part in given["config"].split(","))
        except ValueError:
            raise BenchError("config: expected MIN_N,MAX_N, for example 2,4") from None
    if "sizes" in given:
        given["sizes"] = tuple(Size.parse(text) for text in given["sizes"])
    if "peers" in given:
        given["peers"] = tuple(peer for peer in given["peers"] if peer != "none")
    names = {field.name for field in fields(Options)}
    return Options(**{name: value for name, value in given.items() if name in names})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measures an op of ours and its peers, in turns, in one process.",
        epilog="ops: " + "; ".join(f"{op.name}: {op.help}" for op in OPS.values()),
        argument_default=argparse.SUPPRESS,  # Options has the defaults
    )
    add = parser.add_argument
    add("op", choices=list(OPS), metavar="OP", help="what to measure")
    add("--sizes", nargs="+", metavar="BxC", help="batch x context, such as 128x32k")
    add(
        "--peer",
        action="append",
        dest="peers",
        metavar="NAME",
        help="one of the op's peers, ours:key=value,... (ours with other options), or none; may be "
        "given several times (default: the op's own)",
    )
    add("--engine", help="how ours looks up (default: the op's first)")
    add("--config", metavar="MIN_N,MAX_N", help="(default: 2,4)")
    add("--k", type=int, help="draft tokens (default: 4)")
    add("--match-policy", choices=list(MATCH_POLICY_CODES))
    add("--threads", type=int, help="most threads of ours (default: 1)")
    add("--cache", choices=list(CACHE_STATES), help="back to back, or after reading 4 or 256 MB")
    add("--idle", type=float, dest="idle_ms", metavar="MS", help="sleep before each step")
    add("--frontend", choices=FRONTENDS)
    add("--device", choices=DEVICES, help="of a GPU or an NPU: by its own clock")
    add("--rounds", type=int)
    add("--steps", type=int, help="timed steps a round (default: by duration)")
    add("--data-kind", choices=DATA_KINDS)
    add("--data", type=Path, help="recorded conversations: a *.jsonl[.gz] file or a folder of them")
    add("--vllm-path", type=Path, help="folder that contains vllm/ (default: an installed vLLM)")
    add("--json", type=Path, default=None, metavar="FILE", help="write all figures here")
    add("--note", default="", help="a remark kept in the file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
