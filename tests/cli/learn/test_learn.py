"""Learning from logs: the curve, the size, what the file holds, and what a wrong input says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import by_hand
import numpy as np
import pytest
from ngram_npu import NgramConfig, NgramStore, store_file
from ngram_npu.scopes import scope_of
from ngram_npu_cli import command as cli
from ngram_npu_cli.learn import LearnOptions, curve, describe, format_report, learn, reading, stores
from ngram_npu_cli.learn.fit_draft_costs import Costs
from ngram_npu_cli.replay import InputError

SMALL = LearnOptions(tokenizer="ids", store_tokens=16384)


def talks(count: int, seed: int = 0) -> list[by_hand.Talk]:
    """Conversations of two tenants, of two turns; answers are parts of few texts, no two equal."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 500, (6, 60))
    found = []
    for number in range(count):
        parts = [texts[i, a : a + 24].tolist() for i, a in rng.integers(0, (6, 36), (2, 2))]
        turns = [
            ([1000 + number, 2000 + i], [*part, 3000 + number]) for i, part in enumerate(parts)
        ]
        found.append((f"tenant {number % 2}", turns))
    return found


def write(path: Path, found: list[by_hand.Talk]) -> Path:
    with path.open("w") as file:
        for scope, turns in found:
            said = [{"prompt_token_ids": p, "completion_token_ids": c} for p, c in turns]
            file.write(json.dumps({"turns": said, "who": {"tenant": scope}}) + "\n")
    return path


def answers(found: list[by_hand.Talk]) -> list[tuple[Any, list[int]]]:
    return [(scope, answer) for scope, turns in found for _, answer in turns]


def held(path: Path) -> list[tuple[int, list[int]]]:
    return [(scope, text.tolist()) for scope, text in stores.texts_of(NgramStore.load(path))]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return write(tmp_path / "logs.jsonl", talks(20))


def test_costs_are_fitted_on_the_same_conversations(tmp_path: Path) -> None:
    logs, file = write(tmp_path / "logs.jsonl", talks(60)), tmp_path / "costs"
    report = learn([logs], options=SMALL, costs=file)
    assert report.costs is not None
    found = report.costs
    assert found["conversations"] > 0
    assert found["gain"] == found["fitted"] / found["shipped"]
    assert found["recommended"] == (found["gain"] > 1)
    assert "costs fitted on these logs, " in format_report(report)
    again, other = (write(tmp_path / name, talks(60, seed)) for name, seed in (("a", 0), ("b", 1)))
    fitted = []
    for source in (again, other):
        learn([source], options=SMALL, costs=tmp_path / "again")
        fitted.append(Costs.load(tmp_path / "again"))
    assert Costs.load(file) == fitted[0] != fitted[1]


# The curve


@pytest.mark.parametrize(("scope_field", "size"), [(None, 4096), ("who.tenant", 16384)])
def test_the_curve_is_that_of_the_references(
    logs: Path, scope_field: str | None, size: int
) -> None:
    """With 4096 tokens a store holds 16 answers."""
    options = LearnOptions(tokenizer="ids", store_tokens=size, scope_field=scope_field)
    report = learn([logs], options=options)
    said = [(scope if scope_field else None, turns) for scope, turns in talks(20)]
    earlier, last = answers(said[:18]), said[18:]
    assert report.evaluated == 2
    assert [of.share for of in report.curve] == [None, 0, 1 / 8, 1 / 4, 1 / 2, 1]
    for of in report.curve:
        known = earlier[36 - round(36 * (of.share or 0)) :]
        expected = by_hand.replayed(last, None if of.share is None else known, size)
        assert (of.tokens, of.steps, of.drafted) == expected
        assert of.known_tokens == 25 * len(known)
    assert report.curve[-1].tokens_per_step > 1.2 * report.curve[0].tokens_per_step
    assert list(report.by_k) == [8, 16, 32]
    for k, of in report.by_k.items():
        assert (of.tokens, of.steps, of.drafted) == by_hand.replayed(last, earlier, size, k=k)
    assert report.by_k[8] == report.curve[-1] != report.by_k[16]
    # Another limit, and the oldest answers in place of the newest ones, are noticed.
    half = report.curve[-2]
    for wrong in (
        by_hand.replayed(last, earlier[:18], size),
        by_hand.replayed(last, earlier, size, limit=9),
    ):
        assert (half.tokens, half.steps, half.drafted) != wrong


