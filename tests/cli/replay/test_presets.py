"""Tests that the same conversations have the same figures in every preset and container."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from ngram_npu_cli.logs.files import Batch
from ngram_npu_cli.logs.mapping import convert_batch
from ngram_npu_cli.logs.presets import PRESETS
from ngram_npu_cli.logs.rows import Row, group_rows
from ngram_npu_cli.logs.tokenization import Tokenization
from ngram_npu_cli.options import ReadingOptions
from ngram_npu_cli.replay import Conversation, InputError, ReplayOptions, load_inputs, replay
from preset_samples import CONVERSATIONS, SHAPES, Record, make_records
from test_formats import OTHER_VALUES, change_field, get_field, list_paths

Figures = tuple[int, int, int, int]


def count(path: Path, map_text: str | None = None) -> Figures:
    total = replay([path], ReplayOptions(tokenizer="bytes", strict=True, map=map_text)).total
    return total.num_requests, total.num_prompt_tokens, total.num_tokens, total.num_steps


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    path = tmp_path_factory.mktemp("messages") / "talk.jsonl"
    path.write_bytes(as_lines(make_records("messages")))
    counts = count(path)
    assert counts[0] == len(CONVERSATIONS)
    assert counts[2] / counts[3] > 1.5, "expected texts that repeat themselves"
    return counts


def as_lines(records: list[Record]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def as_table(records: list[Record]) -> dict[str, list[Any]]:
    """Returns the columns of a table in which nested values are JSON."""
    keys = dict.fromkeys(key for record in records for key in record)
    return {
        key: [encode(record[key]) if key in record else None for record in records] for key in keys
    }


def encode(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_csv(records: list[Record]) -> bytes:
    columns = as_table(records)
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=";")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode("utf-8-sig")


def as_arrow(records: list[Record], write: Callable[[Any, Any], None]) -> bytes:
    sink = io.BytesIO()
    write(pyarrow.table(as_table(records)), sink)
    return sink.getvalue()


def as_arrow_stream(records: list[Record]) -> bytes:
    sink, table = io.BytesIO(), pyarrow.table(as_table(records))
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


CONTAINERS: dict[str, Callable[[list[Record]], bytes]] = {
    "talk.jsonl": as_lines,
    "talk.txt.zst": lambda r: pyarrow.compress(as_lines(r), "zstd", asbytes=True),
    "talk": lambda r: gzip.compress(as_lines(r)),
    "array.json": lambda r: json.dumps(r, indent=1).encode("utf-8-sig"),
    "data.json": lambda r: json.dumps({"meta": {"page": 1}, "data": r}).encode(),
    "hits.json": lambda r: json.dumps({"hits": {"hits": [{"_source": x} for x in r]}}).encode(),
    "body.jsonl": lambda r: as_lines([{"meta": {"time": 1}, "body": x} for x in r]),
    "message.jsonl": lambda r: as_lines([{"level": "info", "message": json.dumps(x)} for x in r]),
    "ids.json": lambda r: json.dumps({f"id-{i}": x for i, x in enumerate(r)}).encode(),
    "talk.csv.gz": lambda r: gzip.compress(as_csv(r)),
    "talk.parquet": lambda r: as_arrow(r, pyarrow.parquet.write_table),
    "talk.feather": lambda r: as_arrow(r, pyarrow.feather.write_feather),
    "talk.arrow": as_arrow_stream,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("container", CONTAINERS)
def test_figures_are_equal_in_every_preset_and_container(
    tmp_path: Path, figures: Figures, shape: str, container: str
) -> None:
    path = tmp_path / container
    path.write_bytes(CONTAINERS[container](make_records(shape)))
    assert count(path) == figures


def test_every_preset_has_a_shape_and_is_in_the_guide() -> None:
    names = {name for shape in SHAPES for name in shape.partition(":")[0].split(", ")}
    assert PRESETS.keys() - names == {"token-ids", "reasoning-pairs"}
    guide = (Path(__file__).parents[3] / "docs/guides/logs.md").read_text(encoding="utf-8")
    assert [name for name in PRESETS if f"`{name}`" not in guide] == []


RECORD = {"at": 1, "ask": {"q": "Hi"}, "reply": json.dumps({"parts": [{"text": "Ho"}]})}
ROW = {"who": "human", "words": "Hi", "talk": 1, "at": "2026-01-01T00:00:00Z"}
REPLY = {"who": "bot", "words": "Ho", "talk": 1, "at": "2026-01-01T00:00:01"}


@pytest.mark.parametrize(
    ("map_text", "records"),
    [
        ("prompt=ask.q, answer=reply.parts[0].text", [RECORD]),
        ("records=export[], prompt=ask.q, answer=reply.parts[0].text", [{"export": [RECORD]}]),
        ("prompt=ask.q, answer=reply.parts[0].text", [{"a": [RECORD], "b": {}}]),
        ("role=who, content=words, conversation=talk, time=at", [REPLY, ROW]),
        ("role=who, content=words, conversation=talk, time=at", [[REPLY, ROW]]),
        ("role=who, content=words, conversation=talk, time=at", [{"data": [REPLY, ROW]}]),
        ("messages=[{user: ask.q}, {assistant: reply.parts[0].text}]", [RECORD]),
        ("keep=ask, prompt=ask.q, answer=reply.parts[0].text", [RECORD, {"ask": None, "reply": 1}]),
    ],
)
def test_map_reads_records_of_unknown_formats(
    tmp_path: Path, map_text: str, records: list[Any]
) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines(records))
    with pytest.raises(InputError, match=r"complete --map '.*' with the record's keys "):
        load_inputs([path])
    (item,) = load_inputs([path], ReadingOptions(map=map_text))
    ((turn,),) = (conversation.turns for conversation in item.conversations)
    assert (turn.get_messages()[0]["content"], turn.completion) == ("Hi", "Ho")


CHAT = [{"role": "user", "content": "Hi"}, {"role": "ai", "content": "Ho"}]
PROXY_CALL = {"ask": {"messages": [{"role": "user", "content": "Hi"}], "n": 1}} | {
    "reply": {"choices": [{"message": {"content": "Ho"}}], "usage": {}},
    "stop_request": "GET",
}


@pytest.mark.parametrize(
    ("record", "map_text"),
    [
        (PROXY_CALL, "prompt=ask, answer=reply"),
        (
            {"http": PROXY_CALL, "meta": {"n": 1}, "num_prompt": 3},
            "prompt=http.ask, answer=http.reply",
        ),
        (
            {"system_prompt": "Be brief.", "user_prompt": "Hi", "response": "Ho"},
            "prompt=user_prompt, answer=response, system=system_prompt",
        ),
        ({"prompt": "Hi", "chosen": "Ho", "rejected": "No"}, "prompt=prompt, answer=chosen"),
        (
            {"question": "Hi", "generated": ["Ho"]},
            "prompt=question, answer={choices: generated[].{text: @}}",
        ),
        ({"log": CHAT}, "messages=log"),
        (
            {"ask": {"q": "Hi"}, "reply": {"blocks": [{"t": "Ho"}, {"n": 1}]}},
            r'prompt=ask.q, answer=join(`"\n"`, reply.blocks[].t)',
        ),
        ({"first": CHAT, "second": CHAT}, "records=*, messages=@"),
        ({"data": ["Hi", "Ho"]}, "messages=dialog(data[])"),
        ({"turns_of_chat": [["Hi", "Ho"]]}, "messages=dialog(turns_of_chat[])"),
        (
            {"conversation": [{"input": "Hi", "output": "Ho"}]},
            "messages=dialog(conversation[].[input, output][])",
        ),
        (
            {"turn_1_user": "Hi", "turn_1_bot": "Ho", "turn_2_user": None},
            "messages=dialog([turn_1_user, turn_1_bot, turn_2_user])",
        ),
        (
            {
                "raw": {
                    "version": 3,
                    "cases": [{"prompt": {"raw": "Hi"}, "response": {"raw": "Ho"}}],
                }
            },
            "prompt=prompt.raw, answer=response.raw",
        ),
    ],
)
def test_offered_map_reads_the_record(tmp_path: Path, record: Record, map_text: str) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines([record]))
    with pytest.raises(InputError, match=re.escape(f"complete --map '{map_text}' with")):
        load_inputs([path])
    (item,) = load_inputs([path], ReadingOptions(map=map_text))
    for conversation in item.conversations:
        (turn,) = conversation.turns
        assert (turn.get_messages()[-1]["content"], turn.completion) == ("Hi", "Ho")


@pytest.mark.parametrize(
    ("map_text", "message"),
    [
        ("langfus", 'got "langfus"'),
        ("prompt=a, prompt=b", 'each once, got "prompt=b"'),
        ("prompt=, answer=b", 'got "prompt="'),
        ("answer=b", 'expected one of "prompt", "messages" and "content"'),
        ("prompt=a[, answer=b", r'map: "a\[" is not JMESPath'),
        ("prompt=x.y, answer=z", "the expressions of --map select nothing; complete --map"),
        (
            "prompt=length(at), answer=reply",
            r'the expression "length\(at\)" fails: .*invalid type',
        ),
    ],
)
def test_invalid_map_is_an_error(tmp_path: Path, map_text: str, message: str) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines([RECORD]))
    with pytest.raises(InputError, match=message):
        load_inputs([path], ReadingOptions(map=map_text))


def make_row(role: str, number: int = 1, **fields: Any) -> Record:
    return {"conversation_id": number, "role": role, "content": f"{role} {number}", **fields}


def make_pair(**fields: Any) -> list[Record]:
    texts = (("user", "Hi"), ("assistant", "Ho"))
    return [{"role": role, "content": text, **fields} for role, text in texts]


QUESTION = {"role": "user", "content": "Hi"}
COMPLETION = {"choices": [{"message": {"role": "assistant", "content": "Ho"}}]}
GOOD_ROWS = [make_row(role, 2) for role in ("user", "assistant")]
INVALID_RECORDS: list[tuple[list[Any], str]] = [
    (
        [make_row("user", turn=1), make_row("assistant")],
        "have a time and some have none",
    ),
    ([make_row("user", turn="soon")] * 2, "the time is neither a number nor ISO 8601"),
    ([make_row("user")], r'no message of the role "assistant" \(roles: user\)'),
    ([make_row("user") | {"conversation_id": None}], "the row has no conversation"),
    (
        [{"custom_id": "a", "body": {"messages": []}}],
        "no answer for this id; .* read both",
    ),
    ([{"prompt": "Hi", "output": "Ho", "answer": "Ha"}], "no preset reads this record; complete"),
    ([{"messages": [{"role": "user", "content": "Hi"}], "answer": "Ho"}], "no preset reads this"),
    ([{"question": "Hi", "context": "long", "answer": "Ho"}], "no preset reads this record; compl"),
    (
        [{"role": "user", "content": "secret"}],
        "role=role, .* conversation=KEY, time=",
    ),
    ([{"a": {"b": {"c": 5}}, "d": "secret"}], r"a\.b: no preset .* with the record's keys c \("),
    ([[{"id": 1, "role": "user", "content": "Hi"}] * 2], "several messages have the same id"),
    ([{"messages": make_pair(sessionId=1) + make_pair(sessionId=2)}], 'different values of "sess'),
    ([{"messages": make_pair(chat_id=1) + make_pair(chat_id=2)}], 'different values of "chat_id"'),
    ([{"messages": make_pair(parentId="x")}], "several messages have the same parent"),
    ([{"prompt": "Hi", "response": make_pair()}], "a message of another role"),
    ([{"prompt": "Hi", "response": [COMPLETION] * 2}], "a second complete answer"),
    ([{"id": 1, "dialogue": [{"user": "Hi", "assistant": "Ho"}] * 2}], "no preset reads this"),
    (
        [
            {"session_id": 1, "prompt": [*make_pair() * n, QUESTION], "response": "a"}
            for n in (0, 1)
        ],
        "the rows repeat earlier turns",
    ),
    ([{"messages": "[{'role': 'user'}]", "response": "Ho"}], "messages must be an array"),
    ([{"messages": make_pair(), "response": "Ho"}], "the messages end with the answer"),
    ([{"messages": make_pair(toolInvocations=[{"toolName": "a"}])}], "toolInvocations"),
    (
        [{"mapping": {"b": {"parent": "a"}}, "current_node": "b"}],
        "tree of messages has no node",
    ),
    ([{"attributes": [{"value": 1}], "spanId": "s"}], "an attribute has no key"),
    ([{"attributes": [1], "spanId": "s"}], "must be lists of objects"),
    (
        [{"run_type": "chain", "inputs": {"q": "Hi"}, "outputs": {"a": "Ho"}}],
        "not calls of a model",
    ),
]


@pytest.mark.parametrize(("records", "message"), INVALID_RECORDS)
def test_record_that_cannot_be_read_is_counted_with_its_reason(
    tmp_path: Path, records: list[Any], message: str
) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines([*GOOD_ROWS, *records]))
    (item,) = load_inputs([path])
    assert len(item.conversations) == 1
    assert re.search(message, "; ".join(item.notes))
    assert re.match(f"{len(records)} (of {len(records) + 2} )?records are ", item.notes[0])


def test_table_with_a_damaged_part_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "talk.csv"
    path.write_text('prompt,completion\na,b\nc\nd,"e\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"talk.csv:\d: not CSV with the delimiter ','"):
        load_inputs([path])
    path.write_text("prompt,completion\na,b\nc\n", encoding="utf-8")
    assert "talk.csv:3: the row has 1 values for 2 columns" in load_inputs([path])[0].notes[0]
    path.write_bytes(as_arrow(make_records("rows"), pyarrow.parquet.write_table)[:-9])
    with pytest.raises(InputError, match=r"talk.csv: damaged Parquet data: "):
        load_inputs([path])
    path.write_bytes(pyarrow.compress(b'{"a": 1}\n' * 999, "zstd", asbytes=True)[:-9])
    with pytest.raises(InputError, match=r"talk.csv: "):
        load_inputs([path])


def test_rows_of_one_conversation_are_its_turns(tmp_path: Path) -> None:
    turns = [{"prompt": f"Q{i}", "response": f"A{i} " * 9} for i in range(3)]
    rows = [{"conversation_id": 7, "ts": 9 - i, **turn} for i, turn in enumerate(turns)]
    whole = [[{"human": t["prompt"]}, {"gpt": t["response"]}] for t in reversed(turns)]
    counts = []
    for records in (rows, [{"conversations": [item for turn in whole for item in turn]}]):
        path = tmp_path / "talk.jsonl"
        path.write_bytes(as_lines(records))
        counts.append(count(path))
    assert counts[0] == counts[1]
    assert counts[0][0] == 1


@pytest.mark.parametrize("question", ['{"messages": "Translate this."}', "[1, 2]", '{"a": 1}'])
def test_question_that_is_json_is_text(tmp_path: Path, question: str) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines([{"prompt": question, "completion": "Ho"}]))
    (item,) = load_inputs([path])
    assert item.conversations[0].turns[0].get_messages()[0]["content"] == question


def test_columns_of_pandas_are_read(tmp_path: Path, figures: Figures) -> None:
    pairs = [{"prompt": q, "completion": a} for q, a in CONVERSATIONS]
    columns = {k: {str(i): pair[k] for i, pair in enumerate(pairs)} for k in pairs[0]}
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(columns), encoding="utf-8")
    assert count(path) == figures


@pytest.mark.parametrize(("times", "is_newest_first"), [("0000", 0), ("0011", 0), ("0011", 1)])
def test_rows_of_equal_times_keep_their_order(
    tmp_path: Path, times: str, is_newest_first: bool
) -> None:
    texts = ["Hi", "Ho", "Hi again", "Ho again"]
    rows = [
        {"session_id": 1, "role": role, "content": text, "turn": int(time)}
        for role, text, time in zip(["user", "assistant"] * 2, texts, times, strict=True)
    ]
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines(rows[::-1] if is_newest_first else rows))
    (item,) = load_inputs([path])
    turns = item.conversations[0].turns
    assert [turn.get_messages()[0]["content"] for turn in turns] == texts[::2]
    assert [turn.completion for turn in turns] == texts[1::2]


@pytest.mark.parametrize("scope", ["alice", 0, (1 << 62) - 1])
def test_scope_field_selects_the_scope(scope: str | int) -> None:
    batch = Batch("talk", lines=[(1, {"prompt": "Hi", "answer": "Ho", "user": scope})])
    (conversation,) = convert_batch(batch, scope_field="user")
    assert isinstance(conversation, Conversation)
    assert conversation.scope == scope


def test_row_with_several_answers_is_counted_once(tmp_path: Path) -> None:
    row = {"session_id": 1, "turn": 0, "prompt": "Hi", "response": {"choices": [{"text": "a"}] * 2}}
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines([row, {"x": 1}, {"x": 2}]))
    with pytest.raises(InputError, match="2 of 3 records are skipped"):
        load_inputs([path])


def test_value_of_an_unexpected_type_is_not_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "talk.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["Hi"], "answer": [b"secret"]}), path)
    with pytest.raises(InputError, match="got bytes") as error_info:
        load_inputs([path])
    assert "secret" not in str(error_info.value)


def test_time_of_mongodb_orders_rows(tmp_path: Path) -> None:
    times = [{"$date": {"$numberLong": str(1770000000000 + i)}} for i in (1, 0)]
    rows = [
        make_row(role, created_at=t) for role, t in zip(("assistant", "user"), times, strict=True)
    ]
    path = tmp_path / "talk.jsonl"
    path.write_bytes(as_lines(rows))
    (item,) = load_inputs([path])
    assert item.conversations[0].turns[0].get_messages()[0]["role"] == "user"


UNDETECTABLE = re.compile(r"parent|ancestors|\.key$|^litellm: proxy\.messages$")
"""Fields whose change results in another valid record: a root, another attribute, a prompt."""


WORDS = ("Question?", "Answer!")


@pytest.mark.parametrize("shape", SHAPES)
def test_wrong_type_in_a_field_is_refused_or_loses_no_text(shape: str) -> None:
    records = SHAPES[shape](1, *WORDS)
    problems: list[str] = []
    for i, record in enumerate(records):
        for path in list_paths(record):
            name, old_value = f"{shape}.{'.'.join(map(str, path))}", get_field(record, path)
            for value in [*OTHER_VALUES, [old_value], {"a": old_value}, [old_value, old_value]]:
                changed = [*records[:i], change_field(record, path, value), *records[i + 1 :]]
                read, is_refused = read_changed(changed)
                lost = {w for w in WORDS if w not in read and w not in json.dumps(old_value)}
                if lost and not is_refused and not UNDETECTABLE.search(name):
                    problems.append(f"{name} = {value!r:.60}: {lost} is missing without a note")
    assert not problems, "\n".join(problems)


def read_changed(records: list[Record]) -> tuple[str, bool]:
    """Returns the texts that are read from records, and whether a record is refused."""
    batch = Batch("talk", lines=[(i, record) for i, record in enumerate(records)])
    items = list(convert_batch(batch))
    items += [item for _, item in group_rows([item for item in items if isinstance(item, Row)])]
    conversations = [item for item in items if isinstance(item, Conversation)]
    errors = [item for item in items if isinstance(item, InputError)]
    tokens: list[int] = []
    for conversation in conversations:
        try:
            requests = Tokenization("bytes").make_requests(conversation)
            tokens += [token for request in requests for token in request.tokens().tolist()]
        except InputError as error:
            errors.append(error)
    return bytes(tokens).decode(), bool(errors)
