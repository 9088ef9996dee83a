"""`make gpu` and `python -m tools.npu` without a device: failing stages, the plans, and the
processing of results."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tools import runner
from tools.bench.__main__ import _options, _parser
from tools.bench.gpu.ops import GPU_OPS
from tools.bench.options import Size
from tools.gpu import __main__ as gpu
from tools.gpu.targets import launches, targets
from tools.npu import __main__ as npu
from tools.runner import ROOT, Stage, counts, said


def shell(name: str, script: str, seconds: float = 20, **more: Any) -> Stage:
    return Stage(name, ("sh", "-c", script), seconds, **more)


def run(
    out: Path, stages: list[Stage], *arguments: str, **environment: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    rc = runner.main(
        "gpu", lambda _: stages, lambda *_: {}, seconds=30, environment=environment,
        arguments=["--out", str(out), *arguments],
    )  # fmt: skip
    found = json.loads((out / "gpu-run.json").read_text())
    return rc, {outcome["stage"]: outcome for outcome in found["stages"]}


def test_what_becomes_of_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    monkeypatch.setattr(runner, "LOGS", logs)
    began = time.monotonic()
    stages = [
        shell("good", "echo 'RESULT {\"n\": 3}'; echo $OF_ALL $OF_ONE", read=said,
              environment={"OF_ONE": "one"}),
        shell("bad", f"echo lost; yes . | head -9000; echo {ROOT}/x.py; echo {tmp_path}; exit 3"),
        shell("hangs", "echo begun; sleep 60 & sleep 60", seconds=0.5),
        shell("silent", "echo nothing", read=said),
        Stage("absent", ("no-such-tool",), 20),
        shell("needed", "exit 1", required=True),
        shell("behind", "true"),
    ]  # fmt: skip
    rc, found = run(tmp_path, stages, OF_ALL="all")
    assert rc == 1
    assert time.monotonic() - began < 20
    assert {name: (o["status"], o.get("reason")) for name, o in found.items()} == {
        "good": ("passed", None),
        "bad": ("failed", "exit status 3"),
        "hangs": ("timed out", "after 0.5 s"),
        "silent": ("failed", "no result was printed"),
        "absent": ("left out", "no-such-tool is not here"),
        "needed": ("failed", "exit status 1"),
        "behind": ("left out", "needs needed"),
    }
    assert found["good"]["result"] == {"n": 3}
    assert (logs / "good.log").read_text().endswith("all one\n")
    assert found["hangs"]["output"] == "begun\n"
    assert found["bad"]["output"].endswith("x.py\n$OUT\n")
    assert "lost" not in found["bad"]["output"]
    assert "lost" in (logs / "bad.log").read_text()
    assert "x.py" in capsys.readouterr().out
    assert [file.name for file in tmp_path.glob("*.*")] == ["gpu-run.json"]
    rc, found = run(tmp_path, stages, "--only", "good", "behind")
    assert (rc, list(found)) == (0, ["good", "behind"])
    assert run(tmp_path, stages, "--seconds", "1")[1]["good"]["reason"] == "no time was left"


def test_a_suite_that_passes_nothing_has_failed() -> None:
    tail = "....\n== 3 failed, 120 passed, 2 skipped, 7 deselected in 4.1s ==\n"
    assert counts(tail) == {"failed": 3, "passed": 120, "skipped": 2, "deselected": 7}
    for last in ("", "108 deselected in 0.1s", "7 skipped in 1s"):
        with pytest.raises(ValueError, match="no test passed"):
            counts(last)


@pytest.mark.parametrize("make", [gpu.plan, gpu.rest])
def test_every_stage_has_its_time_and_few_files_come_of_it(make: Any) -> None:
    """A machine that is lent gives back eight files."""
    plan = make(Path("/out"))
    assert sum(stage.seconds for stage in plan) <= gpu.DEADLINE_SECONDS
    assert sum("--json" in stage.command for stage in plan) + 1 <= 8


@pytest.mark.parametrize("make", [gpu.plan, gpu.rest, npu.plan])
def test_a_plan(make: Any) -> None:
    """Every module that it starts, and every bench option in it."""
    plan = make(Path("/out"))
    assert len({stage.name for stage in plan}) == len(plan)
    assert plan[0].required
    for stage in plan:
        words = list(stage.command[list(stage.command).index("-m") :])
        if words[1] == "tools.bench":
            given = vars(_parser().parse_args(words[2:]))
            assert all(str(Size.parse(size)) == size for size in given.get("sizes", ()))
            assert set(given.get("peers", ())) <= GPU_OPS[given["op"]].peer_makers.keys()
            # Before a replay a step with the index has its index copied, a rescan next to nothing.
            assert _options(given).cache == "l2-cold" or given["op"] != "ngram_index_step_"
            assert given["json"].parent == Path("/out")
        else:
            assert importlib.util.find_spec(words[1]) is not None


def test_programs_of_cuda_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/mine")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = gpu.environment()
    assert found["PATH"] == "/mine:/usr/local/cuda/bin"
    assert found["PYTHONPATH"] == f"{gpu.PREFIX}:/elsewhere"


def test_what_ncu_prints() -> None:
    name = "ngram_npu::cuda::<unnamed>::step_kernel(ngram_npu::Params)"
    printed = (
        '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        f'"0","{name}","gpu__time_duration.sum","ns","1,234"\n'
        f'"0","{name}","launch__grid_size","","132"\n'
        '"1","other","launch__grid_size","","(!) n/a"\n'
    )
    assert launches(printed) == [
        {"kernel": "step_kernel", "gpu__time_duration.sum (ns)": 1234.0, "launch__grid_size": 132},
        {"kernel": "other"},
    ]
    with pytest.raises(ValueError, match="no launch was read"):
        launches("==ERROR== ERR_NVGPUCTRPERM\n")


def test_targets(tmp_path: Path) -> None:
    step = [
        {"size": "256x128k", "floors": {"ours_over_read": 1.29}},
        {"size": "128x4k", "floors": {"ours_above_empty_us": 5.2}},
        {"size": "128x32k", "ratio": {"vllm-v2": 3.5}},
    ]
    index = [
        {"size": f"128x{n}", "ours": {"median_us": us}, "ratio": {"ours:engine=scan": gain}}
        for n, us, gain in (
            ("1k", 4, 0.8), ("16k", 5, 1.1), ("32k", 5, 1.3), ("128k", 6, 4), ("1m", 9, 30),
        )
    ]  # fmt: skip
    for name, results in (("ngram_step_", step), ("ngram_index_step_", index)):
        (tmp_path / f"{name}-cuda.json").write_text(json.dumps({"results": results}))
    found = gpu.findings(tmp_path, 0)["targets"]
    verdicts = [target["verdict"] for target in found]
    no = "not measured"
    assert verdicts == ["met", "MISSED", "met", no, "MISSED", "met", no]
    assert [t["found"] for t in found if t["verdict"] != no] == [1.29, 5.2, 3.5, 2.25, 1.1]
    # What an earlier run left there is not this one's.
    os.utime(tmp_path / "ngram_step_-cuda.json", (0, 0))
    later = gpu.findings(tmp_path, time.time() - 60)
    assert later["files"] == ["ngram_index_step_-cuda.json"]
    assert [t["verdict"] for t in targets(tmp_path, later["files"])][:4] == [no] * 4
