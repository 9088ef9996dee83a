"""Every field of every format with values of every type.

No value may end a run, drop a part of a prompt or join texts of different records. Each text of a
sample contains a unique word with the record's number (`user_12`), which identifies the field and
record of everything that was read.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import read_sample
from ngram_npu.errors import InputError
from ngram_npu_cli.logs.formats import iter_conversations
from ngram_npu_cli.logs.reader import Tokenization
from ngram_npu_cli.replay import (
    ReplayOptions,
    replay,
)
from ngram_npu_cli.tune import TuneOptions
from ngram_npu_cli.tune.traffic import read_traffic

Path_ = tuple[Any, ...]
Texts = list[list[tuple[str, str]]]

MISSING = object()
DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    MISSING,
    None,
    True,
    False,
    0,
    -1,
    1,
    1.5,
    10**30,
    "",
    " x ",
    "\ud800",
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    {"\ud800": "\ud800"},
    DEEP,
]


def ids(text: str) -> list[int]:
    """Returns token ids of the tokenizer `bytes`; the first and the last are spaces."""
    return list(f" {text} ".encode())


def call(t: int, name: str) -> dict[str, Any]:
    function = {"name": f"{name}_{t}", "arguments": json.dumps({"a": f"{name}arg_{t}"})}
    return {"id": f"id-{name}", "type": "function", "function": function}


def talk(t: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    return [
        {"role": "system", "content": f"sys_{t}"},
        {"role": "user", "content": [{"type": "text", "text": f"user_{t}"}, image], "name": "n"},
        {
            "role": "assistant",
            "content": f"early_{t}",
            "reasoning_content": f"why_{t}",
            "refusal": None,
            "tool_calls": [call(t, "one"), call(t, "two")],
            "function_call": None,
        },
        {"role": "tool", "tool_call_id": "c", "content": f"result_{t}"},
        {"role": "assistant", "content": [{"type": "text", "text": f"late_{t}"}]},
    ]


def tools(t: int) -> list[Any]:
    return [{"type": "function", "function": {"name": f"tool_{t}", "parameters": {}}}]


def make_request(t: int) -> dict[str, Any]:
    """Returns a request without the reasoning of earlier turns."""
    messages = [*talk(t), {"role": "user", "content": f"ask_{t}"}]
    del messages[2]["reasoning_content"]
    return {"model": "m", "messages": messages}


def make_short_request(t: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"ask_{t}"}]}


def choice(t: int, index: int, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"said{'ab'[index]}_{t}", **more}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": "stop"}


def body(*choices: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion", "choices": list(choices), **more}


def delta(index: int, **fields: Any) -> dict[str, Any]:
    return body({"index": index, "delta": fields, "finish_reason": None})


def call_delta(ident: str, index: int, **function: str) -> dict[str, Any]:
    first = {"id": ident} if "name" in function else {}
    return {"index": index, **first, "type": "function", "function": function}


def calling_stream(t: int) -> list[Any]:
    return [
        delta(0, role="assistant", content=None, reasoning=f" why_{t} "),
        delta(0, content=f" saida_{t} "),
        delta(0, tool_calls=[call_delta("id-one", 0, name=f"one_{t}", arguments="")]),
        delta(0, tool_calls=[call_delta("id-one", 0, arguments=f'{{"a": "onearg_{t}"}}')]),
        delta(0, tool_calls=[call_delta("id-two", 1, name=f"two_{t}", arguments="{}")]),
        body({"index": 0, "delta": {}, "finish_reason": "tool_calls"}),
        body(usage={"completion_tokens": 9}),
    ]


def two_streams(t: int) -> list[Any]:
    return [
        delta(0, role="assistant", content=""),
        delta(1, role="assistant", content=""),
        delta(0, content=f" saida_{t} "),
        delta(1, content=f" saidb_{t} "),
        delta(0, content=f" againa_{t} "),
        delta(1, content=f" againb_{t} "),
    ]


def response_items(t: int) -> list[Any]:
    text = {"type": "output_text", "text": f"said_{t}", "annotations": []}
    return [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": f"why_{t}"}]},
        {"type": "message", "role": "assistant", "content": [text]},
        {"type": "function_call", "call_id": "c", "name": f"one_{t}", "arguments": "{}"},
    ]


def make_items_request(t: int) -> dict[str, Any]:
    shown = [{"type": "input_text", "text": f"user_{t}"}]
    return {
        "instructions": f"sys_{t}",
        "input": [
            {"type": "message", "role": "user", "content": shown},
            {"type": "function_call", "call_id": "c", "name": f"two_{t}", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": f"result_{t}"},
        ],
        "tools": tools(t),
    }


def response_stream(t: int) -> list[Any]:
    begun = {"type": "message", "role": "assistant", "content": []}
    called = {"type": "function_call", "call_id": "c", "name": f"one_{t}", "arguments": ""}
    text = "response.output_text.delta"
    arguments = "response.function_call_arguments.delta"
    return [
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": begun},
        {"type": text, "output_index": 0, "content_index": 0, "delta": f" said_{t} "},
        {"type": text, "output_index": 0, "content_index": 0, "delta": f" again_{t} "},
        {"type": "response.output_item.added", "output_index": 1, "item": called},
        {"type": arguments, "output_index": 1, "delta": f'{{"a": "onearg_{t}"}}'},
    ]


def make_claude_request(t: int) -> dict[str, Any]:
    used = {"type": "tool_use", "id": "t", "name": f"one_{t}", "input": {"a": f"onearg_{t}"}}
    result = [{"type": "text", "text": f"result_{t}"}]
    returned = {"type": "tool_result", "tool_use_id": "t", "content": result}
    return {
        "system": [{"type": "text", "text": f"sys_{t}"}],
        "messages": [
            {"role": "user", "content": f"user_{t}"},
            {"role": "assistant", "content": [{"type": "text", "text": f"early_{t}"}, used]},
            {"role": "user", "content": [returned]},
        ],
        "tools": [{"name": f"tool_{t}", "input_schema": {}}],
    }


def claude_stream(t: int) -> list[Any]:
    def make_block(kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", **more}

    thought = {"type": "thinking", "thinking": ""}
    used = {"type": "tool_use", "id": "t", "name": f"one_{t}", "input": {}}
    pieces = {"type": "input_json_delta", "partial_json": f'{{"a": "onearg_{t}"}}'}
    message = {"type": "message", "role": "assistant", "content": []}
    return [
        {"type": "message_start", "message": message},
        make_block("start", index=0, content_block=thought),
        make_block("delta", index=0, delta={"type": "thinking_delta", "thinking": f" why_{t} "}),
        make_block("delta", index=0, delta={"type": "signature_delta", "signature": "s"}),
        make_block("start", index=1, content_block={"type": "text", "text": ""}),
        make_block("delta", index=1, delta={"type": "text_delta", "text": f" said_{t} "}),
        make_block("delta", index=1, delta={"type": "text_delta", "text": f" again_{t} "}),
        make_block("start", index=2, content_block=used),
        make_block("delta", index=2, delta=pieces),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
    ]


def events(chunks: Any) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def as_events(record: Any) -> list[str]:
    """Serializes the response as the text of a stream, and the request as text."""
    serialized = dict(record)
    if isinstance(serialized.get("response"), list):
        serialized["response"] = events(serialized["response"])
    if "request" in serialized:
        serialized["request"] = json.dumps(serialized["request"])
    return [json.dumps(serialized)]


def as_server_log(record: Any) -> list[str]:
    """Serializes like vLLM's log: each value as Python's `repr`."""
    at = "(APIServer pid=1) {} 11-23 17:51:47 [entrypoints/request_logger.py:74] "
    debug, info = at.format("DEBUG"), at.format("INFO")
    fields = {key: record.get(key, "") for key in ("prompt", "prompt_token_ids", "n")}
    # Without an id a line is another one of the log.
    fields["id"] = re.sub(r"\s", "", str(record.get("id", ""))) or "no-id"
    lines = [
        f"{debug}Request {fields['id']} JSON body: {json.dumps({'prompt': fields['prompt']})}",
        f"{debug}Request {fields['id']} details: prompt: {fields['prompt']!r}, prompt_token_ids: "
        f"{fields['prompt_token_ids']!r}, prompt_embeds shape: None.",
        f"{info}Received request {fields['id']}: params: SamplingParams(n={fields['n']}, top_k=0).",
    ]
    for answer in record.get("answers", ()) if isinstance(record.get("answers"), list) else ():
        logged = answer if isinstance(answer, dict) else {}
        lines += [
            f"{debug}Generated response {fields['id']} details: output_token_ids: "
            f"{logged.get('token_ids', '')!r}, finish_reason: stop",
            f"{info}Generated response {fields['id']}: output: {logged.get('output', '')!r}, "
            "finish_reason: stop",
        ]
    return lines


def as_json(record: Any) -> list[str]:
    return [json.dumps(record)]


@dataclass(frozen=True)
class Sample:
    """A format: its records, how they are written, and the file that belongs to them.

    Attributes:
        make: Returns the record with a number.
        write: Returns the lines of a record.
        other_file: Name of another file and a function for its record. The fields of that record
            are changed instead.
        last: Path of the last of several answers in a list of messages. If it is no answer any
            more, the messages before it are no prompt either.
        needed: Path of a field without which the record has another format.
    """

    make: Callable[[int], Any]
    write: Callable[[Any], list[str]] = as_json
    other_file: tuple[str, Callable[[int], Any]] | None = None
    last: Path_ = ()
    needed: Path_ = ()


def batch_request(t: int) -> dict[str, Any]:
    return {"custom_id": f"r-{t}", "url": "/v1/chat", "body": make_short_request(t)}


def batch_answer(t: int) -> dict[str, Any]:
    response = {"status_code": 200, "body": body(choice(t, 0))}
    return {"id": "v", "custom_id": f"r-{t}", "response": response, "error": None}


def completions(t: int, **more: Any) -> dict[str, Any]:
    """Returns a record of two prompts with two answers each."""
    texts = [f"saida_{t}", f"saidb_{t}", f"saidc_{t}", f"saidd_{t}"]
    return {
        "request": {"prompt": [f"userone_{t}", f"usertwo_{t}"], "n": 2, **more},
        "response": body(*({"index": i, "text": text} for i, text in enumerate(texts))),
    }


def streamed_ids(t: int) -> dict[str, Any]:
    def make_chunk(index: int, text: str, **more: Any) -> dict[str, Any]:
        return body({"index": index, "text": text, "token_ids": ids(text), **more})

    return {
        "request": {"prompt": [f"userone_{t}", f"usertwo_{t}"], "return_token_ids": True},
        "response": [
            make_chunk(0, f"saida_{t}", prompt_token_ids=ids(f"userone_{t}")),
            make_chunk(1, f"saidb_{t}", prompt_token_ids=ids(f"usertwo_{t}")),
            make_chunk(0, f"againa_{t}", prompt_token_ids=None),
            make_chunk(1, f"againb_{t}", prompt_token_ids=None),
        ],
    }


def echoed(t: int) -> dict[str, Any]:
    chunks = [f" user_{t} ", f" said_{t} ", f"again_{t}"]
    return {
        "request": {"prompt": f" user_{t} ", "echo": True, "stream": True},
        "response": [body({"index": 0, "text": text}) for text in chunks],
    }


def ollama(t: int) -> list[Any]:
    function = {"name": f"one_{t}", "arguments": {"a": f"onearg_{t}"}}
    message = {
        "role": "assistant",
        "content": f" again_{t} ",
        "tool_calls": [{"function": function}],
    }
    return [
        {"model": "m", "message": {"role": "assistant", "content": f" said_{t} "}, "done": False},
        {"model": "m", "message": message, "done": True},
    ]


SAMPLES: dict[str, Sample] = {
    "turns": Sample(
        lambda t: {
            "id": "i",
            "turns": [
                {"prompt": f"user_{t}", "completion": f"said_{t}"},
                {"prompt": f"ask_{t}", "completion": f"again_{t}"},
            ],
        }
    ),
    "turns-ids": Sample(
        lambda t: {
            "turns": [
                {
                    "prompt_token_ids": ids(f"user_{t}"),
                    "completion_token_ids": ids(f"said_{t}"),
                }
            ]
        }
    ),
    "messages": Sample(
        lambda t: {"id": {"$oid": "i"}, "messages": talk(t), "tools": tools(t)},
        last=("messages", 4),
    ),
    "messages-system": Sample(
        lambda t: {"system": f"top_{t}", "messages": talk(t)[1:]}, last=("messages", 3)
    ),
    "sharegpt": Sample(
        lambda t: {
            "id": "i",
            "system": f"sys_{t}",
            "tools": json.dumps(tools(t)),
            "conversations": [
                {"from": "human", "value": f"user_{t}"},
                {"from": "gpt", "value": f"said_{t}"},
                {"from": "observation", "value": f"result_{t}"},
                {"from": "gpt", "value": f"again_{t}"},
            ],
        },
        last=("conversations", 3),
    ),
    "pairs": Sample(
        lambda t: {"system": f"sys_{t}", "prompt": f"user_{t}", "completion": f"said_{t}"}
    ),
    "pairs-ids": Sample(
        lambda t: {
            "prompt_token_ids": ids(f"user_{t}"),
            "completion_token_ids": ids(f"said_{t}"),
        }
    ),
    "chat-n2": Sample(
        lambda t: {
            "request": {**make_request(t), "tools": tools(t), "n": 2},
            "response": body(choice(t, 0), choice(t, 1, tool_calls=[call(t, "one")])),
        }
    ),
    "chat-body": Sample(
        lambda t: {
            "request": {"body": make_short_request(t)},
            "response": {"status": 200, "body": body(choice(t, 0))},
        }
    ),
    "chat-messages": Sample(
        lambda t: {**body(choice(t, 0)), "messages": make_short_request(t)["messages"]},
        needed=("choices",),
    ),
    "text-messages": Sample(
        lambda t: {"messages": make_request(t)["messages"][:2], "output": f"said_{t}"}
    ),
    "chat-stream": Sample(
        lambda t: {"request": make_short_request(t), "response": calling_stream(t)}
    ),
    "chat-stream-n2": Sample(
        lambda t: {"request": make_short_request(t), "response": two_streams(t)}
    ),
    "chat-events": Sample(
        lambda t: {"request": make_short_request(t), "response": two_streams(t)}, as_events
    ),
    "completions": Sample(completions),
    "completions-echo": Sample(echoed, as_events),
    "responses": Sample(
        lambda t: {"request": make_items_request(t), "response": {"output": response_items(t)}}
    ),
    "responses-stream": Sample(
        lambda t: {"request": make_items_request(t), "response": response_stream(t)}
    ),
    "responses-stream-whole": Sample(
        lambda t: {
            "request": {"input": f"user_{t}"},
            "response": [
                *response_stream(t)[:2],
                {"type": "response.completed", "response": {"output": response_items(t)}},
            ],
        }
    ),
    "anthropic": Sample(
        lambda t: {
            "request": make_claude_request(t),
            "response": {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"why_{t}", "signature": "s"},
                    {"type": "text", "text": f"said_{t}"},
                    {"type": "tool_use", "id": "t", "name": f"two_{t}", "input": {}},
                ],
            },
        }
    ),
    "anthropic-stream": Sample(
        lambda t: {"request": make_claude_request(t), "response": claude_stream(t)}, as_events
    ),
    "ollama": Sample(lambda t: {"request": make_short_request(t), "response": ollama(t)}),
    "llama.cpp": Sample(
        lambda t: {"request": f"user_{t}", "response": {"content": f"said_{t}", "stop": True}}
    ),
    "chat-ids": Sample(
        lambda t: {
            "request": {"messages": [{"role": "user", "content": f"user_{t}"}]},
            "response": body(
                {**choice(t, 0), "token_ids": ids(f"saida_{t}")},
                {**choice(t, 1), "token_ids": ids(f"saidb_{t}")},
                prompt_token_ids=ids(f"user_{t}"),
            ),
        }
    ),
    "completions-ids-stream": Sample(streamed_ids),
    "run-batch": Sample(batch_answer),
    "run-batch-input": Sample(batch_answer, other_file=("input.jsonl", batch_request)),
    "server-log": Sample(
        lambda t: {
            "id": f"cmpl-{t}",
            "prompt": f"user_{t}",
            "prompt_token_ids": ids(f"user_{t}"),
            "n": 2,
            "answers": [
                {"token_ids": ids(f"saida_{t}"), "output": f"saida_{t}"},
                {"token_ids": ids(f"saidb_{t}"), "output": f"saidb_{t}"},
            ],
        },
        as_server_log,
    ),
}
OTHER_FILES = {"run-batch": ("input.jsonl", batch_request)}
"""Files that must exist although their fields are not changed."""


def list_paths(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Yields each field; of a list of token ids the first and the last."""
    if at:
        yield at
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
        keys = [0, -1] if keys and isinstance(value[0], int) else keys
    for key in keys:
        yield from list_paths(value[key], (*at, key))


