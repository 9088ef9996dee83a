"""Provides records of all shapes and presets, and a function that reads a log."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.tokenization import render_answer

USER, ANSWER = "Where is it?", "In the box."
MESSAGES = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}]
REQUEST = {"model": "m", "messages": MESSAGES[:1]}
RESPONSE = {
    "id": "1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": MESSAGES[1]}],
}


def read(*paths: Path, **options: Any) -> list[list[tuple[str, str]]]:
    """Returns prompt and answer of each turn of each conversation. Every record must be read."""
    reader = LogReader(paths, strict=True, **options)
    return [
        [
            (turn.prompt or " ".join(f"{m['role']}:{m['content']}" for m in turn.messages), answer)
            for turn in conversation.turns
            for answer in [render_answer(turn.answer or {"content": ""})]
        ]
        for conversation in reader
    ]


def make_chunks(**delta: Any) -> list[dict[str, Any]]:
    """Returns the chunks of a stream whose delta is cut in two where it is a text."""
    first = {key: v[:3] if isinstance(v, str) else v for key, v in delta.items()}
    second = {key: v[3:] for key, v in delta.items() if isinstance(v, str)}
    head = {"object": "chat.completion.chunk"}
    return [
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {**head, "choices": [{"index": 0, "delta": first}]},
        {**head, "choices": [{"index": 0, "delta": second}]},
        {**head, "choices": [], "usage": {}},
    ]


def to_events(chunks: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def span(**attributes: Any) -> dict[str, Any]:
    """Returns a span of OpenTelemetry, whose attributes have the prefix gen_ai."""
    flat = {f"gen_ai.{key.replace('__', '.')}": value for key, value in attributes.items()}
    return {"name": "chat m", "context": {"trace_id": "t"}, "attributes": flat}


_PARTS = [{"role": "user", "parts": [{"type": "text", "content": USER}]}]
_ANSWER_PARTS = [{"role": "assistant", "parts": [{"type": "text", "content": ANSWER}]}]
SPAN = span(
    operation__name="chat",
    input__messages=json.dumps(_PARTS),
    output__messages=json.dumps(_ANSWER_PARTS),
)
_OTLP = [{"key": k, "value": {"stringValue": v}} for k, v in SPAN["attributes"].items()]


def claude_row(number: int, message: dict[str, Any] | None, parent: int | None = None) -> Any:
    """Returns a row of Claude Code; by default its parent is the row before."""
    parent = number - 1 if parent is None else parent
    row = {"parentUuid": f"u{parent}" if parent else None, "sessionId": "s", "uuid": f"u{number}"}
    return row | {"type": "row", "isSidechain": False} | ({"message": message} if message else {})


def claude_answer(text: str, ident: str = "m", **part: Any) -> dict[str, Any]:
    """Returns an answer of Anthropic's API with one block."""
    block = part or {"type": "text", "text": text}
    return {"id": ident, "type": "message", "role": "assistant", "content": [block]}


SHAPES: dict[str, list[Any]] = {
    "messages": [{"messages": MESSAGES}],
    "conversation": [{"conversation": MESSAGES}],
    "list": [MESSAGES],
    "text-parts": [
        {"messages": [MESSAGES[0], {**MESSAGES[1], "content": [{"type": "text", "text": ANSWER}]}]}
    ],
    "request-response": [{"request": REQUEST, "response": RESPONSE}],
    "bodies": [{"request_body": {"body": REQUEST}, "response_body": {"body": RESPONSE}}],
    "texts": [{"request": json.dumps(REQUEST), "response": json.dumps(RESPONSE)}],
    "chunks": [{"request": REQUEST, "response": make_chunks(content=ANSWER)}],
    "events": [{"request": REQUEST, "response": to_events(make_chunks(content=ANSWER))}],
    "messages-response": [{"messages": MESSAGES[:1], "response": RESPONSE}],
    "messages-text": [{"messages": MESSAGES[:1], "completion": ANSWER}],
    "openai-response": [{"messages": MESSAGES[:1], **RESPONSE}],
    "anthropic": [{"request": REQUEST, "response": claude_answer(ANSWER)}],
    "ollama": [{"request": REQUEST, "response": {"message": MESSAGES[1], "done": True}}],
    "pair": [{"prompt": USER, "completion": ANSWER}],
    "question": [{"question": USER, "answer": ANSWER, "score": 3}],
    "input-output": [{"input": USER, "output": ANSWER}],
    "turns": [{"turns": [{"prompt": USER, "completion": ANSWER}]}],
    "batch": [
        {"custom_id": "a", "method": "POST", "body": REQUEST},
        {"custom_id": "a", "response": {"status_code": 200, "body": RESPONSE}, "error": None},
    ],
    "anthropic-batch": [
        {"custom_id": "a", "params": REQUEST},
        {"custom_id": "a", "result": {"type": "succeeded", "message": claude_answer(ANSWER)}},
    ],
}
"""Records of the shapes that are read without a preset, each with the same conversation."""

PRESET_RECORDS: dict[str, list[Any]] = {
    "sharegpt": [
        {"conversations": [{"from": "human", "value": USER}, {"from": "gpt", "value": ANSWER}]}
    ],
    "alpaca": [{"instruction": USER, "input": "", "output": ANSWER}],
    "litellm": [
        {
            "request_id": "1",
            "call_type": "acompletion",
            "messages": "{}",
            "proxy_server_request": json.dumps({"body": REQUEST}),
            "response": json.dumps(RESPONSE),
        }
    ],
    "langfuse": [
        {"type": "GENERATION", "traceId": "t", "input": MESSAGES[:1], "output": MESSAGES[1]},
        {"type": "SPAN", "traceId": "t", "input": "a", "output": "b"},
    ],
    "opentelemetry": [SPAN, span(operation__name="execute_tool", tool__name="box")],
    "opentelemetry, from OTLP": [{"traceId": "t", "attributes": _OTLP}],
    "claude-code": [
        {"type": "file-history-snapshot", "messageId": "u1", "snapshot": {}},
        claude_row(1, MESSAGES[0]),
        claude_row(2, None),
        claude_row(3, claude_answer(ANSWER)),
        {"type": "summary", "summary": "A box", "leafUuid": "u3"},
    ],
    "swe-agent": [
        {"trajectory": [{"action": "ls", "observation": "x"}], "history": MESSAGES, "info": {}}
    ],
    "openhands": [{"messages": MESSAGES[:1], "response": RESPONSE, "kwargs": {"tools": None}}],
}
"""Records of tools, each with the same conversation."""

CONTAINERS = ("jsonl", "jsonl.gz", "json", "csv", "parquet")


def write_container(path: Path, records: list[Any], container: str) -> Path:
    """Writes records to a file; in tables, objects are JSON as text, as exports write them."""
    path = path / f"log.{container}"
    if container == "json":
        path.write_text(json.dumps(records, indent=1))
    elif container.startswith("jsonl"):
        raw = "".join(json.dumps(record) + "\n" for record in records).encode()
        path.write_bytes(gzip.compress(raw) if container.endswith("gz") else raw)
    else:
        columns = list(dict.fromkeys(key for record in records for key in record))
        rows = [{key: _to_cell(record.get(key)) for key in columns} for record in records]
        if container == "csv":
            buffer = io.StringIO()
            writer = csv.DictWriter(buffer, columns)
            writer.writeheader()
            writer.writerows(rows)
            path.write_text(buffer.getvalue())
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _to_cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else json.dumps(value)
