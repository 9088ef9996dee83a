"""Tuning with a store: text of one conversation helps the next if they are alike."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import NgramConfig
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import InputError, ReplayInput, ReplayOptions, load_inputs, replay
from ngram_npu_cli.tune import (
    Candidate,
    TuneOptions,
    format_report,
    parse_candidate,
    share_of_a_step,
    tune,
    vllm_options,
)
from ngram_npu_cli.tune import measure as measure_module
from ngram_npu_cli.tune.html import to_html
from ngram_npu_cli.tune.measure import Cache, measure
from ngram_npu_cli.tune.traffic import read_traffic
from tune_helpers import FEW, alike

COST = share_of_a_step(0.05)
ALONE = TuneOptions(jobs=1, store=True)


def replayed(path: Path, number: int, candidate: Candidate) -> Any:
    """Every second conversation, as `ngram-npu replay --store live --generated-only` replays it."""
    (item,) = load_inputs([path])
    part = ReplayInput("part", item.conversations[number::2])
    given: dict[str, Any] = dict(candidate.options)
    return replay(inputs=[part], options=ReplayOptions(**given, generated_only=True)).total


@pytest.mark.parametrize("jobs", [1, 2])
def test_where_conversations_are_alike_a_store_is_recommended(tmp_path: Path, jobs: int) -> None:
    path = alike(40, tmp_path / "alike.jsonl")
    report = tune([path], COST, TuneOptions(jobs=jobs, store=True), candidates=FEW)
    assert report.candidate.has_store
    assert report.store is not None
    assert report.store.best == report.recommended
    assert report.store.ratio.low > 1
    setting = report.settings[report.recommended]
    for figures, number in ((setting.chosen, 0), (setting.held_out, 1)):
        counted = replayed(path, number, report.candidate)
        assert (figures.steps, figures.drafted) == (counted.num_steps, counted.num_draft_tokens)
    said = format_report(report)
    assert "A store shares text" in said
    assert "A store shares text" in to_html(report)
    result = report.to_dict()
    assert result["store"]["is_recommended"]
    assert result["recommended"]["config"]["store"] == "live"
    first, *_, last = sorted(report.singles, key=lambda single: int(single.name))
    # The held-out half begins with an empty store: only the synchronous step remains.
    assert first.speedup == pytest.approx(1 / 1.1, abs=1e-4)
    assert last.speedup > 1


def test_where_nothing_repeats_none_is(traffic: Path) -> None:
    report = tune([traffic], COST, ALONE, candidates=FEW)
    assert report.store is not None
    assert not report.candidate.has_store
    assert "No store is recommended" in format_report(report)
    assert not report.to_dict()["store"]["is_recommended"]


def test_each_input_has_its_own_store(tmp_path: Path) -> None:
    for name in ("a", "b"):
        alike(8, tmp_path / f"{name}.jsonl")
    traffic = read_traffic([tmp_path])
    assert traffic.streams() == [[1, 3, 5, 7], [0, 2, 4, 6], [9, 11, 13, 15], [8, 10, 12, 14]]
    store = Candidate.of(**dict(FEW[2].options), store="live")
    (counts,) = measure([store], traffic.requests, streams=traffic.streams())
    np.testing.assert_array_equal(counts[:8], counts[8:])
    (as_one,) = measure([store], traffic.requests)
    assert as_one.sum() < counts.sum(), "one store for all knows more"


@pytest.mark.parametrize(
    ("options", "searched"),
    [
        ([], []),
        (["--sizes", "ladder"], []),
        (["--store", "--sizes", "consecutive"], []),
        (["--store", "--runner", "gpu"], []),
        (["--store"], ["host"]),
        (["--store", "--runner", "ascend"], ["ascend"]),
    ],
)
def test_a_store_is_searched_only_where_it_is_wanted_and_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], searched: list[str]
) -> None:
    path = alike(6, tmp_path / "alike.jsonl")
    arguments = ["tune", str(path), "-c", "0.05", "--jobs", "1", *options, "--json", "-"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    reports = [result, *result["others"]]
    assert [r["runner"]["name"] for r in reports if r["store"] is not None] == searched
    for of in reports:
        tried = any("store" in setting["config"] for setting in of["settings"])
        assert tried == (of["runner"]["name"] in searched)
    assert err.count("\nStore: ladder") == len(searched), "its gain is a line of its own"


def test_streams_are_kept_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = alike(12, tmp_path / "alike.jsonl")
    options = TuneOptions(jobs=1, store=True, cache=tmp_path / "pieces.jsonl")
    first = tune([path], COST, options, candidates=FEW)
    assert len(Cache(options.cache)) == 3 + 2 * 2, "a ladder with two stores, over two halves"

    def never(*_: Any) -> Any:
        raise AssertionError("replayed again")

    monkeypatch.setattr(measure_module, "_replay", never)
    assert tune([path], COST, options, candidates=FEW).settings == first.settings


@pytest.mark.parametrize("tokens", [100_000, 1_000_000])
def test_vllm_options_of_a_store(tokens: int) -> None:
    candidate = Candidate.of(**dict(FEW[2].options), store="live", store_tokens=tokens)
    words = shlex.split(" ".join(vllm_options(candidate)))
    k = json.loads(words[1])["num_speculative_tokens"]
    own = json.loads(words[3])["ngram_npu"]
    assert own["store"] == "live"
    assert NgramConfig(num_speculative_tokens=k, **own) == candidate.config
    assert candidate.label.endswith(
        {100_000: "live store=100k", 1_000_000: "live store=1M"}[tokens]
    )


def test_a_store_that_is_too_small() -> None:
    text = '{"sizes": "ladder", "min_draft_probability": 0.1, "store": "live", "store_tokens": 9}'
    with pytest.raises(InputError, match="expected at least 1024, got 9"):
        parse_candidate(text)
