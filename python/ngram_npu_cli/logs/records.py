"""Makes conversations from the fields of records, and from rows that are parts of conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ngram_npu.errors import RecordError

from ngram_npu_cli.logs.messages import make_turns, parse_message, parse_messages
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
    get_only,
    is_empty,
    list_keys,
)

_BODY_KEYS = ("messages", "input", "prompt")
_LOST_KEYS = ("previous_response_id", "conversation", "documents", "echo")
"""Keys of a request that refer to text which is not in the request, or repeat it in the answer."""

Fields = Mapping[str, Any]


class Row(NamedTuple):
    """The fields of a record that is a part of a conversation."""

    where: str
    fields: Fields


def read_turns(record: Record, where: str) -> Conversation:
    """Returns the conversation of a record with `turns`, or with token ids."""
    turns = []
    for turn in check_list(decode_json(record.get("turns", [record])), "turns"):
        if "completion_token_ids" in turn:
            prompt_ids = check_token_ids(turn.get("prompt_token_ids"), "prompt_token_ids")
            ids = check_token_ids(turn["completion_token_ids"], "completion_token_ids")
            turns.append(Turn(prompt_token_ids=prompt_ids, answer_token_ids=ids))
        else:
            text = check_text(turn.get("completion"), "completion")
            message = _make_user_message(check_text(turn.get("prompt"), "prompt"))
            turns.append(Turn((message,), {"role": "assistant", "content": text}))
    if len({turn.answer is None for turn in turns}) != 1:
        raise RecordError("turns must all have texts, or all have token ids")
    return Conversation(tuple(turns), where)


def make_conversations(fields: Fields, where: str) -> list[Conversation]:
    """Returns the conversation of a record's fields; one per answer if there are several.

    Raises:
        RecordError: The fields are not a conversation.
    """
    request = _read_request(fields)
    answer = fields.get("answer")
    if answer is None or answer in ("", [], {}):  # empty JSON as text is an answer
        if answer is not None and not _has_answer(request.messages):
            raise RecordError("the answer is empty")
        return [Conversation(make_turns(request.messages), where, request.tools)]
    conversations = []
    for message, ids, prompt_ids in parse_answers(answer, may_be_json=request.is_structured):
        if message is None:
            turn = Turn(prompt_token_ids=prompt_ids, answer_token_ids=ids)
        elif request.whole is not None:
            turn = Turn(prompt=request.whole, answer=message)
        elif request.messages[-1]["role"] == "assistant":
            raise RecordError("the messages end with an answer, and the record has another one")
        else:
            turn = Turn(tuple(request.messages), message)
        conversations.append(Conversation((turn,), where, request.tools))
    return conversations


class _Request(NamedTuple):
    """The input of a model.

    Attributes:
        whole: The model's whole input, template included, if it is recorded so.
        is_structured: Whether the input is recorded as messages or as the body of a request.
    """

    messages: list[Message]
    tools: tuple[Any, ...]
    whole: str | None
    is_structured: bool


def _read_request(fields: Fields) -> _Request:
    if is_empty(fields.get("prompt")):
        raise RecordError("the record has no prompt")
    body = _decode_request(fields["prompt"])
    key, context = "", dict(fields)
    if isinstance(body, dict):
        body = decode_json(body["body"]) if "body" in body else body
        body = body if isinstance(body, dict) else {}
        check_success(body)
        for lost in _LOST_KEYS:
            if not is_empty(body.get(lost)):
                raise RecordError(f'the request has the key "{lost}", which cannot be read')
        key, content = get_only(body, _BODY_KEYS, "prompt of the request")
        if not key:
            raise RecordError(f"the request has no messages, but the keys {list_keys(body)}")
        for name, keys in (("system", ("system", "instructions")), ("tools", ("tools",))):
            found, value = get_only(body, keys, name)
            if found and is_empty(context.get(name)):
                context[name] = value
        body = content
    system, tools = decode_json(context.get("system")), decode_json(context.get("tools"))
    tools = [] if is_empty(tools) else check_list(tools, "tools")
    body = body[0] if isinstance(body, list) and len(body) == 1 and key == "prompt" else body
    messages: list[Message] = []
    if not is_empty(system):
        has_role = isinstance(system, dict) and "role" in system
        messages = parse_message(system if has_role else {"role": "system", "content": system})
    whole = None
    if isinstance(body, list):
        parsed = parse_messages(check_list(body, "messages"))
        messages = parsed if parsed[:1] == messages[:1] else [*messages, *parsed]
    else:
        text = check_text(body, "the prompt")
        whole = text if key == "prompt" and not messages and not tools else None
        messages = [*messages, _make_user_message(text)]
    if not messages:
        raise RecordError("the record has no prompt")
    return _Request(messages, tuple(tools), whole, bool(key) or isinstance(body, list))


def _make_user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def _decode_request(value: Any) -> Any:
    """Returns the messages or the request of a text that is JSON of either; others unchanged."""
    decoded = decode_json(value)
    if decoded is value or not isinstance(value, str):
        return decoded
    items = decoded if isinstance(decoded, list) else [decoded]
    keys = {"role", "from"} if isinstance(decoded, list) else {*_BODY_KEYS, "body"}
    is_request = items and all(isinstance(item, dict) and keys & item.keys() for item in items)
    return decoded if is_request else value


# Rows


def join_batch(rows: Sequence[Row]) -> list[Conversation]:
    """Returns the conversations of the request and the result with one `custom_id`."""
    requests = [row.fields for row in rows if "prompt" in row.fields]
    answers = [row.fields for row in rows if "answer" in row.fields]
    if len(requests) != 1 or len(answers) != 1:
        raise RecordError(
            f"the custom_id has {len(requests)} requests and {len(answers)} results, expected one "
            "of each; read both files of one batch"
        )
    return make_conversations({**requests[0], **answers[0]}, rows[0].where)


def join_rows(rows: Sequence[Row]) -> list[Conversation]:
    """Returns the conversations of rows that are messages: one, or one per tree of messages."""
    fields = [row.fields for row in rows]
    if any(not is_empty(row.get("id")) for row in fields):
        listed = [messages for messages in _join_trees(fields) if _has_answer(messages)]
    else:
        listed = [parse_messages(row.get("content") for row in fields)]
    return [Conversation(make_turns(messages), rows[0].where) for messages in listed]


def _has_answer(messages: Iterable[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


class _Node(NamedTuple):
    """A row in a tree of messages; `response` is the id of the model's response."""

    parent: str | None
    response: str | None
    messages: list[Message]


