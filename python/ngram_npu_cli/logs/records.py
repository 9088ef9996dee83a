"""Makes conversations from the fields of records, and from rows that are parts of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ngram_npu.errors import InputError, RecordError

from ngram_npu_cli.logs.messages import (
    make_turns,
    merge_answer,
    parse_message,
    parse_messages,
)
from ngram_npu_cli.logs.responses import check_success, parse_answers
from ngram_npu_cli.logs.values import (
    Conversation,
    Message,
    Record,
    Turn,
    check_list,
    check_text,
    check_token_ids,
    decode_json,
    describe_type,
    get_only,
    is_empty,
    list_keys,
)

_SESSION_KEYS = (
    *("session_id", "sessionId", "conversation_id", "conversationId", "thread_id", "chat_id"),
)
_MESSAGES_KEYS = ("messages", "input", "contents", "prompt")
_LOST_KEYS = ("previous_response_id", "conversation", "cachedContent", "documents", "echo")
"""Keys of a request that refer to text which is not in the request, or repeat it in the answer."""


@dataclass(frozen=True)
class Row:
    """A record that is a part of the conversation `key`."""

    key: str
    where: str
    fields: Mapping[str, Any]


def read_token_ids(record: Record, where: str) -> Conversation:
    """Returns the conversation of a record with `turns`, or with token ids."""
    turns = []
    for turn in check_list(record.get("turns", [record]), "turns"):
        if "completion_token_ids" in turn:
            ids = (turn.get("prompt_token_ids"), turn["completion_token_ids"])
            names = ("prompt_token_ids", "completion_token_ids")
            prompt, answer = map(check_token_ids, ids, names)
            turns.append(Turn(prompt_token_ids=prompt, answer_token_ids=answer))
            continue
        texts = [check_text(turn.get(key), f"{key} of a turn") for key in ("prompt", "completion")]
        user, answer_text = ({"role": "user", "content": texts[0]}, texts[1])
        turns.append(Turn((user,), {"role": "assistant", "content": answer_text}))
    if not turns or len({turn.answer is None for turn in turns}) > 1:
        raise RecordError("turns must all have texts, or all have token ids")
    return Conversation(tuple(turns), where, session=find_session(record))


def find_session(record: Record) -> str:
    """Returns the session or conversation that a record names; an empty text if it names none."""
    value = next((record[key] for key in _SESSION_KEYS if not is_empty(record.get(key))), "")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def make_conversations(fields: Mapping[str, Any], where: str) -> list[Conversation]:
    """Returns the conversation of a record's fields; one per answer if there are several.

    Raises:
        RecordError: The fields are not a conversation.
    """
    request = _Request.read(fields)
    if is_empty_answer(fields.get("answer")):
        if request.messages is None:
            raise RecordError("the record has no answer")
        turns = [make_turns(request.list_messages())]
    else:
        turns = _make_answer_turns(request, fields["answer"])
    return [Conversation(turn, where, request.tools) for turn in turns]


def is_empty_answer(value: Any) -> bool:
    """Whether an answer is missing. Empty JSON as text is an answer."""
    return value is None or value in ("", [], {})


def _make_answer_turns(request: _Request, answer: Any) -> list[tuple[Turn, ...]]:
    may_be_text = request.is_body or request.messages is not None
    if isinstance(answer, list) and answer and isinstance(answer[0], str):
        raise RecordError("the answer is a list of texts")
    turns = []
    for message_list, ids, prompt_ids in parse_answers(answer, may_be_text=may_be_text):
        if ids is not None:
            turns.append((Turn(prompt_token_ids=prompt_ids, answer_token_ids=ids),))
        elif request.messages is None and request.is_whole:
            turns.append((Turn(prompt=request.text, answer=message_list[0]),))
            if len(message_list) > 1:
                raise RecordError("the answer to a text has several messages")
        else:
            messages = request.list_messages()
            if messages[-1]["role"] == "assistant":
                raise RecordError("the messages already end with an answer")
            turns.append(make_turns([*messages, *message_list], len(messages)))
    return turns


@dataclass(frozen=True)
class _Request:
    """The input of a model: messages, or a text, which is the whole input if `is_whole`."""

    text: str = ""
    messages: Sequence[Any] | None = None
    system: Any = None
    tools: tuple[Any, ...] = ()
    is_whole: bool = False
    is_body: bool = False

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> _Request:
        """Returns the request of a record's fields."""
        value = fields.get("messages")
        if is_empty(value):
            raise RecordError("the record has no prompt")
        body = _decode_request(value)
        is_body = isinstance(body, dict)
        while isinstance(body, dict) and isinstance(decode_json(body.get("body")), dict):
            body = decode_json(body["body"])
        other: Record = {}
        key = ""
        if isinstance(body, dict):
            check_success(body)
            for lost in _LOST_KEYS:
                if not is_empty(body.get(lost)):
                    raise RecordError(f'the request has the key "{lost}", which cannot be read')
            key, content = get_only(body, _MESSAGES_KEYS, "prompt of the request")
            if not key:
                raise RecordError(f"the request has no messages, but the keys {list_keys(body)}")
            other, body = body, decode_json(content) if key != "prompt" else content
        system = [fields.get("system")] if not is_empty(fields.get("system")) else []
        keys = ("system", "instructions", "systemInstruction", "system_instruction")
        system += [other[key] for key in keys if not is_empty(other.get(key))]
        if len(system) > 1:
            raise RecordError("several keys may be the system text")
        tools = decode_json(fields.get("tools"))
        tools = decode_json(other.get("tools")) if is_empty(tools) else tools
        checked = () if is_empty(tools) else tuple(check_list(tools, "tools"))
        if isinstance(body, list) and len(body) == 1 and isinstance(body[0], str):
            body = body[0]
        if isinstance(body, list):
            check_list(body, "messages")
            if not body:
                raise RecordError("the record has no prompt")
            return cls("", body, *system, tools=checked) if system else cls("", body, tools=checked)
        text = check_text(body, "the prompt")
        is_whole = key == "prompt" and not system and not checked
        return cls(text, None, *(system or [None]), checked, is_whole, is_body)

    def list_messages(self) -> list[Message]:
        """Returns the messages in the form of `parse_message`, with the system text."""
        items = self.messages if self.messages is not None else [_make_user_message(self.text)]
        messages = parse_messages(items)
        if not is_empty(self.system):
            system = self.system
            if isinstance(system, dict) and "role" not in system:  # of Gemini
                system = system.get("parts", system.get("content"))
            parsed = (
                parse_message(system)
                if isinstance(system, dict)
                else parse_message({"role": "system", "content": decode_json(system)})
            )
            messages = messages if messages[:1] == parsed else [*parsed, *messages]
        if not messages:
            raise RecordError("the record has no prompt")
        return messages