def at(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key]
    return value


def change_field(record: Any, path: Path_, value: Any) -> Any:
    copied = copy.deepcopy(record)
    parent = at(copied, path[:-1])
    if value is MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copied


def list_values(record: Any, path: Path_, paths: list[Path_]) -> list[Any]:
    """Returns values of other types, nested copies, and values of other fields of the record."""
    old = at(record, path)
    place = paths.index(path)
    others = [at(record, paths[(place + step) % len(paths)]) for step in (-1, 1, len(paths) // 2)]
    return [*VALUES, [old], {"a": old}, [old, old], *others]


def words(value: Any) -> set[str]:
    """Returns the words with a record's number, also from token ids and JSON text."""
    if isinstance(value, dict):
        return set().union(*map(words, value.keys()), *map(words, value.values()))
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, int) and 0 <= v < 256 for v in value):
            return words(bytes(value).decode("utf-8", "replace"))
        return set().union(*map(words, value))
    return set(re.findall(r"[a-z]+_\d+", value)) if isinstance(value, str) else set()


@dataclass(frozen=True)
class Case:
    """A record in a file, with a changed field unless `path` is empty."""

    number: int
    path: Path_ = ()
    value: Any = None
    removed: frozenset[str] = frozenset()

    @property
    def is_index(self) -> bool:
        """Whether a piece of a stream is now that of another answer, which nothing contradicts."""
        return "index" in self.path and type(self.value) is int and self.value >= 0

    def __str__(self) -> str:
        value = "missing" if self.value is MISSING else f"{self.value!r:.60}"
        return f"{'.'.join(map(str, self.path))} = {value}" if self.path else "unchanged"


