"""Tests `ngram-npu learn`: the curve, the size of the store, the store file, and errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import make_record, read_sample
from core.host_drafting.reference import Reference
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.store import scope_of
from ngram_npu_cli import command as cli
from ngram_npu_cli import learn as learn_module
from ngram_npu_cli.learn import LearnOptions, curve, describe, learn
from ngram_npu_cli.replay import InputError

Turn = tuple[list[int], list[int]]  # prompt and answer
RecordedTurns = tuple[Any, list[Turn]]
"""The scope and the turns of a conversation."""


def replay_by_reference(
    conversations: Sequence[RecordedTurns],
    stored_texts: Sequence[tuple[Any, list[int]]] | None,
    store_tokens: int,
    k: int = 8,
) -> tuple[int, int, int]:
    """Returns the numbers of tokens, steps and drafted tokens. ``stored_texts`` are scopes and
    texts that the store contains at first; None: no store."""
    config = NgramConfig(sizes="ladder", k=k, min_draft_probability=0.177)
    store = None if stored_texts is None else NgramStore(1, store_tokens)
    reference = Reference(config, store, (1, 200))
    for scope, text in stored_texts or ():
        reference.begin(0, [], scope_of(scope))
        reference.step([0], [text])
        reference.end(0)
    num_tokens = num_steps = num_drafted = 0
    for scope, turns in conversations:
        context: list[int] = []
        for prompt, answer in turns:
            context += prompt
            reference.begin(0, context, scope_of(scope))
            sampled, remaining = answer[:1], answer[1:]
            while remaining:
                (draft,), (count,), *_ = reference.step([0], [sampled])
                pairs = zip(draft[:count], remaining, strict=False)
                num_accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                sampled, remaining = remaining[: num_accepted + 1], remaining[num_accepted + 1 :]
                num_tokens, num_steps = num_tokens + len(sampled), num_steps + 1
                num_drafted += count
            reference.end(0)
            context += answer
    return num_tokens, num_steps, num_drafted


OPTIONS = LearnOptions(tokenizer="ids", store_tokens=16384)


def make_conversations(count: int, seed: int = 0) -> list[RecordedTurns]:
    """Returns conversations of two turns, of two tenants. Answers are parts of six texts."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 500, (6, 60))
    conversations = []
    for number in range(count):
        parts = [texts[i, a : a + 24].tolist() for i, a in rng.integers(0, (6, 36), (2, 2))]
        turns = [
            ([1000 + number, 2000 + i], [*part, 3000 + number]) for i, part in enumerate(parts)
        ]
        conversations.append((f"tenant {number % 2}", turns))
    return conversations


def write_logs(path: Path, conversations: list[RecordedTurns]) -> Path:
    with path.open("w") as file:
        for scope, turns in conversations:
            file.write(json.dumps(make_record(turns) | {"who": {"tenant": scope}}) + "\n")
    return path


def list_answers(conversations: list[RecordedTurns]) -> list[tuple[Any, list[int]]]:
    return [(scope, answer) for scope, turns in conversations for _, answer in turns]


def load_texts(path: Path) -> list[tuple[int, list[int]]]:
    """Returns the scopes and texts in a store file."""
    return [(scope, text.tolist()) for scope, text in NgramStore.load(path).texts()]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return write_logs(tmp_path / "logs.jsonl", make_conversations(20))


# The curve


@pytest.mark.parametrize(("scope_field", "size"), [(None, 4096), ("who.tenant", 9216)])
def test_curve_equals_replay_by_reference(logs: Path, scope_field: str | None, size: int) -> None:
    """Each of the 36 earlier answers of 25 tokens needs a block of 256 tokens: 9216 in all."""
    options = LearnOptions(tokenizer="ids", store_tokens=size, scope_field=scope_field)
    report = learn([logs], options=options)
    conversations = [
        (scope if scope_field else None, turns) for scope, turns in make_conversations(20)
    ]
    earlier_texts, evaluated = list_answers(conversations[:18]), conversations[18:]
    assert report.about["evaluated"] == 2
    assert [point.share for point in report.curve] == [None, 0, 1 / 8, 1 / 4, 1 / 2, 1]
    for point in report.curve:
        stored_texts = earlier_texts[36 - round(36 * (point.share or 0)) :]
        texts = None if point.share is None else stored_texts
        expected = replay_by_reference(evaluated, texts, size)
        assert (point.tokens, point.steps, point.drafted) == expected
        assert point.known_tokens == 25 * len(stored_texts)
    assert report.curve[-1].tokens_per_step > 1.2 * report.curve[0].tokens_per_step
    assert list(report.by_k) == [8, 16, 32]
    for k, point in report.by_k.items():
        assert (point.tokens, point.steps, point.drafted) == replay_by_reference(
            evaluated, earlier_texts, size, k=k
        )
    assert report.by_k[8] == report.curve[-1] != report.by_k[16]
    notes = [note.partition(": ")[0] for note in report.notes if "the oldest are evicted" in note]
    expected_note = "the earlier answers need 9216 tokens of store capacity, but the store has 4096"
    assert notes == [expected_note] * (size == 4096)


