"""The command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngram_npu import _C
from ngram_npu.replay import ReplayError

from tools.bench import readme, report
from tools.bench.ops import OPS
from tools.bench.ops.base import Result, Skipped
from tools.bench.options import (
    CACHE_STATES,
    DATA_KINDS,
    DEVICES,
    FRONTENDS,
    MATCHES,
    BenchError,
    Options,
    Size,
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.check_readme is not None:
        return _check_readme(given.check_readme)
    if given.op is None:
        parser.error(f"an op is needed: one of {', '.join(OPS)}")
    try:
        return _run(given, arguments)
    except (BenchError, ReplayError) as error:
        print(f"tools.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tools.bench: interrupted, nothing written", file=sys.stderr)
        return 130


def _run(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    options = _options(given)
    op = _op(given)
    limit = _C.num_threads()
    so_far: list[Result] = []

    def write(results: list[Result], skipped: Skipped, **more: Any) -> None:
        if given.json is None:
            return
        found = report.document(op.name, arguments, options, results, skipped, given.note)
        for name in op.unused_settings:
            del found["settings"][name]
        if op.assumptions:
            found["assumptions"] = op.assumptions
        report.write(given.json, found | more)

    def show(result: Result) -> None:
        print(*report.lines(result), sep="\n", flush=True)
        so_far.append(result)
        if options.device != "cpu":  # time there is short, and a fault ends the process
            write(so_far, {}, unfinished=True)

    print(report.header(), flush=True)
    try:
        results, skipped = op.run(options, show)
    finally:
        _C.set_num_threads(limit)
    for peer, reason in skipped.items():
        print(f"skipped {peer}: {reason}")
    write(results, skipped)
    return 0


def _op(given: argparse.Namespace) -> Any:
    """The op on the device asked for; torch is needed on a GPU only."""
    if given.device == "cpu":
        return OPS[given.op]
    try:
        from tools.bench.gpu.ops import GPU_OPS
    except ImportError as error:
        raise BenchError(f"device {given.device}: {error}") from None
    if given.op not in GPU_OPS:
        raise BenchError(f"{given.op}: not measured on a GPU; these are: {', '.join(GPU_OPS)}")
    return GPU_OPS[given.op]


def _options(given: argparse.Namespace) -> Options:
    try:
        min_n, max_n = (int(part) for part in given.config.split(","))
    except ValueError:
        raise BenchError("config: expected MIN_N,MAX_N, for example 2,4") from None
    return Options(
        sizes=tuple(Size.parse(text) for text in given.sizes),
        peers=None if given.peer is None else tuple(p for p in given.peer if p != "none"),
        engine=given.engine,
        min_n=min_n,
        max_n=max_n,
        k=given.k,
        match=given.match,
        threads=given.threads,
        cache=given.cache,
        idle_ms=given.idle,
        frontend=given.frontend,
        rounds=given.rounds,
        steps=given.steps,
        data_kind=given.data_kind,
        data=given.data,
        vllm_path=given.vllm_path,
        device=given.device,
    )


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measures an op of ours and its peers, in turns, in one process.",
        epilog="ops: " + "; ".join(f"{op.name}: {op.help}" for op in OPS.values()),
    )
    add = parser.add_argument
    add("op", nargs="?", choices=list(OPS), metavar="OP", help="what to measure")
    add("--sizes", nargs="+", default=[], metavar="BxC", help="batch x context, such as 128x32k")
    add(
        "--peer",
        action="append",
        metavar="NAME",
        help="one of the op's peers, ours:key=value,... (ours with other options), or none; may be "
        "given several times (default: the op's own)",
    )
    add("--engine", default=default.engine, help="how ours looks up (default: the op's first)")
    add("--config", default=f"{default.min_n},{default.max_n}", metavar="MIN_N,MAX_N")
    add("--k", type=int, default=default.k, help="draft tokens")
    add("--match", default=default.match, choices=list(MATCHES))
    add("--threads", type=int, default=default.threads, help="most threads of ours")
    add(
        "--cache",
        default=default.cache,
        choices=list(CACHE_STATES),
        help="back to back, or after reading 4 MB or 256 MB of other memory",
    )
    add("--idle", type=float, default=default.idle_ms, metavar="MS", help="sleep before each step")
    add("--frontend", default=default.frontend, choices=FRONTENDS)
    add("--device", default=default.device, choices=DEVICES, help="of a GPU: by its own clock")
    add("--rounds", type=int, default=default.rounds)
    add("--steps", type=int, default=default.steps, help="timed steps a round (0: by duration)")
    add("--data-kind", default=default.data_kind, choices=DATA_KINDS)
    add("--data", type=Path, help="recorded conversations: a *.jsonl[.gz] file or a folder of them")
    add("--vllm-path", type=Path, help="folder that contains vllm/ (default: an installed vLLM)")
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--note", default="", help="a remark kept in the file")
    add(
        "--check-readme",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="instead of measuring: do the figures in these documents equal the result files'? "
        "(default: README.md and docs)",
    )
    return parser


def _check_readme(files: Sequence[Path]) -> int:
    marks, wrong = readme.check(list(files) or readme.documents())
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{marks} marked figures, {len(wrong)} wrong")
    return 1 if wrong else 0