@pytest.mark.parametrize(
    ("yields", "size", "looked_at"),
    [
        ([2.0, 2.0, 2.0, 2.0], 65536, 4),
        ([2.0, 1.999, 1.99, 1.0], 262144, 3),
        ([2.0, 1.9, 1.9, 1.9], 524288, 2),
        ([2.0, 1.999, 1.997, 1.99], 131072, 4),
        ([2.0, 1.985, 1.97, 1.96], 524288, 2),
        ([2.0, 1.998, 1.995, 1.993], 262144, 3),
    ],
)
def test_the_size_is_the_smallest_that_yields_as_much_as_one_that_holds_everything(
    yields: list[float], size: int, looked_at: int
) -> None:
    class Known(curve.Replayed):
        def point(self, share: float | None, store_tokens: int) -> Any:
            place = (524288 // store_tokens).bit_length() - 1
            return SimpleNamespace(tokens_per_step=yields[place], store_tokens=store_tokens)

    earlier = [(0, np.zeros(100, np.int32))] * 2048
    replayed = Known([], earlier, NgramConfig(), lambda *_: None)
    found, tried = replayed.sizes()
    assert (found, len(tried)) == (size, looked_at)


@pytest.mark.parametrize("lengths", [[2, 300, 256], [257], [497, 496, 5000]])
def test_a_store_of_the_size_that_holds_all_forgets_nothing(lengths: list[int]) -> None:
    texts = [(7, np.arange(length, dtype=np.int32)) for length in lengths]
    blocks = sum(stores.blocks_of(length) for length in lengths)
    for spare, forgets in ((0, False), (1, True)):
        store = stores.new(max(1024, 256 * (blocks - spare)))
        stores.enter(store, texts)
        assert (store.statistics.tokens_held < sum(lengths)) == (forgets and blocks > 4)
    assert curve.holding(texts) == curve.LEAST_TOKENS


def test_memory_is_bounded(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long logs the newest text is kept, and the curve is of fewer conversations."""
    monkeypatch.setattr(reading, "RECENT_TOKENS", 60)
    heard = reading.Heard(most_blocks=3)
    reading.read_logs([logs], heard, reading.Tokenizing("ids", "auto"), SMALL)
    assert [text.tolist() for _, text in heard.texts] == [a for _, a in answers(talks(20))[-3:]]
    assert (len(heard.recent), heard.conversations, heard.tokens) == (1, 20, 1000)
    monkeypatch.setattr(curve, "MAX_EVALUATED", 40)
    report = learn([logs], options=SMALL)
    assert report.evaluated == 1
    assert report.notes[0] == "replayed: the newest 1 conversations of the tenth"


@pytest.mark.parametrize(("size", "is_full"), [(4096, True), (9216, False)])
def test_curve_of_a_store_that_forgets_says_so(logs: Path, size: int, is_full: bool) -> None:
    """36 answers of 25 tokens take a block of 256 tokens each."""
    report = learn([logs], options=LearnOptions(tokenizer="ids", store_tokens=size))
    notes = [note for note in report.notes if "forgets the oldest" in note]
    expected = "the earlier answers take 9216 tokens of a store, and this one has 4096"
    assert [note.partition(": ")[0] for note in notes] == [expected] * is_full


# The file


def test_files_of_several_engines_become_one(tmp_path: Path) -> None:
    said = talks(20)
    parts = [write(tmp_path / f"{i}.jsonl", said[i * 10 : i * 10 + 10]) for i in range(2)]
    whole = tmp_path / "whole"
    report = learn(parts, whole, SMALL)
    of_engine = [tmp_path / f"{i}.store" for i in range(2)]
    for part, file in zip(parts, of_engine, strict=True):
        learn([part], file, SMALL)
    expected = [(0, answer) for _, answer in answers(said)]
    assert held(whole) == expected
    assert report.tokens_held == sum(len(answer) for _, answer in expected)
    merged = tmp_path / "merged"
    alone = learn(of_engine, merged, SMALL)
    assert held(merged) == expected
    learn([merged, *of_engine], merged, SMALL)
    assert held(merged) == expected, "text of two files is learned once"
    assert not alone.curve, "stores have no prompts"
    assert "no curve" in alone.notes[0]
    # A store is older than logs, wherever it is named; the curve then is that of the logs.
    mixed = learn([parts[1], of_engine[0]], merged, SMALL)
    assert held(merged) == expected
    assert [of.tokens for of in mixed.curve] == [24 * 2] * 6
    assert mixed.curve[-1].known_tokens == report.curve[-1].known_tokens + 50


def test_equal_texts_of_two_scopes_in_two_files_are_two_texts(tmp_path: Path) -> None:
    said = [(scope, turns) for scope in ("a", "b") for _, turns in talks(3)]
    options = LearnOptions(tokenizer="ids", store_tokens=16384, scope_field="who.tenant")
    files = [tmp_path / f"{i}.store" for i in range(2)]
    for file, part in zip(files, (said[:3], said[3:]), strict=True):
        learn([write(tmp_path / "logs.jsonl", part)], file, options)
    merged = tmp_path / "merged.store"
    learn(files, merged, options)
    assert held(merged) == [(scope_of(scope), text) for scope, text in answers(said)]


def test_merging_with_a_copy_adds_nothing_in_any_scope(tmp_path: Path, logs: Path) -> None:
    options = LearnOptions(tokenizer="ids", store_tokens=16384, scope_field="who.tenant")
    first, second, merged = (tmp_path / f"{name}.store" for name in ("first", "copy", "merged"))
    learn([logs], first, options)
    second.write_bytes(first.read_bytes())
    learn([first, second], merged, options)
    assert held(merged) == held(first)
    assert describe(merged)["scopes"] == 2


def test_stores_are_of_one_tokenizer(tmp_path: Path, logs: Path) -> None:
    text, digests = tmp_path / "text.jsonl", []
    text.write_text(json.dumps({"prompt": "a", "completion": "b c d"}) + "\n")
    for name in ("mistral-v1", "mistral-v3"):
        pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
        pytest.importorskip("sentencepiece", reason="needs the extra ngram-npu[replay]")
        learn([text], tmp_path / name, LearnOptions(tokenizer=name, store_tokens=4096))
        digests.append(describe(tmp_path / name)["tokenizer"])
    assert len(set(digests)) == 2
    first, second = (tmp_path / name for name in ("mistral-v1", "mistral-v3"))
    for paths, options in (
        ([first, second], LearnOptions()),
        ([second, text], LearnOptions(tokenizer="mistral-v1")),
        ([second, text], LearnOptions()),
    ):
        with pytest.raises(InputError, match=f"tokenizer: expected .*vocabulary.*{digests[0]}"):
            learn(paths, options=options)
    # Recorded ids are taken for those of the stores.
    report = learn([second, logs], tmp_path / "both", LearnOptions(store_tokens=16384))
    assert describe(tmp_path / "both")["tokenizer"] == report.tokenizer_digest == digests[1]


def test_a_scope_is_the_record_s(tmp_path: Path, logs: Path) -> None:
    file = tmp_path / "s"
    with logs.open("a") as more:
        for who in ({}, {"tenant": None}, {"tenant": True}, {"tenant": 1 << 62}, "x"):
            turn = {"prompt_token_ids": [1], "completion_token_ids": [5, 6]}
            more.write(json.dumps({"turns": [turn], "who": who}) + "\n")
    options = LearnOptions(tokenizer="ids", store_tokens=16384, scope_field="who.tenant")
    report = learn([logs], file, options)
    assert held(file) == [(scope_of(scope), text) for scope, text in answers(talks(20))]
    assert describe(file)["scopes"] == 2
    assert "5 of 25 records are skipped (20.0%): " in report.notes[0]
    assert 'scope field "who.tenant": expected a string or an integer' in report.notes[0]
    with pytest.raises(InputError, match=r'logs.jsonl:21: scope field "who.tenant"'):
        learn([logs], file, LearnOptions(scope_field="who.tenant", strict=True, tokenizer="ids"))


@pytest.mark.parametrize("phase", ["read", "replay", "learn", "save"])
def test_an_interruption_leaves_the_old_file(
    tmp_path: Path, logs: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s"
    learn([logs], file, SMALL)
    before = file.read_bytes()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    if phase == "save":
        monkeypatch.setattr(store_file.os, "replace", interrupt)

    def stop(progress: Any) -> None:
        if progress.phase == phase:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        learn([logs, logs], file, SMALL, progress=stop)
    assert file.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["logs.jsonl", "s"]


# The command


def test_text_json_and_picture(
    tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra ngram-npu[plot]")
    file, picture = tmp_path / "s", tmp_path / "c.png"
    given = ["learn", str(logs), "--tokenizer", "ids", "-c", "0.1"]
    assert cli.main([*given, "-o", str(file), "--json", "-", "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["format"] == "ngram_npu.learn/1"
    assert report["store_tokens"] == 65536
    best = report["curve"][-1]
    assert best["tokens_per_step"] == best["tokens"] / best["steps"]
    assert best["speedup"] == pytest.approx(
        best["tokens_per_step"] / (1 + 0.1 * best["drafted"] / best["steps"])
    )
    assert f"{best['tokens_per_step']:>13.3f}{best['drafted_per_step']:>14.3f}" in err
    speedups = {k: of["speedup"] for k, of in report["by_k"].items()}
    best_k = max(speedups, key=lambda k: speedups[k])
    assert f"32: {speedups['32']:.2f}x; best at this cost: k={best_k}" in err
    assert "TOO FEW: the figures are of 2 conversations" in err
    assert f"{file}: 1000 tokens in a store of 65536" in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["store", "info", str(file)]) == 0
    assert "tokens      1000 of 65536, in 40 texts\nscopes      1\n" in capsys.readouterr().out
    assert cli.main(["store", "info", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file_bytes"] == report["file_bytes"]
    assert cli.main(given) == 0
    assert capsys.readouterr().out.endswith("nothing is saved: no -o FILE\n")


def test_interrupted_writing_leaves_all_old_files(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra ngram-npu[plot]")
    record, picture = tmp_path / "r.json", tmp_path / "c.png"

    def interrupted_save(report: Any, path: Path, suffix: str) -> None:
        path.write_bytes(b"half a picture")
        assert len(os.listdir(tmp_path)) == 5, "the JSON is complete next to its target by now"
        raise KeyboardInterrupt

    monkeypatch.setattr("ngram_npu_cli.learn.plot.save_plot", interrupted_save)
    record.write_text("old")
    picture.write_text("old too")
    outputs = ["--json", str(record), "--plot", str(picture)]
    assert cli.main(["learn", str(logs), "--tokenizer", "ids", *outputs]) == 130
    assert (record.read_text(), picture.read_text()) == ("old", "old too")
    assert sorted(os.listdir(tmp_path)) == ["c.png", "logs.jsonl", "r.json"]


def test_plot_without_matplotlib_names_the_missing_package(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["learn", str(logs), "--plot", str(tmp_path / "c.svg")]) == 2
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_the_demonstration(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["learn", "--demo", "--limit", "2", "--tokenizer", "bytes"]) == 0
    assert "2 conversations, 2 answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["learn", "none.jsonl"], "none.jsonl: no such file"),
        (["learn", "LOGS", "-o", "none/s"], "/none does not exist"),
        (["learn", "LOGS", "-o", "."], ".: is a directory"),
        (["learn", "LOGS", "-o", "LOGS"], "logs.jsonl: is not a store's file, and is not overwr"),
        (["learn", "LOGS", "-o", "/dev/null"], "/dev/null: is not a store's file"),
        (["learn", "LOGS", "--store-tokens", "700"], "token_capacity: expected at least 1024"),
        (["learn", "LOGS", "--store-tokens", "0"], "--store-tokens: must be at least 1, got 0"),
        (["learn", "LOGS", "--k", "65"], "k: expected 1 to 64, got 65"),
        (["learn", "LOGS", "--cost", "-1"], "--cost: must be at least 0"),
        (["learn", "LOGS", "--store"], "unrecognized arguments: --store; did you mean"),
        (["learn", "LOGS", "--scope-field", "no"], 'scope field "no": expected a string'),
        (["learn", "--demo", "--scope-field", "no"], "scope_field: expected none for the standard"),
        (["learn", "LOGS", "--plot", "c.x"], 'c.x: unknown plot format "x"'),
        (["learn", "BAD"], "bad.store: truncated: 11 bytes"),
        (["learn", "SHORT"], "nothing to learn: no answer of 2 or more tokens"),
        (["store", "info", "LOGS"], "logs.jsonl: not a file of a store"),
        (["store", "info", "none"], "none: No such file or directory"),
        (["store"], "the following arguments are required: ACTION"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path,
    logs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.store").write_bytes(b"NGRSTORE" + bytes(3))
    short = {"prompt_token_ids": [1], "completion_token_ids": [2]}
    (tmp_path / "short.jsonl").write_text(json.dumps({"turns": [short]}))
    names = {"LOGS": str(logs), "BAD": "bad.store", "SHORT": "short.jsonl"}
    given = [names.get(word, word) for word in arguments]
    if given[0] == "learn" and "-o" not in given:
        given += ["-o", "new.store", "--tokenizer", "ids"]
    assert cli.main(given) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new.store").exists()
