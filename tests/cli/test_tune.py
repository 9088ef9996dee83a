"""Tests the choice of a setting."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ngram_npu.errors import InputError
from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.replay import Setting
from ngram_npu_cli.tokenization import Tokenization, TokenRequest
from ngram_npu_cli.tune import (
    SETTINGS,
    Counts,
    StepTimes,
    TuneReport,
    choose,
    find_opening,
    format_tune,
    list_ranges,
    load_cost,
    make_sample,
    tune,
)


def make_records(count: int) -> list[dict[str, Any]]:
    """Returns conversations of two kinds: answers that repeat the prompt, and answers that do not,
    each followed by a request for a title."""
    generator = random.Random(1)
    records = []
    for number in range(count):
        words = [generator.choice("abcdefghij") * 3 for _ in range(40)]
        text = f"{number} " + " ".join(words)
        chat = {"prompt": f"Repeat: {text}", "completion": text}
        title = {"prompt": f"Give a title, {number}", "completion": str(generator.random()) * 2}
        records += [chat, title]
    return records


def run(path: Path, **options: Any) -> Any:
    arguments = {"drafts": "padded", "allow_store": False, "store_tokens": 1 << 14} | options
    cost = arguments.pop("cost", StepTimes("c", share=0.05))
    return tune(LogReader([path]), Tokenization("bytes"), cost, **arguments)


def test_order_of_records_does_not_change_the_result(write_jsonl: Any) -> None:
    records = make_records(24)
    orders = [records, records[::-1], records[::2] + records[1::2], records[1::2] + records[::2]]
    random.Random(2).shuffle(records := list(records))
    reports = [run(write_jsonl(*order), allow_store=True) for order in [*orders, records]]
    assert len({json.dumps(report.to_dict()) for report in reports}) == 1
    assert reports[0].choice is not None


def test_requests_of_one_conversation_are_in_one_half() -> None:
    opening = b"x" * 40
    requests = [("", opening + bytes([65 + i]) * 9, make_request(i)) for i in range(26)]
    requests += [("", opening, make_request(100)), ("s", b"a", make_request(101))]
    requests += [("s", b"b", make_request(102)), ("", b"a", make_request(103))]
    sample = make_sample(requests)
    first, second = (Counter(half) for half in sample.groups)
    assert not first.keys() & second.keys()
    assert sorted((first + second).values()) == [1, 2, 27]


def make_request(token: int) -> TokenRequest:
    return TokenRequest(((np.array([token], np.int32), np.array([1, 2, 3], np.int32)),))


def test_opening_of_a_growing_conversation_stays_the_same(write_jsonl: Any) -> None:
    head = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    answer = {"role": "assistant", "content": "a"}
    path = write_jsonl(
        {"messages": [*head, answer]}, {"messages": [*head, answer, head[1], answer]}
    )
    first, second = (find_opening(conversation) for conversation in LogReader([path]))
    assert first == second


def test_command_has_the_largest_length_of_its_table(write_jsonl: Any) -> None:
    report = run(write_jsonl(*make_records(24)), cost=load_cost(None))
    command = report.format_command()
    speculative = json.loads(command.split("'")[1])
    table = speculative["num_speculative_tokens_per_batch_size"]
    assert speculative["num_speculative_tokens"] == max(k for _, _, k in table)
    assert table[0][0] == 1
    assert table[-1][:2] == [65, 256]
    text = format_tune(report)
    first_line = text.partition("\n")[0]
    longest = speculative["num_speculative_tokens"]
    assert f" with up to {longest} draft tokens: " in first_line
    gains = re.findall(r"([\d.]+)x at (\d+) \(k=(\d+)\)", first_line)
    assert gains == [
        (f"{report.speedups[replace(report.choice, k=k)][batch]:.2f}", str(batch), str(k))
        for batch, k in report.lengths.items()
        if k
    ]
    assert "\nK to use" in text
    assert text.count("TOO FEW") == 0


@pytest.mark.parametrize("drafts", ["padded", "trimmed"])
def test_nothing_that_wins_gives_the_advice_not_to_speculate(drafts: str, write_jsonl: Any) -> None:
    report = run(write_jsonl(*make_records(24)), drafts=drafts, cost=StepTimes("c", share=9.0))
    assert report.choice is None
    assert {*report.lengths.values()} == {0}
    text = format_tune(report)
    assert text.startswith("Do not speculate: no setting is surely faster")
    assert "vllm serve" not in text


def test_trimmed_drafts_have_one_length(write_jsonl: Any) -> None:
    report = run(write_jsonl(*make_records(24)), drafts="trimmed", cost=load_cost(None))
    assert '"method": "ngram", "num_speculative_tokens": ' in report.format_command()
    assert len({*report.lengths.values()} - {0}) == 1


def make_counts(tokens: float, drafted: float, groups: int = 40, noise: float = 0.0) -> Counts:
    steps = np.full(groups, 100.0)
    spread = np.linspace(-noise, noise, groups)
    return Counts(steps * tokens * (1 + spread), steps, steps * drafted)


def test_gain_within_the_spread_of_conversations_is_not_sure() -> None:
    cost = StepTimes("c", share=0.0)
    for noise, expected in ((0.01, 1), (0.9, 0)):
        counts = {SETTINGS[0]: (make_counts(1.02, 1), make_counts(1.02, 1, noise=noise))}
        assert choose(counts, cost, False)[1] == {1: expected}


def test_store_is_chosen_only_if_allowed() -> None:
    settings = (Setting("auto", 5), Setting("auto", 5, store=True))
    halves = [(make_counts(t, 5), make_counts(t, 5)) for t in (1.5, 2.0)]
    counts = dict(zip(settings, halves, strict=True))
    cost = StepTimes("c", share=0.01)
    for allowed, expected in zip((False, True), settings, strict=True):
        choice, lengths = choose(counts, cost, allowed)
        assert choice == expected
        speedups = {s: {1: 1.5} for s in settings}
        text = format_tune(TuneReport(cost, speedups, lengths, choice, "", []))
        assert text.startswith(f"Use lookup=auto{' store' * allowed} with up to 5 draft tokens: ")
        assert ('several tenants, leave "scope" out and set a cache_salt for each' in text) == (
            allowed
        )


def test_speedup_weighs_tokens_against_the_time_of_a_step() -> None:
    times = {1: 1.0, 4: 1.0, 8: 2.0}
    cost = StepTimes("f", times)
    assert cost.batch_sizes == (1,)
    assert cost.compute_relative(1, np.array([0, 3, 5, 7, 11])).tolist() == [1, 1, 1.5, 2, 3]
    assert cost.compute_relative(4, np.array([0.0, 1.0])).tolist() == [1, 2]
    assert make_counts(3, 7).compute_speedup(cost, 1)[0] == pytest.approx(1.5)
    assert make_counts(3, 7).compute_speedup(StepTimes("s", share=0.1), 1)[0] == pytest.approx(
        3 / 1.7
    )


@pytest.mark.parametrize("num_replayed", [1, 3])
def test_interrupt_compares_the_settings_that_were_replayed(
    num_replayed: int, write_jsonl: Any, monkeypatch: Any
) -> None:
    def make_bar(_: str, total: int, __: str) -> Any:
        num_left = iter(range(int(total * (num_replayed + 0.5) / len(SETTINGS)), 0, -1))

        def update(count: int) -> None:
            if len(list(islice(num_left, count))) < count:
                raise KeyboardInterrupt

        return nullcontext(SimpleNamespace(update=update))

    monkeypatch.setattr("ngram_npu_cli.tune.make_bar", make_bar)
    path = write_jsonl(*make_records(6))
    if num_replayed == 1:  # nothing to compare
        with pytest.raises(KeyboardInterrupt):
            run(path)
        return
    report = run(path)
    assert list(report.speedups) == list(SETTINGS[:3])
    assert not report.is_complete
    assert "Interrupted: 3 settings were replayed." in format_tune(report)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", "[" * 100_000, '{"1": 1}', '{"2": 1, "3": 2}', '{"0": 1, "1": 1}'),
        *('{"1": 1, "' + "9" * 5000 + '": 1}', '{"1": 1, "2": ' + "9" * 400 + "}"),
        *(f'{{"1": {value}, "2": 1}}' for value in ("1e308", "NaN", '"x"', "[1]", "-1")),
        '{"1": 1, "x": 1}',
    ],
)
def test_wrong_file_of_step_times_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(content)
    message = "--cost: .*cost.json: expected seconds by tokens per step, such as "
    with pytest.raises(InputError, match=message):
        load_cost(str(tmp_path / "cost.json"))
    with pytest.raises(InputError, match="--cost: expected 0 to 10, got 12"):
        load_cost("12")


def test_ranges_of_batch_sizes_are_contiguous() -> None:
    assert list_ranges({1: 8, 4: 8, 16: 3, 64: 0}) == [[1, 4, 8], [5, 16, 3], [17, 64, 0]]