def _make_user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def _decode_request(value: Any) -> Any:
    """Returns the messages or the request of a text that is JSON of either; others unchanged."""
    decoded = decode_json(value)
    if decoded is value or not isinstance(value, str):
        return decoded
    items = decoded if isinstance(decoded, list) else [decoded]
    keys = {"role", "from"} if isinstance(decoded, list) else {*_MESSAGES_KEYS, "body"}
    is_request = items and all(isinstance(item, dict) and keys & item.keys() for item in items)
    return decoded if is_request else value


# Rows


def group_rows(rows: Sequence[Row]) -> Iterator[tuple[int, Conversation | InputError]]:
    """Yields the conversations of rows, or an error, each with its number of rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    for group in groups.values():
        where, num_rows = group[0].where, len(group)
        try:
            for conversation in _join_rows(group):
                yield num_rows, conversation
                num_rows = 0  # each row is counted once
        except RecordError as error:
            yield num_rows, RecordError(f"{where}: {error}")


def _join_rows(rows: list[Row]) -> list[Conversation]:
    """Returns the conversations of rows: each row is a message or a node of a tree of messages, a
    request, an answer, or both."""
    where, fields = rows[0].where, [row.fields for row in rows]
    if any(not is_empty(field.get("id")) for field in fields):
        return [
            Conversation(make_turns(_merge_answers(tree)), where)
            for tree in _follow_parents(fields)
            if any(message["role"] == "assistant" for _, message in tree)
        ]
    fields = _sort_by_time(fields)
    if all("content" in field for field in fields):
        messages = parse_messages(field["content"] for field in fields)
        tools = {json.dumps(field.get("tools"), default=str) for field in fields} - {"null"}
        if tools:
            raise RecordError("the rows of a conversation have tools; use records without rows")
        return [Conversation(make_turns(messages), where)]
    pairs = [make_conversations(field, where) for field in fields]
    if any(len(pair) != 1 or pair[0].tools for pair in pairs):
        raise RecordError("a row of a conversation has several answers, or tools")
    turns = [turn for pair in pairs for turn in pair[0].turns]
    if any(m["role"] == "assistant" for turn in turns[1:] for m in turn.messages):
        raise RecordError("the rows repeat earlier turns; use --map without conversation")
    return [Conversation(tuple(turns), where)]


def join_batch(rows: Sequence[Row]) -> list[Conversation]:
    """Returns the conversations of the request and the result with one `custom_id`."""
    requests = [row.fields for row in rows if "messages" in row.fields]
    answers = [row.fields for row in rows if "answer" in row.fields]
    if len(requests) != 1 or len(answers) != 1:
        raise RecordError(
            f"the custom_id has {len(requests)} requests and {len(answers)} results, expected one "
            "of each; read both files of one batch"
        )
    return make_conversations({**requests[0], **answers[0]}, rows[0].where)


def _follow_parents(fields: Sequence[Mapping[str, Any]]) -> list[list[tuple[Any, Message]]]:
    """Returns the messages of each tree of rows, in the order of the log, each with the id of its
    response. Branches that were left are omitted; a row that was written twice counts once."""
    nodes: dict[str, tuple[Any, Any, list[Message]]] = {}
    for field in fields:
        node, content = str(field.get("id")), field.get("content")
        response = content.get("id") if isinstance(content, dict) else None
        parsed = parse_message(content) if content is not None else []
        made = (field.get("parent"), response, parsed)
        if nodes.setdefault(node, made) != made:
            raise RecordError("two rows have the same id and different contents")
    paths = {node: _list_path(nodes, node) for node in nodes}
    last_of_root = {path[-1]: path for path in paths.values()}  # the last row of each tree
    trees = []
    for root, path in last_of_root.items():
        kept = {*path}
        tree = [node for node in nodes if paths[node][-1] == root]
        responses = {nodes[node][1] for node in path} - {None}
        # Calls of one response are several rows, and results follow the row of their call.
        kept |= {node for node in tree if nodes[node][1] in responses}
        kept |= {
            node
            for node in tree
            if nodes[node][0] in kept
            and nodes[node][2]
            and all(message["role"] == "tool" for message in nodes[node][2])
        }
        trees.append([(nodes[n][1], m) for n in tree if n in kept for m in nodes[n][2]])
    return trees


def _list_path(nodes: Mapping[str, tuple[Any, Any, list[Message]]], node: str) -> list[str]:
    """Returns a node and its ancestors; the last is the root."""
    path = [node]
    while not is_empty(parent := nodes[path[-1]][0]):
        if not isinstance(parent, str) or parent not in nodes:
            raise RecordError("the parent of a row is not in the log")
        path.append(parent)
        if len(path) > len(nodes):
            raise RecordError("the parents of rows form a circle")
    return path


def _merge_answers(rows: list[tuple[Any, Message]]) -> list[Message]:
    """Returns the messages of rows, of which those of one response are one answer."""
    messages: list[Message] = []
    number_of: dict[Any, int] = {}
    for response, message in rows:
        number = number_of.get(response) if isinstance(response, str) else None
        if number is not None and message["role"] == "assistant":
            merged = [messages[number]]
            merge_answer(merged, [message])
            messages[number] = merged[0]
            continue
        if isinstance(response, str):
            number_of.setdefault(response, len(messages))
        messages.append(message)
    return messages


def _sort_by_time(fields: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns rows in the order of time. Without a time, and at equal times, they keep their
    order."""
    values = [field.get("time") for field in fields]
    if all(value is None for value in values):
        return list(fields)
    times = [_parse_time(value) for value in values]
    order = sorted(range(len(times)), key=times.__getitem__)
    return [fields[i] for i in order]


def _parse_time(value: Any) -> float:
    """Returns the seconds of a number or of a time in ISO 8601."""
    try:
        if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
            text = value.strip().replace(" UTC", "+00:00").removesuffix("Z")
            value = datetime.fromisoformat(text)
        if isinstance(value, datetime):
            return value.replace(tzinfo=value.tzinfo or timezone.utc).timestamp()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise RecordError(f"the time of a row is {describe_type(value)} that is no time")
