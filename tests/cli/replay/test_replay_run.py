"""Tests the replay of inputs: tokenization, options, the default input, and the report."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import EXAMPLE_LINE, ScriptedProposer
from ngram_npu import Costs
from ngram_npu_cli.logs.conversations import MAX_COMPLETION_CHARS, STDLIB_FILES, split_source
from ngram_npu_cli.replay import (
    InputError,
    Progress,
    ReplayOptions,
    ReplayReport,
    ReplayTokenizer,
    Turn,
    format_table,
    replay,
    stdlib_conversations,
)

Writer = Callable[..., Path]

CONFIG = {
    "min_n": 2,
    "max_n": 5,
    "k": 5,
    "match_policy": "earliest",
    "overlap": False,
    "max_len": None,
    "sizes": "consecutive",
    "min_draft_probability": None,
    "costs": None,
    "store": None,
    "store_tokens": 1_000_000,
    "drafts": "trimmed",
    "generated_only": False,
}
"""The configuration that a report contains with the default options."""


def test_prompt_and_completion_are_tokenized_separately(write_jsonl: Writer) -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [len(texts) * 10 + i for i in range(3)]

    proposer = ScriptedProposer(5, lambda _: [])
    turns = [("Hi {there}", " yes"), ("two", ""), ("3", "z")]
    report = replay(
        [write_jsonl({"turns": [{"prompt": p, "completion": c} for p, c in turns]})],
        tokenizer=ReplayTokenizer("fake", "made up", None, encode),
        make_proposer=lambda _: proposer,
    )
    prompts = ["USER: Hi {there} ASSISTANT:", "USER: two ASSISTANT:", "USER: 3 ASSISTANT:"]
    assert (texts[::2], texts[1::2]) == (prompts, [" yes", "", "z"])
    # The context grows by prompts and completions; no token is inserted or dropped between them.
    calls = proposer.calls[1:]  # the first call is the warm-up
    assert calls[-1].contexts[0] == [10 * n + i for n in range(1, 7) for i in range(3)][:-1]
    assert report.tokenizer == {"name": "fake", "source": "made up", "vocab_size": None}
    assert report.inputs[0].num_prompt_tokens == 9


def test_token_ids_are_used_instead_of_text(write_jsonl: Writer) -> None:
    turns = [{"prompt": "p", "completion": "c", **turn} for turn in EXAMPLE_LINE["turns"]]
    report = replay([write_jsonl({"turns": turns})], ReplayOptions(tokenizer="/no/such/folder"))
    total = report.total
    assert report.tokenizer is None
    assert (total.num_tokens, total.num_steps, total.num_prompt_tokens) == (12, 5, 13)


def test_tokenizer_ids_skips_text(write_jsonl: Writer) -> None:
    text = {"prompt": "p", "completion": "c"}
    path = write_jsonl(EXAMPLE_LINE, text)
    reason = f'{path}:2: missing key "prompt_token_ids"'
    (figures,) = replay([path], ReplayOptions(tokenizer="ids")).inputs
    assert figures.notes == (f"1 of 2 records are skipped (50.0%): {reason}",)


def test_options_reach_the_proposer(write_jsonl: Writer) -> None:
    path = write_jsonl(EXAMPLE_LINE)

    def count_lengths(**options: Any) -> tuple[int, ...]:
        return replay([path], ReplayOptions(**options)).total.accepted_length_counts

    assert count_lengths() == (3, 0, 1, 0, 0, 1)
    assert count_lengths(store_tokens=1) == count_lengths(), "without a store, no effect"
    assert count_lengths(k=2) == (3, 0, 3)  # accepted: 3 4, then 6 7, then 21 30
    # `1 2 3` drafts 4 5 6 7 8, but 20 follows 7. `7 20 21` drafts 30 31 ..., but 40 follows 30.
    assert count_lengths(min_n=3) == (5, 1, 0, 0, 1, 0)
    # At 11 tokens, the first draft is made: max_len allows one more token, or none.
    assert count_lengths(max_len=12)[:2] == (10, 1)
    assert count_lengths(max_len=11) == (12, 0, 0, 0, 0, 0)


def test_padded_drafts_verify_k_tokens_per_step(write_jsonl: Writer) -> None:
    """Every step verifies k tokens: the drafted tokens, then copies of the row's last token."""
    ids = [1, 2, 3, 3, 3, 3, 9, 1, 2, 3, 3, 4]
    path = write_jsonl({"prompt_token_ids": ids[:2], "completion_token_ids": ids[2:]})
    trimmed_figures, padded_figures = (
        replay([path], ReplayOptions(min_n=2, k=3, drafts=drafts)).total
        for drafts in ("trimmed", "padded")
    )
    assert (padded_figures.num_steps, padded_figures.num_draft_tokens) == (4, 12)
    # `2 3` has no match: the padding 3 3 3 is right. `1 2` has a match: of 3 3 3, two are right.
    assert padded_figures.accepted_length_counts == (2, 0, 1, 1)
    assert trimmed_figures.num_steps > padded_figures.num_steps
    with pytest.raises(ValueError, match="drafts: expected 'padded' or 'trimmed', got 'both'"):
        ReplayOptions(drafts="both")  # type: ignore[arg-type]