@pytest.mark.parametrize("lengths", [[2, 300, 256], [257], [497, 496, 5000]])
def test_full_size_store_keeps_all_texts(lengths: list[int]) -> None:
    texts = [(7, np.arange(length, dtype=np.int32)) for length in lengths]
    blocks = sum(curve.count_blocks(length) for length in lengths)
    for num_missing_blocks, evicts in ((0, False), (1, True)):
        store = curve.make_store(max(1024, 256 * (blocks - num_missing_blocks)))
        for scope, tokens in texts:
            store.add_text(tokens, scope)
        assert (store.statistics.tokens_held < sum(lengths)) == (evicts and blocks > 4)
    assert curve.compute_full_size(texts) == curve.MIN_STORE_TOKENS


def test_learn_keeps_only_the_newest_text_in_memory(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long logs, only the newest text is kept and fewer conversations are evaluated."""
    monkeypatch.setattr(learn_module, "RECENT_TOKENS", 60)
    sample = read_sample([logs], "ids", max_blocks=3)
    assert [text.tolist() for _, text in sample.texts] == [
        answer for _, answer in list_answers(make_conversations(20))[-3:]
    ]
    assert (len(sample.recent), sample.conversations, sample.tokens) == (1, 20, 1000)
    monkeypatch.setattr(curve, "MAX_EVALUATED_TOKENS", 40)
    report = learn([logs], options=OPTIONS)
    assert report.about["evaluated"] == 1
    assert report.notes[0] == "replayed: the newest 1 conversations of the last tenth"


# The file


def test_learn_merges_stores_of_several_engines(tmp_path: Path) -> None:
    conversations = make_conversations(20)
    parts = [
        write_logs(tmp_path / f"{i}.jsonl", conversations[i * 10 : i * 10 + 10]) for i in range(2)
    ]
    store_of_logs = tmp_path / "whole"
    report = learn(parts, store_of_logs, OPTIONS)
    engine_stores = [tmp_path / f"{i}.store" for i in range(2)]
    for part, file in zip(parts, engine_stores, strict=True):
        learn([part], file, OPTIONS)
    expected = [(0, answer) for _, answer in list_answers(conversations)]
    assert load_texts(store_of_logs) == expected
    assert report.tokens_held == sum(len(answer) for _, answer in expected)
    merged = tmp_path / "merged"
    merge_report = learn(engine_stores, merged, OPTIONS)
    assert load_texts(merged) == expected
    learn([merged, *engine_stores], merged, OPTIONS)
    assert load_texts(merged) == expected, "text that two files contain is learned once"
    assert not merge_report.curve, "stores contain no prompts"
    assert "no curve" in merge_report.notes[0]
    # In any order of the arguments, a store is older than logs, and the curve is that of the logs.
    mixed_report = learn([parts[1], engine_stores[0]], merged, OPTIONS)
    assert load_texts(merged) == expected
    assert [point.tokens for point in mixed_report.curve] == [24 * 2] * 6
    assert mixed_report.curve[-1].known_tokens == report.curve[-1].known_tokens + 50


TENANT_OPTIONS = LearnOptions(tokenizer="ids", store_tokens=16384, scope_field="who.tenant")


def test_merge_keeps_equal_texts_of_different_scopes_and_drops_copies(tmp_path: Path) -> None:
    turns = [turns for _, turns in make_conversations(3)]
    conversations = [(scope, parts) for scope in ("a", "b", "b") for parts in turns]
    files = [tmp_path / f"{i}.store" for i in range(3)]
    # A text that a single store contains twice is kept twice.
    for file, part in zip(files, (conversations[:3], conversations[3:]), strict=False):
        learn([write_logs(tmp_path / "logs.jsonl", part)], file, TENANT_OPTIONS)
    files[2].write_bytes(files[1].read_bytes())
    merged = tmp_path / "merged.store"
    learn(files, merged, TENANT_OPTIONS)
    assert load_texts(merged) == [
        (scope_of(scope), text) for scope, text in list_answers(conversations)
    ]
    assert describe(merged)["scopes"] == 2


def test_learn_rejects_stores_of_different_tokenizers(tmp_path: Path, logs: Path) -> None:
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
    # Recorded token ids are assumed to be from the tokenizer of the stores.
    report = learn([second, logs], tmp_path / "both", LearnOptions(store_tokens=16384))
    assert (
        describe(tmp_path / "both")["tokenizer"] == report.about["tokenizer_digest"] == digests[1]
    )


def test_scope_field_separates_scopes_and_skips_records_without_it(
    tmp_path: Path, logs: Path
) -> None:
    file = tmp_path / "s"
    with logs.open("a") as log_file:
        for who in ({}, {"tenant": None}, {"tenant": True}, {"tenant": 1 << 62}, "x"):
            turn = {"prompt_token_ids": [1], "completion_token_ids": [5, 6]}
            log_file.write(json.dumps({"turns": [turn], "who": who}) + "\n")
        text = {"prompt": "a", "completion": "b", "who": {"tenant": "tenant 0"}}
        log_file.write(json.dumps(text) + "\n")
    report = learn([logs], file, TENANT_OPTIONS)
    assert load_texts(file) == [
        (scope_of(scope), text) for scope, text in list_answers(make_conversations(20))
    ]
    assert describe(file)["scopes"] == 2
    assert "6 of 26 records are skipped (23.1%): " in report.notes[0]
    assert 'scope field "who.tenant": expected a string or an integer' in report.notes[0]
    with pytest.raises(InputError, match=r'logs.jsonl:21: scope field "who.tenant"'):
        learn([logs], file, replace(TENANT_OPTIONS, strict=True))


# The command


def test_learn_writes_text_json_and_plot(
    tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra ngram-npu[plot]")
    file, picture = tmp_path / "s", tmp_path / "c.png"
    arguments = ["learn", str(logs), "--tokenizer", "ids", "-c", "0.1"]
    assert cli.main([*arguments, "-o", str(file), "--json", "-", "--plot", str(picture)]) == 0
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
    speedups = {k: point["speedup"] for k, point in report["by_k"].items()}
    best_k = max(speedups, key=lambda k: speedups[k])
    assert f"32: {speedups['32']:.2f}x; best at this cost: k={best_k}" in err
    assert "\nnote: TOO FEW: the results are from 2 conversations" in err
    assert f"{file}: 1000 tokens in a store of 65536" in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["store", "info", str(file)]) == 0
    assert "tokens      1000 of 65536, in 40 texts\nscopes      1\n" in capsys.readouterr().out
    assert cli.main(["store", "info", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file_bytes"] == report["file_bytes"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.endswith("the store is not saved: no -o FILE\n")


def test_interrupted_plot_keeps_all_old_files(
    tmp_path: Path,
    logs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra ngram-npu[plot]")
    record, picture = tmp_path / "r.json", tmp_path / "c.png"

    def interrupt_save(report: Any, path: Path, target: Path) -> None:
        path.write_bytes(b"half a picture")
        assert len(os.listdir(tmp_path)) == 5, "the complete JSON file is next to its target"
        raise KeyboardInterrupt

    monkeypatch.setattr("ngram_npu_cli.learn.learn_report.save_plot", interrupt_save)
    record.write_text("old")
    picture.write_text("old too")
    outputs = ["--json", str(record), "--plot", str(picture)]
    assert cli.main(["learn", str(logs), "--tokenizer", "ids", *outputs]) == 130
    assert capsys.readouterr() == ("", "ngram-npu: interrupted\n")
    assert (record.read_text(), picture.read_text()) == ("old", "old too")
    assert sorted(os.listdir(tmp_path)) == ["c.png", "logs.jsonl", "r.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learn", "none.jsonl"], "none.jsonl: no such file"),
        (["learn", "LOGS", "-o", "none/s"], "/none does not exist"),
        (["learn", "LOGS", "-o", "."], ".: is a directory"),
        (["learn", "LOGS", "-o", "LOGS"], "logs.jsonl: exists and is not a store file"),
        (["learn", "LOGS", "-o", "/dev/null"], "/dev/null: exists and is not a store file"),
        (["learn", "LOGS", "--store-tokens", "700"], "token_capacity: expected at least 1024"),
        (["learn", "LOGS", "--k", "65"], "k: expected 1 to 64, got 65"),
        (["learn", "LOGS", "--cost", "-1"], "--cost: must be at least 0"),
        (["learn", "LOGS", "--scope-field", "no"], 'scope field "no": expected a string'),
        (["learn", "--demo", "--scope-field", "no"], "scope_field: expected none for the standard"),
        (["learn", "LOGS", "--plot", "c.x"], 'c.x: unknown plot format "x"'),
        (["learn", "LOGS", "--plot", "NONE"], "--plot needs matplotlib: pip install matplotlib"),
        (["learn", "BAD"], "bad.store: truncated: 11 bytes"),
        (["learn", "SHORT"], "nothing to learn: no answer of 2 or more tokens"),
        (["store", "info", "LOGS"], "logs.jsonl: not a store file"),
        (["store", "info", "none"], "none: No such file or directory"),
        (["store"], "the following arguments are required: ACTION"),
    ],
)
def test_learn_reports_invalid_input_in_one_line(
    tmp_path: Path,
    logs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.store").write_bytes(b"NGRSTORE" + bytes(3))
    short = {"prompt_token_ids": [1], "completion_token_ids": [2]}
    (tmp_path / "short.jsonl").write_text(json.dumps({"turns": [short]}))
    if "NONE" in arguments:
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    paths = {"LOGS": str(logs), "BAD": "bad.store", "SHORT": "short.jsonl"}
    command = [paths.get(word, word) for word in arguments]
    if command[0] == "learn" and "-o" not in command:
        command += ["-o", "new.store", "--tokenizer", "ids"]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new.store").exists()
