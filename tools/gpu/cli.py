"""The command line of ``make gpu``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools.gpu import summary
from tools.gpu.runner import Outcome, execute, run_all
from tools.gpu.stages import DEADLINE_SECONDS, NCU, ROOT, Stage, stages

RESULTS = ROOT / "tools" / "bench" / "results"
_KEPT_CHARACTERS = 6000
"""Of a failed stage's output in the document; the log, which git ignores, has more."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    out = given.out or Path(os.environ.get("OUT") or RESULTS)
    chosen = _chosen(stages(out), given.only)
    if given.dry_run:
        for stage in chosen:
            print(f"{stage.name:<26}{stage.seconds:>4} s  {_command(stage)}")
        print(f"{'all':<26}{given.seconds:>4} s")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    log: list[str] = []

    def report(outcome: Outcome) -> None:
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"{outcome.name:<26}{outcome.seconds:>6.1f} s  {outcome.status}{reason}", flush=True)
        if outcome.status in ("failed", "timed out"):
            print(outcome.tail[-2500:], flush=True)
        log.append(f"=== {outcome.name}: {outcome.status}{reason}\n{outcome.tail}\n")
        (out / "gpu-run.log").write_text("\n".join(log), encoding="utf-8")

    begun = time.time()
    outcomes = run_all(chosen, given.seconds, execute_and_look, report)
    found = document(chosen, outcomes, out, given.seconds, begun)
    (out / "gpu-run.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(*summary.lines(found), sep="\n")
    return 0 if all(outcome.status == "passed" for outcome in outcomes) else 1


def execute_and_look(
    stage: Stage, seconds: float, env: Mapping[str, str]
) -> tuple[int | None, str]:
    """As `execute`. ncu that may not read the counters ends well, and has written no launch."""
    if stage.tool == "ncu":
        NCU.unlink(missing_ok=True)
    rc, output = execute(stage, seconds, env)
    if stage.tool == "ncu" and rc == 0 and not summary.ncu(NCU):
        said = NCU.read_text(errors="replace") if NCU.is_file() else ""
        return 1, f"{output}{said}no launch was read\n"
    return rc, output


def document(
    chosen: Sequence[Stage], outcomes: Sequence[Outcome], out: Path, seconds: float, begun: float
) -> dict[str, Any]:
    """What the run came to; the figures themselves are in the files of the benches, of which one
    that did not come to its end may have left some.

    Args:
        begun: the time of day; older files are another run's.
    """
    commands = {stage.name: _command(stage) for stage in chosen}
    passed = {outcome.name for outcome in outcomes if outcome.status == "passed"}
    written = [out / file for stage in chosen for file in stage.writes]
    files = [file.name for file in written if file.is_file() and file.stat().st_mtime >= begun]
    kept = [outcome.to_dict() for outcome in outcomes]
    for outcome in kept:
        if outcome["status"] == "passed":
            del outcome["tail"]  # the log has it
        else:
            outcome["tail"] = outcome["tail"][-_KEPT_CHARACTERS:]
            for place, name in ((f"{ROOT}/", ""), (str(ROOT), "."), (str(out), "$OUT")):
                outcome["tail"] = outcome["tail"].replace(place, name)
    return {
        "schema": 1,
        "command": "make gpu",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "deadline_seconds": seconds,
        "stages": [{**outcome, "command": commands[outcome["name"]]} for outcome in kept],
        "files": files,
        "results": summary.results(outcomes),
        "ncu": summary.ncu(NCU) if "ncu" in passed else [],
        "targets": summary.targets(out, files),
    }


def _command(stage: Stage) -> str:
    """Without the places of one machine."""
    words = ["python3" if word == sys.executable else word for word in stage.command]
    return shlex.join(Path(w).name if w.startswith("/") else w for w in words)


def _chosen(all_stages: list[Stage], only: Sequence[str]) -> list[Stage]:
    """Those named, and what they need."""
    if not only:
        return all_stages
    by_name = {stage.name: stage for stage in all_stages}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        raise SystemExit(f"tools.gpu: no stage {unknown[0]!r}; there are: {', '.join(by_name)}")
    wanted = set(only).union(*(by_name[name].needs for name in only))
    return [stage for stage in all_stages if stage.name in wanted]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu",
        description="Builds, tests, checks and measures on a machine with an NVIDIA GPU, without "
        "a network. Each stage's failure is reported and the next one runs.",
    )
    parser.add_argument("--out", type=Path, help="for the files (default: $OUT, else the results)")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE")
    parser.add_argument("--seconds", type=float, default=DEADLINE_SECONDS, help="for all of it")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be run")
    return parser