def describe_problem(case: Case, expected: Texts, texts: Texts | None, skipped: bool) -> str | None:
    """Returns what is wrong with the texts that were read from a record; None if nothing is."""
    if not case.path:
        return None if texts == expected else f"an unchanged record became {texts!r:.300}"
    if texts is None:
        return None if skipped else "neither read nor skipped"
    foreign = {word for word in words(texts) if not re.fullmatch(rf"[a-z]+_{case.number}", word)}
    if foreign:
        return f"text of other records: {sorted(foreign)}"
    prompts = [words([prompt for prompt, _ in turns]) for turns in expected]
    answers = [words([answer for _, answer in turns]) for turns in expected]
    added = words(case.value) if case.value is not MISSING else set()
    for turns in texts:
        read = words(turns)
        # Which of the recorded requests this is: an answer belongs to its own prompt only.
        allowed_sets = [p | a | added for p, a in zip(prompts, answers, strict=True)]
        if not any(read <= allowed for allowed in allowed_sets) and not case.is_index:
            return f"texts of several answers in one: {sorted(read)}"
        if not any(p - case.removed <= read for p in prompts):
            return f"a part of the prompt is missing: {sorted(read)}"
    lost = set().union(*prompts, *answers) - case.removed - words(texts)
    lost = set() if skipped else lost  # one of several answers
    return f"text is missing without a note: {sorted(lost)}" if lost else None