def _join_trees(rows: Sequence[Fields]) -> Iterator[list[Message]]:
    """Yields the messages of each tree, in the order of the log. Branches that were left are
    omitted; a row that was written twice counts once."""
    nodes: dict[str, _Node] = {}
    for fields in rows:
        content = decode_json(fields.get("content"))
        is_answer = isinstance(content, dict) and content.get("role") == "assistant"
        response = content.get("id") if is_answer else None
        messages = parse_message(content) if content is not None else []
        parent = None if is_empty(fields.get("parent")) else str(fields["parent"])
        node = _Node(parent, None if response is None else str(response), messages)
        if nodes.setdefault(str(fields.get("id")), node) != node:
            raise RecordError("two rows have the same id and different contents")
    trees: dict[str, tuple[list[str], set[str]]] = {}  # by root: all nodes, and the last one's path
    for name in nodes:
        path = [name]
        while (parent := nodes[path[-1]].parent) is not None:
            if parent not in nodes or len(path) > len(nodes):
                raise RecordError("the parent of a row is not in the log")
            path.append(parent)
        names = trees[path[-1]][0] if path[-1] in trees else []
        trees[path[-1]] = [*names, name], {*path}
    for names, kept in trees.values():
        # Calls of one response are several rows, and results follow the row of their call.
        responses = {nodes[name].response for name in kept} - {None}
        kept |= {name for name in names if nodes[name].response in responses}
        kept |= {name for name in names if nodes[name].parent in kept and _is_result(nodes[name])}
        yield _merge_answers(nodes[name] for name in names if name in kept)


def _is_result(node: _Node) -> bool:
    return bool(node.messages) and all(message["role"] == "tool" for message in node.messages)


def _merge_answers(nodes: Iterable[_Node]) -> list[Message]:
    """Returns the messages of rows. Those of one response are one answer."""
    messages: list[Message] = []
    answers: dict[str | None, Message] = {}
    for node in nodes:
        answer = answers.get(node.response)
        if not node.messages or answer is None:
            messages += node.messages
            if node.messages and node.response is not None:
                answers[node.response] = messages[-1]
        else:
            for key, value in node.messages[0].items():
                answer[key] = answer[key] + value if key in answer and key != "role" else value
    return messages
