"""Tests tuning: how traffic is read, runners, stores, the report and the command."""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cli_helpers import (
    SETTINGS,
    copy_lines,
    make_conversations,
    make_record,
    write_cost_file,
    write_similar_conversations,
)
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import InputError, ReplayOptions, replay
from ngram_npu_cli.tune import (
    CANDIDATES,
    Candidate,
    TuneOptions,
    format_report,
    load_cost,
    share_of_a_step,
    tune,
)
from ngram_npu_cli.tune.candidates import RUNNERS, SYNCHRONOUS_SHARE
from ngram_npu_cli.tune.html import draw_figure, save_html
from ngram_npu_cli.tune.measure import measure_settings
from ngram_npu_cli.tune.traffic import read_traffic

Writer = Callable[..., Path]


def test_sample_is_deterministic(write_jsonl: Writer) -> None:
    lines = [{"prompt": f"{n} " * 40, "completion": "a b c " * (n % 30)} for n in range(400)]
    path = write_jsonl(*lines)
    options = TuneOptions(sample=8000, tokenizer="bytes")
    sampled_traffic = read_traffic([path], options)
    assert sampled_traffic.is_sample
    assert 6000 < sampled_traffic.characters <= 8000
    assert (sampled_traffic.num_read, sampled_traffic.characters_read) == (
        400,
        sum(len(str(line["prompt"])) + len(str(line["completion"])) for line in lines),
    )
    assert sampled_traffic.names == read_traffic([path], options).names
    numbers = [int(name) for name in sampled_traffic.names]
    assert numbers == sorted(numbers)
    assert max(numbers) > 200, "the sample is from the whole file"
    complete_traffic = read_traffic([path], TuneOptions(tokenizer="bytes"))
    assert not complete_traffic.is_sample
    assert complete_traffic.left_out == sum(n % 30 == 0 for n in range(400))


def test_each_input_is_split_in_halves(tmp_path: Path, write_jsonl: Writer) -> None:
    for name, count in (("a", 3), ("b", 4)):
        write_jsonl(*make_conversations(count, name=name), name=f"{name}.jsonl")
    traffic = read_traffic([tmp_path])
    assert traffic.names == ("a0", "a1", "a2", "b0", "b1", "b2", "b3")
    assert traffic.selection_half.tolist() == [True, False, True, True, False, True, False]


def test_traffic_with_fewer_than_two_conversations_is_an_error(write_jsonl: Writer) -> None:
    path = write_jsonl(*make_conversations(1))
    with pytest.raises(InputError, match=r"expected 2 or more conversations .* got 1"):
        read_traffic([path])


# The report and the command


def render_page(report: Any) -> str:
    """Returns the HTML page of a report without its picture, which takes most of the time, and with
    its escapes replaced by characters."""
    no_picture = mock.patch("ngram_npu_cli.tune.html._render_svg", return_value="")
    with tempfile.TemporaryDirectory() as folder, no_picture:
        save_html(report, Path(folder) / "r.html")
        return html.unescape((Path(folder) / "r.html").read_text(encoding="utf-8"))


def run_in_shell(command: str) -> list[str]:
    """Returns the arguments that a shell passes to vllm for a command copied from a report."""
    script = f"vllm() {{ printf '%s\\0' \"$@\"; }}\n{command}\n"
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def replay_half(path: Path, first_index: int, candidate: Candidate) -> Any:
    """Replays every second conversation, from ``first_index`` on. With a store, turns are
    requests."""
    half = copy_lines(path, slice(first_index, None, 2))
    options = ReplayOptions(**dict(candidate.options), generated_only=candidate.has_store)
    return replay([half], options=options).total