def read(path: Path) -> tuple[dict[int, Texts], list[InputError]]:
    """Returns the conversations by line, as texts, and the errors of skipped records."""
    errors: list[InputError] = []
    texts: dict[int, Texts] = {}
    tokenization = Tokenization("bytes")
    for conversation in iter_conversations(path, None, errors.append):
        try:
            requests = tokenization.make_requests(conversation)
        except InputError as error:
            errors.append(error)
            continue
        turns = [turn for request in requests for turn in request.turns]
        decoded = [
            (bytes(turn.prompt.tolist()).decode(), bytes(turn.completion.tolist()).decode())
            for turn in turns
        ]
        texts.setdefault(int(conversation.where.rpartition(":")[2]), []).append(decoded)
    return texts, errors


def write(folder: Path, name: str, cases: list[Case]) -> tuple[Path, dict[int, Case]]:
    """Writes a file of the cases; returns its path and the case of each line."""
    sample = SAMPLES[name]
    folder.mkdir(parents=True)
    lines: list[str] = []
    case_of: dict[int, Case] = {}
    other_lines = []
    for case in cases:
        record = sample.make(case.number)
        other_file = OTHER_FILES.get(name, sample.other_file)
        other = None if other_file is None else other_file[1](case.number)
        if case.path and sample.other_file is not None:
            other = change_field(other, case.path, case.value)
        elif case.path:
            record = change_field(record, case.path, case.value)
        if other is not None:
            other_lines.append(json.dumps(other))
        for line in sample.write(record):
            lines.append(line)
            case_of[len(lines)] = case
    if other_file is not None:
        (folder / other_file[0]).write_text("".join(f"{line}\n" for line in other_lines))
    path = folder / ("talk.log" if sample.write is as_server_log else "talk.jsonl")
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    return path, case_of


