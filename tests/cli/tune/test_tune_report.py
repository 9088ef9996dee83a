"""Tuning as a whole: traffic, the report and the command."""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import InputError, ReplayInput, ReplayOptions, load_inputs, replay
from ngram_npu_cli.tune import (
    TuneOptions,
    share_of_a_step,
    tune,
)
from ngram_npu_cli.tune import measure as measure_module
from ngram_npu_cli.tune.html import draw
from ngram_npu_cli.tune.runners import SYNCHRONOUS
from ngram_npu_cli.tune.traffic import read_traffic
from tune_helpers import FEW, cost_file, talk


def test_a_sample_is_stated_and_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    lines = [{"prompt": f"{n} " * 40, "completion": "a b c " * (n % 30)} for n in range(400)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_traffic([path], TuneOptions(sample=8000, tokenizer="bytes"))
    assert found.is_sample
    assert 6000 < found.characters <= 8000
    assert (found.found, found.found_characters) == (
        400,
        sum(len(str(line["prompt"])) + len(str(line["completion"])) for line in lines),
    )
    assert found.names == read_traffic([path], TuneOptions(sample=8000, tokenizer="bytes")).names
    numbers = [int(name) for name in found.names]
    assert numbers == sorted(numbers)
    assert max(numbers) > 200, "from everywhere"
    whole = read_traffic([path], TuneOptions(tokenizer="bytes"))
    assert not whole.is_sample
    assert whole.left_out == sum(n % 30 == 0 for n in range(400))


@pytest.mark.parametrize("sample", [None, 6000])
def test_file_left_out_after_records_were_read_leaves_no_trace(
    tmp_path: Path, sample: int | None
) -> None:
    """More than half of `b` is no conversation, which is known only at its end."""
    for name in ("a", "c"):
        lines = [
            {"id": f"{name}{n}", "prompt": f"{n} " * 40, "completion": "d e"} for n in range(90)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = TuneOptions(sample=sample, tokenizer="bytes")
    expected = read_traffic([tmp_path], options)
    good = json.dumps({"id": "b", "prompt": "x" * 2000, "completion": "again"}) + "\n"
    (tmp_path / "b.jsonl").write_text(good * 9 + '{"no": "conversation"}\n' * 10)
    found = read_traffic([tmp_path], options)
    (note,) = found.notes
    assert note.startswith("no log, left out: ")
    same = [replace(of, requests=(), notes=()) for of in (found, expected)]
    np.testing.assert_equal(*map(asdict, same))
    assert [r.tokens().tolist() for r in found.requests] == [
        r.tokens().tolist() for r in expected.requests
    ]


def test_halves_are_of_each_input(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 4)):
        lines = [json.dumps(line) + "\n" for line in talk(count, name=name)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    found = read_traffic([tmp_path])
    assert found.names == ("a0", "a1", "a2", "b0", "b1", "b2", "b3")
    assert found.chosen_half.tolist() == [True, False, True, True, False, True, False]


def test_too_little_traffic(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps(talk(1)[0]))
    with pytest.raises(InputError, match=r"expected 2 or more conversations .* got 1"):
        read_traffic([path])
    path.write_text("\n")
    with pytest.raises(InputError, match=r"talk.jsonl: empty"):
        read_traffic([path])


# The whole


def executed(command: str) -> list[str]:
    """The arguments that a shell passes to vllm for a command copied from a report."""
    script = f"vllm() {{ printf '%s\\0' \"$@\"; }}\n{command}\n"
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_prediction_is_what_replay_counts_on_the_held_out_half(traffic: Path) -> None:
    report = tune([traffic], share_of_a_step(0.05), TuneOptions(jobs=1), candidates=FEW)
    (item,) = load_inputs([traffic])
    odd = ReplayInput("odd", item.conversations[1::2])
    options = ReplayOptions(**dict(report.candidate.options))
    figures = replay(inputs=[odd], options=options).total
    held_out = report.settings[report.recommended].held_out
    assert held_out.tokens_per_step == figures.tokens_per_step
    assert held_out.drafted_per_step == figures.draft_tokens_per_step
    expected = held_out.tokens_per_step / (1 + 0.05 * held_out.drafted_per_step + SYNCHRONOUS)
    (row,) = report.batches
    assert row.speedup.value == pytest.approx(expected)
    assert row.speedup.low < expected < row.speedup.high
    assert not list((traffic.parent / "cache").iterdir()), "done: nothing to resume"


def test_the_reports_show_the_same_and_are_whole(
    traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    traffic = traffic.rename(tmp_path / "\x1b[2J<script>&.jsonl")
    cost = cost_file(
        tmp_path / "c.json", (1, 1, 0.01), (1, 9, 0.0101), (32, 32, 0.01), (32, 64, 0.1)
    )
    arguments = ["tune", str(traffic), "--cost", cost, "--sizes", "consecutive", "--jobs", "1"]
    against = json.dumps(dict(FEW[1].options))
    files = ["--html", str(page), "--json", str(data)]
    assert cli.main([*arguments, "--runner", "host", "--against", against, *files]) == 0
    out, err = capsys.readouterr()
    assert err == "", "no progress where no terminal is"
    result = json.loads(data.read_text())
    label = result["recommended"]["label"]
    assert result["advice"] == "Do not speculate above batch 1: no gain is sure there."
    assert result["off_above_batch"] == 1
    assert result["against"]["label"] == FEW[1].label
    text = page.read_text(encoding="utf-8")
    for shown in (out, text):
        assert f"{label}" in shown
        assert result["advice"] in shown
        assert f"{result['batches'][0]['speedup']['value']:.3f}" in shown
        assert "step times of c.json" in shown
        assert "\\x1b[2J" in shown
        assert "\x1b" not in shown
    for option in result["recommended"]["vllm_options"]:
        assert option in out
    (command,) = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    options = shlex.split(" ".join(result["recommended"]["vllm_options"]))
    assert executed(html.unescape(command)) == ["serve", "MODEL", *options]
    assert "<script" not in text
    loaded = re.findall(r"(?:src|href|url|@import|http-equiv)\s*[=(]\s*[\"']?(.)", text)
    assert set(loaded) == {"#"}, "needs a network"
    (drawing,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    labels = [of.text for of in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert label in labels
    assert result["against"]["label"] in labels


def test_the_drawing_has_the_report_s_figures(traffic: Path) -> None:
    report = tune([traffic], share_of_a_step(0.05), TuneOptions(jobs=1), candidates=FEW)
    by_batch, yields, gains = draw(report).axes
    chosen, against, _ = by_batch.lines
    (row,) = report.batches
    assert chosen.get_ydata() == [row.speedup.value]
    assert against.get_ydata() == [row.against.value]
    held_out = [s.held_out for s in report.settings]
    expected = [[of.drafted_per_step, of.tokens_per_step] for of in held_out]
    assert yields.collections[0].get_offsets().tolist() == expected
    counted = sum(of.get_height() for of in gains.patches)
    assert counted == 2 * len(report.singles)


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_a_page_without_its_extra(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    arguments = ["tune", "nowhere.jsonl", "-c", "0.05", "--html", str(tmp_path / "r.html")]
    assert cli.main(arguments) == 2
    says = f'--html needs {module}: pip install {module} (the extra "html")'
    assert says in capsys.readouterr().err


def test_nothing_to_gain_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.jsonl"
    rng = np.random.default_rng(3)
    lines = [
        {
            "prompt_token_ids": rng.integers(0, 10**6, 30).tolist(),
            "completion_token_ids": rng.integers(0, 10**6, 30).tolist(),
        }
        for _ in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "r.html"
    assert cli.main(["tune", str(path), "-c", "0.05", "--jobs", "1", "--html", str(page)]) == 0
    assert "ADVICE: Do not speculate: no gain is sure on this traffic." in capsys.readouterr().out
    assert "--speculative-config" not in page.read_text()


def test_the_sample_and_the_example_are_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.jsonl"
    line = json.dumps({"prompt": "again and " * 5000, "completion": "again and " * 20})
    path.write_text(f"{line}\n" * 30)
    arguments = ["tune", str(path), "--sample", "1", "--tokenizer", "bytes", "--jobs", "1"]
    assert cli.main([*arguments, "--sizes", "consecutive", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["traffic"]["is_sample"]
    assert "(a SAMPLE of 30 conversations, 1.51 million characters)" in err
    assert "The verification cost is an EXAMPLE" in err
    assert "These figures compare with nothing" in err


def test_interrupted_and_resumed(
    traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    replay_piece = measure_module._replay
    left = iter(range(4))

    def interrupted(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return replay_piece(*arguments)

    arguments = ["tune", str(traffic), "-c", "0.05", "--jobs", "1", "--sizes", "consecutive"]
    arguments += ["--json", str(tmp_path / "r.json")]
    with monkeypatch.context() as patch:
        patch.setattr(measure_module, "_replay", interrupted)
        assert cli.main(arguments) == 130
    assert "the same command continues from here" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
    assert cli.main(arguments) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["pieces_from_an_earlier_run"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "-1"], "--cost: must be at least 0 and below 10, got -1"),
        (["--cost", "nan"], "--cost: must be at least 0 and below 10, got nan"),
        (["--cost", "nowhere.json"], "nowhere.json: not a file of step times"),
        (["--batch-size", "1,3"], "batch size 3: "),
        (["--batch-size", "1,x"], "--batch-size: invalid list of integers value: '1,x'"),
        (["--against", "{"], "expected a setting such as"),
        (["--html", "{tmp}/no/such.html"], "does not exist"),
        (["--jobs", "0"], "--jobs: must be at least 1"),
        (["--sample", "-1"], "--sample: must be at least 0, got -1"),
        (["{tmp}/nowhere.jsonl"], "no such file"),
    ],
)
def test_bad_options_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    paths = [] if arguments[0].endswith(".jsonl") else ["talk.jsonl"]
    assert cli.main(["tune", *paths, *(a.replace("{tmp}", str(tmp_path)) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
