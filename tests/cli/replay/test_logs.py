"""Tests logs of servers: a replay of each format counts the same as a replay of the messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import DATA, make_record, read_conversations
from ngram_npu_cli.replay import ReplayOptions, replay

Writer = Callable[..., Path]


def read_records(name: str) -> list[dict[str, Any]]:
    lines = (DATA / name).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def count_replay(path: Path) -> tuple[int, int, int, float | None]:
    """Returns the numbers of requests, tokens and steps, and the tokens per step."""
    total = replay([path], ReplayOptions(tokenizer="bytes")).total
    return total.num_requests, total.num_tokens, total.num_steps, total.tokens_per_step


ANSWERS = [r["response"]["choices"][0]["message"]["content"] for r in read_records("chat.jsonl")]


@pytest.fixture
def plain_counts(write_jsonl: Writer) -> tuple[int, int, int, float | None]:
    """The counts of a replay of the conversation without a server's format."""
    records = [
        {"messages": record["request"]["messages"], "completion": answer}
        for record, answer in zip(read_records("chat.jsonl"), ANSWERS, strict=True)
    ]
    counts = count_replay(write_jsonl(*records, name="plain/talk.jsonl"))
    assert counts[0] == 3
    assert counts[3] is not None
    assert counts[3] > 2, "expected texts that repeat themselves"
    return counts


CONVERSATION_FILES = [
    "chat.jsonl",
    "stream.jsonl",
    "responses.jsonl",
    "responses-stream.jsonl",
    "anthropic.jsonl",
    "anthropic-stream.jsonl",
]


@pytest.fixture
def batch_file(write_jsonl: Writer) -> Path:
    """The output of `vllm run-batch` joined with its input, as the guide describes."""
    requests = {record["custom_id"]: record for record in read_records("run-batch/input.jsonl")}
    answers = read_records("run-batch/output.jsonl")
    return write_jsonl(*({**requests[a["custom_id"]], **a} for a in answers), name="batch.jsonl")


def test_guide_states_the_counts(batch_file: Path) -> None:
    pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
    pytest.importorskip("sentencepiece", reason="needs the extra ngram-npu[replay]")
    files = [*(DATA / name for name in CONVERSATION_FILES), batch_file]
    report = replay(files, ReplayOptions(tokenizer="mistral-v1"))
    rows = {(f.num_requests, f.num_tokens, f"{f.tokens_per_step:.2f}") for f in report.inputs}
    ((requests, tokens, per_step),) = rows
    guide = Path(__file__).parents[3] / "docs/guides/logs.md"
    sentence = f"{requests} requests, {tokens} tokens and {per_step} tokens per step"
    assert sentence in guide.read_text(encoding="utf-8").replace("\n", " ")


def read_events(name: str) -> list[list[dict[str, Any]]]:
    """Returns the events of each stream of a file."""
    streams = [record["response"].split("\n") for record in read_records(name)]
    return [[json.loads(s[6:]) for s in stream if s.startswith("data: {")] for stream in streams]


@pytest.mark.parametrize("name", [name for name in CONVERSATION_FILES if "stream" in name])
@pytest.mark.parametrize(
    "serialize",
    [
        lambda chunks, text: chunks,
        lambda chunks, text: json.dumps(chunks),
        lambda chunks, text: "".join(json.dumps(chunk) + "\n" for chunk in chunks),
        lambda chunks, text: text.replace("\n", "\r\n"),
        lambda chunks, text: {"status": 200, "body": text},
        lambda chunks, text: ": ping\n\n" + text + ": ping\n\nid: 7\nretry: 10\n",
        # The client closed the connection: the last event is cut, or an error follows.
        lambda chunks, text: text.replace("data: [DONE]", 'data: {"choi'),
        lambda chunks, text: text + 'event: error\ndata: {"error": {"message": "no worker"}}\n\n',
    ],
    ids=range(8),
)
def test_stream_is_read_in_every_serialization(
    write_jsonl: Writer,
    name: str,
    serialize: Callable[[list[dict[str, Any]], str], Any],
    plain_counts: tuple[int, int, int, float | None],
) -> None:
    serialized = [
        {"request": record["request"], "response": serialize(chunks, record["response"])}
        for record, chunks in zip(read_records(name), read_events(name), strict=True)
    ]
    assert count_replay(write_jsonl(*serialized)) == plain_counts


@pytest.mark.parametrize(
    "name", ["reasoning.jsonl", "responses-reasoning.jsonl", "anthropic-thinking.jsonl"]
)
def test_reasoning_is_counted_with_and_without_stream(write_jsonl: Writer, name: str) -> None:
    complete, streamed = read_records(name)
    reasoning = read_records("reasoning.jsonl")[0]["response"]["choices"][0]["message"]["reasoning"]
    messages = read_records("reasoning.jsonl")[0]["request"]["messages"]
    expected_records = [{"messages": messages, "completion": f"<think>\n{reasoning}\n</think>\n\n"}]
    expected = count_replay(write_jsonl(*expected_records, name="plain.jsonl"))
    for record in (complete, streamed):
        assert count_replay(write_jsonl(record)) == expected


# Token ids


def test_stream_with_missing_token_ids_is_read_as_text(write_jsonl: Writer) -> None:
    pieces = [("one ", [1]), ("two ", None), ("", [2])]
    chunks = [{"choices": [{"text": text, "token_ids": ids}]} for text, ids in pieces]
    chunks[0]["prompt_token_ids"] = [5]
    (conversation,) = read_conversations(
        write_jsonl({"request": {"prompt": "p"}, "response": chunks})
    )
    assert not conversation.has_token_ids
    assert (conversation.turns[0].prompt, conversation.turns[0].completion) == ("p", "one two ")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("chat-token-ids.jsonl", 3),
        ("stream-token-ids.jsonl", 1),
        ("completions-stream-token-ids.jsonl", 1),
    ],
)
def test_recorded_token_ids_are_exact(write_jsonl: Writer, name: str, count: int) -> None:
    answers = [record["response"] for record in read_records("chat-token-ids.jsonl")[:count]]
    turns = [(a["prompt_token_ids"], a["choices"][0]["token_ids"]) for a in answers]
    expected = replay([write_jsonl(*(make_record([turn]) for turn in turns))]).total
    report = replay([DATA / name], ReplayOptions(tokenizer="ids"))
    assert report.tokenizer is None
    assert report.total.num_steps == expected.num_steps
    assert report.total.num_tokens == expected.num_tokens == 23 * count
    assert report.total.tokens_per_step == expected.tokens_per_step