def make_cases(name: str) -> list[tuple[Path_, list[Case]]]:
    """Returns the cases of each field, with unchanged records before, between and after them."""
    sample = SAMPLES[name]
    make = sample.make if sample.other_file is None else sample.other_file[1]
    all_cases = []
    paths = list(list_paths(make(1)))
    for path in paths:
        cases = [Case(1)]
        for i in range(len(list_values(make(1), path, paths))):
            if i % 4 == 0:
                cases.append(Case(len(cases) + 1))
            number = len(cases) + 1
            record = make(number)
            value = list_values(record, path, paths)[i]
            if value is MISSING and path == sample.needed:
                continue
            removed = words(at(record, path))
            if sample.last and path[: len(sample.last)] == sample.last:
                messages = at(record, sample.last[:-1])
                removed |= words(messages[sample.last[-1] - 1 :])
            cases.append(Case(number, path, value, frozenset(removed)))
        cases.append(Case(len(cases) + 1))
        all_cases.append((path, cases))
    return all_cases


def by_number(by_line: dict[int, Texts], case_of: dict[int, Case]) -> dict[int, Texts]:
    grouped: dict[int, Texts] = {}
    for line, conversations in by_line.items():
        grouped.setdefault(case_of[line].number, []).extend(conversations)
    return grouped