def test_ladder_options_reach_proposer_and_report(write_jsonl: Writer, tmp_path: Path) -> None:
    path = write_jsonl(EXAMPLE_LINE)

    def run(**options: Any) -> ReplayReport:
        return replay([path], ReplayOptions(**options))

    ladder_report = run(sizes="ladder")
    # A match of `1` is enough to draft 2 3 4 ..; the example's first step had no draft.
    assert ladder_report.total.num_draft_tokens > run(k=8).total.num_draft_tokens
    ladder = {"min_n": 1, "max_n": 16, "k": 8, "match_policy": "latest", "overlap": True}
    assert ladder_report.config == CONFIG | ladder | {"sizes": "ladder"}
    caption = "latest match of 1, 2, 4, 8 or 16 tokens, k=8 trimmed, "
    assert format_table(ladder_report).startswith(caption + "batch size")

    report = run(min_draft_probability=0.177)
    assert (report.config["sizes"], report.config["min_draft_probability"]) == ("ladder", 0.177)
    assert 0 < report.total.num_draft_tokens < ladder_report.total.num_draft_tokens
    assert format_table(report).startswith(f"{caption}min_draft_probability=0.177, batch size")

    table = tmp_path / "own.json"
    row_logits = np.zeros((16, 32), int)  # each token costs one bit
    Costs(row_logits, np.zeros((16, 56), int), np.zeros((4096, 2), int)).save(table)
    report = run(min_draft_probability=0.5, costs=table, overlap=False)
    total = report.total
    assert total.num_draft_tokens == total.num_drafts > 0  # one token reaches the limit
    assert report.config["costs"] == str(table)
    assert f"min_draft_probability=0.5, costs={table}, no overlap, batch" in format_table(report)


def test_option_that_contradicts_a_ladder_is_named_in_the_error(
    write_jsonl: Writer, tmp_path: Path
) -> None:
    path = write_jsonl(EXAMPLE_LINE)
    table = tmp_path / "own.json"
    invalid_options: list[tuple[dict[str, Any], str]] = [
        ({"min_n": 2}, "min_n: expected 1 with sizes='ladder', got 2"),
        ({"costs": table, "min_draft_probability": None}, "costs: expected none without min_dr"),
        ({"costs": table}, "own.json: cannot be read: .*No such file"),
        ({"store": "live", "min_draft_probability": None}, "store: expected None without"),
        ({"generated_only": True}, "generated_only: expected False without a store"),
        ({"store": "now"}, "store: expected 'live', 'finish' or None"),
        ({"store": "live", "store_tokens": 1000}, "store_tokens: expected at least 1024"),
    ]
    for options, message in invalid_options:
        with pytest.raises(InputError, match=message):
            replay([path], ReplayOptions(**{"min_draft_probability": 0.177, **options}))
    table.write_text("{}")
    with pytest.raises(InputError, match=r"expected a file written by Costs\.save"):
        replay([path], ReplayOptions(min_draft_probability=0.177, costs=table))


def test_progress_is_shown_for_each_phase(write_jsonl: Writer) -> None:
    events: list[Progress] = []
    replay([write_jsonl(EXAMPLE_LINE, EXAMPLE_LINE)], progress=events.append)
    last_events = {event.phase: event for event in events}
    assert last_events["read"] == Progress("talk", "read", 2, 0)
    assert last_events["replay"] == Progress("talk", "replay", 24, 24)
    done = [event.done for event in events if event.phase == "replay"]
    assert done == sorted(done)


# The default input