def test_text_json_and_html_show_the_same_result(
    traffic_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html_file, json_file = tmp_path / "r.html", tmp_path / "r.json"
    traffic_file = traffic_file.rename(tmp_path / "\x1b[2J<script>&.jsonl")
    cost = write_cost_file(
        tmp_path / "c.json", (1, 1, 0.01), (1, 9, 0.0101), (32, 32, 0.01), (32, 64, 0.1)
    )
    arguments = ["tune", str(traffic_file), "--cost", cost, "--lookup", "2-5", "--jobs", "1"]
    against = json.dumps(dict(SETTINGS[1].options))
    files = ["--html", str(html_file), "--json", str(json_file)]
    assert cli.main([*arguments, "--runner", "host", "--against", against, *files]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(json_file.read_text())
    label = result["recommended"]["label"]
    assert result["advice"] == "Do not speculate above batch 1: no gain is sure there."
    assert result["off_above_batch"] == 1
    assert result["against"]["label"] == SETTINGS[1].label
    page = html_file.read_text(encoding="utf-8")
    for text in (out, page):
        assert f"{label}" in text
        assert result["advice"] in text
        assert f"{result['batches'][0]['speedup']['value']:.3f}" in text
        assert "step times of c.json" in text
        assert "\\x1b[2J" in text
        assert "\x1b" not in text
    for option in result["recommended"]["vllm_options"]:
        assert option in out
    (command,) = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    options = shlex.split(" ".join(result["recommended"]["vllm_options"]))
    assert run_in_shell(html.unescape(command)) == ["serve", "MODEL", *options]
    assert "<script" not in page
    addresses = re.findall(r"(?:src|href|url|@import|http-equiv)\s*[=(]\s*[\"']?(.)", page)
    assert set(addresses) == {"#"}, "the page loads nothing"
    (svg,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    labels = [
        element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert label in labels
    assert result["against"]["label"] in labels


def test_drawing_shows_the_figures_of_the_report(traffic_file: Path) -> None:
    report = tune([traffic_file], share_of_a_step(0.05), TuneOptions(jobs=1), candidates=SETTINGS)
    speedup_axes, yield_axes, gain_axes = axes = draw_figure(report).axes
    assert all(a.get_xlabel() and a.get_ylabel() for a in axes)
    speedup_line, compared_line, _ = speedup_axes.lines
    (row,) = report.batches
    assert speedup_line.get_ydata() == [row.speedup.value]
    assert compared_line.get_ydata() == [row.against.value]
    held_out = [s.held_out for s in report.settings.values()]
    expected = [[item.drafted_per_step, item.tokens_per_step] for item in held_out]
    assert yield_axes.collections[0].get_offsets().tolist() == expected
    num_counted = sum(bar.get_height() for bar in gain_axes.patches)
    assert num_counted == 2 * len(report.conversations)


def test_report_without_gain_advises_against_speculation(write_jsonl: Writer) -> None:
    turns = [([*range(n, n + 10)], [*range(n + 20, n + 40)]) for n in range(0, 4000, 100)]
    path = write_jsonl(*(make_record([turn]) for turn in turns))
    report = tune([path], share_of_a_step(0.05), TuneOptions(jobs=1), candidates=SETTINGS[:1])
    assert "ADVICE: Do not speculate: no gain is sure on this traffic." in format_report(report)
    assert "--speculative-config" not in render_page(report)


def test_report_states_sample_and_example_cost(
    write_jsonl: Writer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(*[{"prompt": "again and " * 5000, "completion": "again and " * 20}] * 30)
    monkeypatch.setattr("ngram_npu_cli.tune.CANDIDATES", SEARCH_SPACE[:1])
    arguments = ["tune", str(path), "--sample", "1", "--tokenizer", "bytes", "--jobs", "1"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["traffic"]["is_sample"]
    assert "(a SAMPLE of 30 conversations, 1.51 million characters)" in err
    assert "The verification cost is an EXAMPLE" in err
    assert "These figures are far too high" in err


COST = share_of_a_step(0.02)
SEARCH_SPACE = [c for c in CANDIDATES if c.config.k in (3, 8)]


def test_each_runner_has_its_method_and_variables(traffic_file: Path) -> None:
    def search(runner: str | None) -> Any:
        return tune(
            [traffic_file], COST, TuneOptions(jobs=1, runner=runner), candidates=SEARCH_SPACE
        )

    serve = "NGRAM_NPU_VLLM=1 vllm serve MODEL"
    reports = {}
    for name, drafts, method, command in (
        ("gpu", "padded", "ngram_gpu", serve),
        ("host", "trimmed", "custom_class", serve),
        ("ascend", "trimmed", "ngram", serve.replace(" vllm", " VLLM_USE_V2_MODEL_RUNNER=0 vllm")),
    ):
        reports[name] = report = search(name)
        assert report.runner is RUNNERS[name]
        assert not report.others
        assert {c.drafts for c in report.settings} == {drafts}
        speculative = json.loads(report.vllm_options[0].split(" ", 1)[1].strip("'"))
        assert speculative["method"] == method
        assert ("model" in speculative) == (method == "custom_class")
        assert report.format_command(report.candidate).split(" \\\n")[0] == command
    report = search(None)
    (host,) = report.others
    assert report.candidate != host.candidate
    assert (report.batches, host.batches) == (reports["gpu"].batches, reports["host"].batches)
    text, page = format_report(report), render_page(report)
    for runner_report in (report, host):
        for shown in (text, page):
            assert runner_report.runner.about in shown
            assert runner_report.format_command(runner_report.candidate) in shown
            assert f"RECOMMENDED: {runner_report.candidate.label}" in shown
    assert text.count("TAKES AWAY the V2 runner and asynchronous scheduling") == 1
    assert [part["runner"]["name"] for part in report.to_dict()["others"]] == ["host"]


def test_report_names_another_setting_that_gains_at_a_batch_size(
    traffic_file: Path, tmp_path: Path
) -> None:
    """At batch 64 the second drafted token of a request costs more than it yields."""
    steps = ((1, 1, 1.0), (1, 17, 1.01), (64, 64, 1.0), (64, 128, 1.1), (64, 192, 1.9))
    cost = load_cost(write_cost_file(tmp_path / "cost.json", *steps))
    report = tune([traffic_file], cost, TuneOptions(jobs=1, runner="gpu"))
    result = report.to_dict()
    first, second = result["batches"]
    assert first["use"] == result["recommended"]["label"]
    assert second["speedup"]["low"] < 1 < second["best_speedup"]["low"]
    assert second["use"] == second["best"] == "lookup=1-16 latest k=1 overlap padded"
    assert result["off_above_batch"] is None
    value = f"{second['best_speedup']['value']:.3f}"
    for shown in (format_report(report), render_page(report)):
        assert "Do not speculate" not in shown
        assert f"At batch 64 use {second['use']}: {value} [" in shown
        assert shown.count("vllm serve MODEL") == 2
        assert json.dumps({"method": "ngram_gpu", "num_speculative_tokens": 1}) in shown


def test_speedup_includes_synchronous_scheduling(traffic_file: Path, tmp_path: Path) -> None:
    def measure_speedup(cost: Any = COST, **options: Any) -> tuple[float, Any]:
        report = tune([traffic_file], cost, TuneOptions(jobs=1, **options), candidates=SETTINGS[:1])
        held_out = report.settings[report.candidate].held_out
        (row,) = report.batches
        return row.speedup.value, held_out

    for options, loss in (
        ({}, SYNCHRONOUS_SHARE),
        ({"synchronous": 0.3}, 0.3),
        ({"synchronous": 0.0}, 0.0),
        ({"runner": "ascend"}, SYNCHRONOUS_SHARE),
    ):
        speedup, counts = measure_speedup(**options)
        step_time = 1 + 0.02 * counts.drafted_per_step + loss
        assert speedup == pytest.approx(counts.tokens_per_step / step_time)
    # Step times of a server that drafts on the host already include the loss.
    cost = load_cost(write_cost_file(tmp_path / "c.json", (1, 1, 1.0), (1, 2, 1.02)))
    assert measure_speedup(cost)[0] == pytest.approx(measure_speedup(synchronous=0.0)[0])


def test_gpu_runner_searches_no_ladders(traffic_file: Path) -> None:
    with pytest.raises(InputError, match="runner gpu: no setting to search: padded drafts"):
        tune([traffic_file], COST, TuneOptions(runner="gpu"), candidates=SETTINGS)


@pytest.mark.parametrize(("count", "is_too_few"), [(39, True), (40, False)])
def test_too_few_conversations_recommend_nothing(
    write_jsonl: Writer, count: int, is_too_few: bool
) -> None:
    report = tune(
        [write_jsonl(*make_conversations(count))], COST, TuneOptions(jobs=1), candidates=SETTINGS
    )
    message = "TOO FEW: 19 held-out conversations; a recommendation needs 20."
    for shown in (format_report(report), render_page(report)):
        assert (message in shown) == is_too_few
        for word in ("RECOMMENDED", "vllm serve"):
            assert (word in shown) == (not is_too_few)
    assert report.to_dict()["too_few"] == is_too_few


STORE_COST = share_of_a_step(0.05)


@pytest.mark.parametrize("jobs", [1, 2])
def test_store_is_recommended_for_similar_conversations(tmp_path: Path, jobs: int) -> None:
    path = write_similar_conversations(40, tmp_path / "similar.jsonl")
    report = tune([path], STORE_COST, TuneOptions(jobs=jobs, store=True), candidates=SETTINGS)
    assert report.candidate.has_store
    assert report.store is not None
    assert report.store.best == report.candidate
    assert report.store.ratio.low > 1
    setting = report.settings[report.candidate]
    for figures, index in ((setting.selection, 0), (setting.held_out, 1)):
        replayed = replay_half(path, index, report.candidate)
        assert (figures.steps, figures.drafted) == (replayed.num_steps, replayed.num_draft_tokens)
    text = format_report(report)
    assert "A store shares text" in text
    assert "A store shares text" in render_page(report)
    result = report.to_dict()
    assert result["store"]["is_recommended"]
    assert result["recommended"]["config"]["store"] == "live"
    first, *_, last = sorted(report.conversations, key=lambda single: int(single.name))
    # The held-out half begins with an empty store, so only the loss of synchronous steps remains.
    assert first.speedup == pytest.approx(1 / 1.1, abs=1e-4)
    assert last.speedup > 1


def test_inputs_have_separate_stores(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_similar_conversations(8, tmp_path / f"{name}.jsonl")
    traffic = read_traffic([tmp_path])
    assert traffic.list_streams() == [[1, 3, 5, 7], [0, 2, 4, 6], [9, 11, 13, 15], [8, 10, 12, 14]]
    store = Candidate.of(**dict(SETTINGS[2].options), store="live")
    counts = measure_settings([store], traffic.requests, streams=traffic.list_streams())[store]
    np.testing.assert_array_equal(counts[:8], counts[8:])
    counts_of_one_store = measure_settings([store], traffic.requests)[store]
    assert counts_of_one_store.sum() < counts.sum(), "one store for both inputs contains more text"


@pytest.mark.parametrize(
    ("options", "runners"),
    [
        ([], []),
        (["--lookup", "ladder"], []),
        (["--store", "--lookup", "2-5"], []),
        (["--store", "--runner", "gpu"], []),
        (["--store"], ["host"]),
        (["--store", "--runner", "ascend"], ["ascend"]),
    ],
)
def test_store_is_searched_only_if_requested_and_possible(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    runners: list[str],
) -> None:
    padded = Candidate.of(min_n=1, max_n=16, k=3, match_policy="latest", drafts="padded")
    monkeypatch.setattr("ngram_npu_cli.tune.CANDIDATES", (*SETTINGS, padded))
    path = write_similar_conversations(6, tmp_path / "similar.jsonl")
    arguments = ["tune", str(path), "-c", "0.05", "--jobs", "1", *options, "--json", "-"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    reports = [result, *result["others"]]
    assert [r["runner"]["name"] for r in reports if r["store"] is not None] == runners
    for report in reports:
        has_store = any("store" in setting["config"] for setting in report["settings"])
        assert has_store == (report["runner"]["name"] in runners)
    assert err.count("\nStore: lookup=ladder") == len(runners), (
        "the store's gain has a separate line"
    )
