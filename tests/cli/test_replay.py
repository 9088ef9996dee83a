"""Tests that a replay counts the tokens of each step as a model runner would yield them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from ngram_npu.errors import InputError
from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.replay import (
    Setting,
    SettingDrafter,
    format_replay,
    parse_setting,
    replay,
    simulate,
)
from ngram_npu_cli.tokenization import Tokenization, TokenRequest

TURNS = (
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 20, 21]),
    ([30, 31], [7, 20, 21, 30, 40]),
    ([50], []),
    ([51], [52]),
)
"""For the earliest match of 2 to 5 tokens and k=5. Turn 1: prefill yields 1. `9 1` is new: the step
yields 2. `1 2` is at the front: the draft 3 4 5 6 7 is accepted, and the step also yields 20.
`7 20` is new: the step yields 21. Turn 2: prefill yields 7. `31 7` is new: the step yields 20.
`7 20` is in turn 1: two tokens of the draft 21 30 31 7 20 are accepted, and it also yields 40.
Turns 3 and 4 have no token after the first, so they have no steps."""


def make_request(turns: Any = TURNS) -> TokenRequest:
    return TokenRequest(tuple((np.array(p, np.int32), np.array(a, np.int32)) for p, a in turns))


def make_record(turns: Any = TURNS) -> dict[str, Any]:
    names = ("prompt_token_ids", "completion_token_ids")
    return {"turns": [dict(zip(names, turn, strict=True)) for turn in turns]}


TRIMMED = Setting("ngram", drafts="trimmed")


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_replay_counts_the_steps_of_the_example(batch_size: int) -> None:
    drafter = SettingDrafter(TRIMMED)
    requests = [make_request()] * 7
    figures = simulate(requests, drafter, k=5, batch_size=batch_size, padded=False)
    assert figures.steps.tolist() == [5] * 7
    assert figures.tokens.tolist() == [12] * 7
    assert figures.drafted.tolist() == [10] * 7
    assert figures.accepted_lengths.tolist() == [21, 0, 7, 0, 0, 7]
    assert figures.num_drafts == 14


def test_padded_draft_is_filled_with_the_newest_token() -> None:
    request = make_request([([1, 2, 3], [4, 4, 4, 5])])
    figures = simulate([request], SettingDrafter(Setting("ngram", 3)), k=3)
    # Without a match, three copies of the first 4 are verified, of which two are accepted.
    assert figures.tokens.tolist() == [3]
    assert figures.steps.tolist() == [1]
    assert figures.drafted.tolist() == [3]


def test_rows_are_reset_for_each_request() -> None:
    resets: list[int] = []

    class Drafter(SettingDrafter):
        def reset(self, rows: Any) -> None:
            resets.extend(rows.tolist())

    simulate([make_request()] * 4, Drafter(TRIMMED), k=5, batch_size=2, padded=False)
    assert sorted(resets) == [0, 0, 1, 1]


def test_store_drafts_from_earlier_requests() -> None:
    text = list(range(100, 140))
    requests = [make_request([([i], text)]) for i in range(4)]
    tokens = {}
    for store in (False, True):
        drafter = SettingDrafter(Setting(store=store), 4096)
        figures = simulate(requests, drafter, k=5, batch_size=1)
        tokens[store] = figures.tokens_per_step
    assert tokens[True] > 2 * tokens[False]


def test_interrupt_ends_with_the_figures_so_far() -> None:
    calls = []

    def interrupt(_: int) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    figures = simulate(
        [make_request()], SettingDrafter(TRIMMED), k=5, padded=False, advance=interrupt
    )
    assert not figures.is_complete
    assert figures.tokens.tolist() == [7]


def test_report_compares_two_settings(write_jsonl: Any) -> None:
    path = write_jsonl(make_record())
    settings = [TRIMMED, parse_setting("padded k=1 lookup=1-3", TRIMMED)]
    report = replay(LogReader([path]), Tokenization(), settings, 4096)
    values = json.loads(json.dumps(report.to_dict()))
    names = ["lookup=ngram k=5 trimmed", "lookup=1-3 k=1"]
    assert list(values["settings"]) == names
    assert values["settings"][names[0]]["tokens_per_step"] == 12 / 5
    text = format_replay(report)
    assert "token ids as recorded" in text
    assert text.endswith(" tokens per step")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n=3", 'expected words of "lookup=L k=K store padded trimmed", got "n=3"'),
        ("store=false", '"store" takes no value, got "store=false"'),
        ("trimmed=1", '"trimmed" takes no value, got "trimmed=1"'),
        ("lookup=ladder", "lookup: expected auto, ngram or MIN-MAX, got ladder"),
        ("lookup=1-65", "lookup: expected MIN-MAX with 1 <= MIN <= MAX <= 64, got 1-65"),
        ("k=65", "k: expected 1 to 64, got 65"),
        ("", 'expected another setting than the first, "lookup=auto k=5"'),
        ("padded k=5", 'expected another setting than the first, "lookup=auto k=5"'),
    ],
)
def test_wrong_second_setting_is_an_error(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^--compare: {re.escape(message)}$"):
        parse_setting(text, Setting())


def test_trimmed_drafts_end_as_in_the_plugin() -> None:
    assert Setting(drafts="trimmed").make_config().min_draft_probability == 0.12
    assert Setting("1-16", drafts="trimmed").make_config().min_draft_probability is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(Setting(), 1.805), (Setting("ngram"), 1.627), (TRIMMED, 1.540)],
)
def test_demo_prints_the_figures_of_earlier_versions(setting: Setting, expected: float) -> None:
    report = replay(LogReader([]), Tokenization(), [setting], 4096)
    (figures,) = report.figures.values()
    assert figures.tokens_per_step == pytest.approx(expected, abs=0.03)