def test_source_is_split_at_a_line_end_and_limited() -> None:
    assert split_source("a\nbb\ncc\n") == ("a\nbb\n", "cc\n")
    assert split_source("no line end") == ("no line end", "")
    prompt, completion = split_source("0123456789abcde\n" * 4096)
    assert len(prompt) == 2048 * 16 + 16  # the line at the middle belongs to the prompt
    assert MAX_COMPLETION_CHARS <= len(completion) <= MAX_COMPLETION_CHARS + 16


def test_missing_sources_of_the_standard_library_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(InputError, match="no sources of the Python standard library"):
        stdlib_conversations()
    (tmp_path / "copy.py").write_bytes(b"a = 1\r\nb = 2\r\nc = 3\r\n")
    conversations, missing = stdlib_conversations()
    (conversation,) = conversations
    assert conversation.id == "copy.py"
    assert conversation.turns == (Turn("a = 1\nb = 2\n", "c = 3\n"),)
    assert len(missing) == len(STDLIB_FILES) - 1


def test_replay_without_a_path_uses_the_default_input() -> None:
    report = replay((), ReplayOptions(tokenizer="bytes", limit=2))
    assert [(f.name, f.num_requests) for f in report.inputs] == [("python-stdlib", 2)]
    assert (report.total.tokens_per_step or 0) > 1.2  # code repeats itself
    assert "These figures are far too high" in format_table(report)


# Report


@pytest.fixture
def report(write_jsonl: Writer) -> ReplayReport:
    one = write_jsonl(EXAMPLE_LINE, name="one.jsonl")
    two = write_jsonl(EXAMPLE_LINE, EXAMPLE_LINE, name="two.jsonl.gz")
    options = ReplayOptions(batch_size=3, limit=2)
    return replay([one, two], options, command="ngram-npu replay x")


def test_json_contains_everything_to_repeat_the_measurement(report: ReplayReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert data["command"] == "ngram-npu replay x"
    assert data["date"].endswith("+00:00")
    assert data["machine"]["cpu"]
    assert data["machine"]["cores"] >= 1
    assert set(data["versions"]) == {"python", "numpy", "torch", "ngram_npu"}
    assert data["config"] == CONFIG
    assert (data["batch_size"], data["limit"], data["tokenizer"]) == (3, 2, None)
    one, two = data["inputs"]
    assert (one["name"], one["tokens_per_step"]) == ("one", 12 / 5)
    assert (one["num_turns"], one["acceptance_rate"]) == (4, 7 / 10)
    assert two["accepted_length_counts"] == [6, 0, 2, 0, 0, 2]
    assert two["acceptance_rate_per_pos"] == [1, 1, 0.5, 0.5, 0.5]
    assert data["total"]["num_steps"] == 15


def test_table_shows_figures_in_aligned_columns(report: ReplayReport) -> None:
    caption, empty, header, *rows, _, accepted, drafting = format_table(report).splitlines()
    assert caption == (
        "earliest match of 2-5 tokens, k=5 trimmed, batch size 3, first 2 of each input, "
        "tokenizer: token ids as recorded"
    )
    assert empty == ""
    assert [row.split()[0] for row in rows] == ["one", "two", "total"]
    assert rows[1].split()[1:] == ["2", "24", "2.40", "2.00", "60.0%"]
    assert accepted == "accepted by position: 1.00 1.00 0.50 0.50 0.50"
    times = [float(word) for word in re.findall(r"\d+\.\d+", drafting)]
    total = report.total
    expected = [total.draft_us_per_call, total.draft_us_per_step, total.draft_us_per_token]
    assert times == pytest.approx(expected, abs=0.05)
    end = header.index("tokens/step") + len("tokens/step")
    assert all(row[:end].endswith("2.40") for row in rows), "columns are aligned"


def test_table_without_steps_and_with_many_positions(write_jsonl: Writer) -> None:
    path = write_jsonl({"prompt_token_ids": [1], "completion_token_ids": []})
    row = format_table(replay([path], ReplayOptions(k=9, max_len=7, limit=1))).splitlines()
    assert row[0].startswith("earliest match of 2-5 tokens, k=9 trimmed, max_len=7, batch size 32")
    assert row[3].split() == ["talk", "1", "0", *"---"]
    assert row[4] == "", "a single input has no total"
    assert row[-2] == "accepted by position: - - - - - - - - ..."
    assert row[-1] == "drafting: - us per call, - per step, - per token"