@pytest.mark.parametrize("name", SAMPLES)
def test_wrong_type_in_a_field_changes_no_other_record(tmp_path: Path, name: str) -> None:
    every = make_cases(name)
    most = max(len(cases) for _, cases in every)
    unchanged = [Case(number + 1) for number in range(most)]
    path, case_of = write(tmp_path / "unchanged", name, unchanged)
    by_line, errors = read(path)
    expected = by_number(by_line, case_of)
    assert not errors
    for number, conversations in expected.items():
        record = SAMPLES[name].make(number)
        assert words(record) <= words(conversations), "every text of a sample is read"
    wrong: list[str] = []
    for i, (field, cases) in enumerate(every):
        path, case_of = write(tmp_path / str(i), name, cases)
        shown = ".".join(map(str, field))
        try:
            by_line, errors = read(path)
        except Exception as error:  # any exception would end a run
            wrong.append(f"{shown}: the run ends: {error!r:.200}")
            continue
        numbers = by_number(by_line, case_of)
        skipped = set()
        for error in errors:
            at_line = re.match(rf"{re.escape(str(path))}:(\d+): ", str(error))
            if at_line is None:
                wrong.append(f"{shown}: no file and line: {error!s:.200}")
            else:
                skipped.add(case_of[int(at_line[1])].number)
        for case in cases:
            texts, was_skipped = numbers.get(case.number), case.number in skipped
            problem = describe_problem(case, expected[case.number], texts, was_skipped)
            if problem is not None:
                wrong.append(f"{case}: {problem}")
    assert not wrong, "\n".join(wrong)


def test_commands_read_the_valid_records_of_files_with_wrong_fields(tmp_path: Path) -> None:
    """Of each field of each sample one value; a file per sample, two records of which are unchanged
    for each change_field one, so that not more than half of a file is skipped."""
    paths: list[Path] = []
    for name in SAMPLES:
        cases = []
        for i, (_, of_field) in enumerate(make_cases(name)):
            changed_ones = [case for case in of_field if case.path]
            case = changed_ones[i % len(changed_ones)]
            cases += [Case(len(cases) + 1), replace(case, number=len(cases) + 2)]
            cases.append(Case(len(cases) + 1))
        path, _ = write(tmp_path / name, name, cases)
        paths.append(path.rename(path.with_stem(name)))
    inputs = replay(paths, ReplayOptions(tokenizer="bytes")).inputs
    item_notes = [f"{item.name}: {note}" for item in inputs for note in item.notes]
    assert len(item_notes) >= len(SAMPLES)
    sample = read_sample(paths, "bytes")
    assert sample.notes == item_notes
    traffic = read_traffic(paths, TuneOptions(tokenizer="bytes", sample=None))
    assert len(traffic.names) == sample.conversations
    assert sorted(traffic.notes) == sorted(item_notes)
    for read_strictly in (
        lambda path: replay([path], ReplayOptions(tokenizer="bytes", strict=True)),
        lambda path: read_traffic([path], TuneOptions(tokenizer="bytes", strict=True)),
        lambda path: read_sample([path], "bytes", strict=True),
    ):
        for path in paths:
            with pytest.raises(InputError, match=rf"^{re.escape(str(path))}:\d+: "):
                read_strictly(path)
