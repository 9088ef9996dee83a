"""Advice fits the runner: what it verifies, how vLLM is told, what it takes away."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ngram_npu_cli import command as cli
from ngram_npu_cli.command import bar
from ngram_npu_cli.logs.log_files import Progress
from ngram_npu_cli.replay import InputError
from ngram_npu_cli.tune import (
    CANDIDATES,
    TuneOptions,
    format_report,
    load_cost,
    share_of_a_step,
    tune,
)
from ngram_npu_cli.tune.html import to_html
from ngram_npu_cli.tune.runners import RUNNERS, SYNCHRONOUS
from tune_helpers import FEW, cost_file, talk

COST = share_of_a_step(0.02)
SEARCHED = [c for c in CANDIDATES if c.config.k in (3, 8)]


@pytest.mark.parametrize(
    ("name", "drafts", "method", "command"),
    [
        ("gpu", "padded", "ngram_gpu", "NGRAM_NPU_VLLM=1 vllm serve MODEL"),
        ("host", "trimmed", "custom_class", "NGRAM_NPU_VLLM=1 vllm serve MODEL"),
        (
            "ascend",
            "trimmed",
            "ngram",
            "NGRAM_NPU_VLLM=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL",
        ),
    ],
)
def test_each_runner_has_its_own_method_and_variables(
    traffic: Path, name: str, drafts: str, method: str, command: str
) -> None:
    report = tune([traffic], COST, TuneOptions(jobs=1, runner=name), candidates=SEARCHED)
    assert report.runner is RUNNERS[name]
    assert not report.others
    assert {s.candidate.drafts for s in report.settings} == {drafts}
    speculative = json.loads(report.vllm_options[0].split(" ", 1)[1].strip("'"))
    assert speculative["method"] == method
    assert ("model" in speculative) == (method == "custom_class")
    assert report.vllm_command.split(" \\\n")[0] == command
    assert report.vllm_command in format_report(report)


def test_without_a_runner_both_are_recommended(traffic: Path) -> None:
    report = tune([traffic], COST, TuneOptions(jobs=1), candidates=SEARCHED)
    (host,) = report.others
    assert (report.runner.name, host.runner.name) == ("gpu", "host")
    assert report.candidate != host.candidate
    said, page = format_report(report), to_html(report)
    for of in (report, host):
        assert f"RECOMMENDED: {of.candidate.label}\n" in said
        assert of.vllm_command in said
        for shown in (said, page):
            assert of.runner.about in shown
    assert said.count("TAKES AWAY the V2 runner and asynchronous scheduling") == 1
    assert [of["runner"]["name"] for of in report.to_dict()["others"]] == ["host"]
    for of, name in ((report, "gpu"), (host, "host")):
        (alone,) = [tune([traffic], COST, TuneOptions(jobs=1, runner=name), candidates=SEARCHED)]
        assert alone.batches == of.batches, "the same as alone"


def test_batch_size_where_another_setting_gains_is_not_switched_off(
    traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At batch 64 the second drafted token of a request costs more than it yields."""
    steps = ((1, 1, 1.0), (1, 17, 1.01), (64, 64, 1.0), (64, 128, 1.1), (64, 192, 1.9))
    cost = cost_file(tmp_path / "cost.json", *steps)
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    arguments = ["tune", str(traffic), "--cost", cost, "--runner", "gpu", "--jobs", "1"]
    assert cli.main([*arguments, "--html", str(page), "--json", str(data)]) == 0
    out = capsys.readouterr().out
    result = json.loads(data.read_text())
    first, second = result["batches"]
    assert first["use"] == result["recommended"]["label"]
    assert second["speedup"]["low"] < 1 < second["best_speedup"]["low"]
    assert second["use"] == second["best"] == "n=1-16 latest k=1 overlap padded"
    assert result["off_above_batch"] is None
    value = f"{second['best_speedup']['value']:.3f}"
    for shown in (out, page.read_text()):
        assert "Do not speculate" not in shown
        assert f"At batch 64 use {second['use']}: {value} [" in shown
        assert shown.count("vllm serve MODEL") == 2
    assert json.dumps({"method": "ngram_gpu", "num_speculative_tokens": 1}) in out


def test_what_synchronous_scheduling_costs_is_in_the_figures(traffic: Path, tmp_path: Path) -> None:
    def value(cost: Any = COST, **options: Any) -> tuple[float, Any]:
        report = tune([traffic], cost, TuneOptions(jobs=1, **options), candidates=FEW[:1])
        held_out = report.settings[report.recommended].held_out
        (row,) = report.batches
        return row.speedup.value, held_out

    for options, lost in (
        ({}, SYNCHRONOUS),
        ({"synchronous": 0.3}, 0.3),
        ({"synchronous": 0.0}, 0.0),
        ({"runner": "ascend"}, SYNCHRONOUS),
    ):
        speedup, of = value(**options)
        steps = 1 + 0.02 * of.drafted_per_step + lost
        assert speedup == pytest.approx(of.tokens_per_step / steps)
    # The times of a server that drafts on the host have it already.
    own = load_cost(cost_file(tmp_path / "c.json", (1, 1, 1.0), (1, 2, 1.02)))
    assert value(own)[0] == pytest.approx(value(synchronous=0.0)[0])


def test_a_gpu_has_no_ladder(traffic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="runner gpu: no setting to search: padded drafts are of"):
        tune([traffic], COST, TuneOptions(runner="gpu"), candidates=FEW)
    arguments = ["tune", str(traffic), "-c", "0.02", "--jobs", "1", "--sizes", "ladder"]
    assert cli.main(arguments) == 0
    assert "host: drafts on the host" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "is_too_few"), [(39, True), (40, False)])
def test_too_few_conversations_recommend_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, is_too_few: bool
) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in talk(count)))
    page = tmp_path / "r.html"
    arguments = ["tune", str(path), "-c", "0.02", "--jobs", "1", "--sizes", "ladder"]
    assert cli.main([*arguments, "--html", str(page), "--json", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    says = "TOO FEW: 19 held-out conversations; a recommendation needs 20."
    for shown in (out, page.read_text()):
        assert (says in shown) == is_too_few
    for word in ("RECOMMENDED", "vllm serve"):
        assert (word in out) == (not is_too_few)
    assert json.loads((tmp_path / "r.json").read_text())["too_few"] == is_too_few


def test_a_line_after_ten_silent_seconds_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 9.9, 10.1, 10.1, 11.0, 20.2, 20.2])
    monkeypatch.setattr(bar, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    drawn = bar.Bar(stream)
    for progress in (
        Progress("talk", "read", 5, 0),
        Progress("talk", "read", 6, 0),
        Progress("\x1b", "tokenize", 1, 9),
        Progress("\x1b", "tokenize", 4, 9),
    ):
        drawn.show(progress)
    drawn.clear()
    assert stream.getvalue() == "read talk: 6\ntokenize \\x1b: 4 of 9\n"
