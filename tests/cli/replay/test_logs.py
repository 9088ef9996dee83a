"""Logs of servers: each format gives the same counts as the plain conversation."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import DATA
from ngram_npu_cli.logs.chat_template import render_turns
from ngram_npu_cli.replay import (
    InputError,
    ReplayOptions,
    load_inputs,
    read_conversations,
    replay,
)

Write = Callable[..., Path]


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").split("\n")[:-1]]


def counts(path: Path) -> tuple[int, int, int, float | None]:
    total = replay([path], ReplayOptions(tokenizer="bytes")).total
    return total.num_requests, total.num_tokens, total.num_steps, total.tokens_per_step


def plain(answers: list[Any], file: str = "chat.jsonl") -> list[dict[str, Any]]:
    """Returns each request of a file with its answer as plain text, or as a message."""
    return [
        {"messages": record["request"]["messages"], "completion": answer}
        for record, answer in zip(records(file), answers, strict=False)
    ]


CHAT = [r["response"]["choices"][0]["message"]["content"] for r in records("chat.jsonl")]


@pytest.fixture
def plain_chat(write_jsonl: Write) -> tuple[int, int, int, float | None]:
    counted = counts(write_jsonl(*plain(CHAT), name="plain/talk.jsonl"))
    assert counted[0] == 3
    assert counted[3] is not None
    assert counted[3] > 2, "the texts repeat themselves, or this would show nothing"
    return counted


ONE_CONVERSATION = [
    "chat.jsonl",
    "stream.jsonl",
    "responses.jsonl",
    "responses-stream.jsonl",
    "anthropic.jsonl",
    "anthropic-stream.jsonl",
]


@pytest.mark.parametrize("name", [*ONE_CONVERSATION, "run-batch/output.jsonl"])
def test_all_log_formats_give_the_same_counts(
    name: str, plain_chat: tuple[int, int, int, float | None]
) -> None:
    assert counts(DATA / name) == plain_chat


def test_guide_states_the_counts() -> None:
    pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
    pytest.importorskip("sentencepiece", reason="needs the extra ngram-npu[replay]")
    files = [DATA / name for name in (*ONE_CONVERSATION, "run-batch/output.jsonl")]
    report = replay(files, ReplayOptions(tokenizer="mistral-v1"))
    rows = {(f.num_requests, f.num_tokens, f"{f.tokens_per_step:.2f}") for f in report.inputs}
    ((requests, tokens, per_step),) = rows
    guide = Path(__file__).parents[3] / "docs/guides/replay.md"
    stated = f"{requests} requests, {tokens} tokens and {per_step} tokens per step"
    assert stated in guide.read_text(encoding="utf-8").replace("\n", " ")


def events(name: str) -> list[list[dict[str, Any]]]:
    """Returns the events of each stream of a file."""
    return [
        [
            json.loads(line[6:])
            for line in record["response"].split("\n")
            if line.startswith("data: {")
        ]
        for record in records(name)
        if isinstance(record["response"], str)
    ]


@pytest.mark.parametrize("name", [name for name in ONE_CONVERSATION if "stream" in name])
@pytest.mark.parametrize(
    "serialize",
    [
        lambda chunks, text: chunks,
        lambda chunks, text: json.dumps(chunks),
        lambda chunks, text: "".join(json.dumps(chunk) + "\n" for chunk in chunks),
        lambda chunks, text: text.replace("\n", "\r\n"),
        lambda chunks, text: {"status": 200, "body": text},
        lambda chunks, text: ": ping\n\n" + text + ": ping\n\nid: 7\nretry: 10\n",
        # The client left: the last event is cut, or an error follows.
        lambda chunks, text: text.replace("data: [DONE]", 'data: {"choi'),
        lambda chunks, text: text + 'event: error\ndata: {"error": {"message": "no worker"}}\n\n',
    ],
    ids=range(8),
)
def test_stream_is_read_in_every_serialization(
    write_jsonl: Write,
    name: str,
    serialize: Callable[[list[dict[str, Any]], str], Any],
    plain_chat: tuple[int, int, int, float | None],
) -> None:
    serialized = [
        {"request": record["request"], "response": serialize(chunks, record["response"])}
        for record, chunks in zip(records(name), events(name), strict=True)
    ]
    assert counts(write_jsonl(*serialized)) == plain_chat


def test_text_that_resembles_a_stream_is_text(write_jsonl: Write) -> None:
    answers = [
        "data: 3\n\ndata: 4",
        '{"city": "Oslo"}',
        "data: {\nan answer about YAML",
        "[1, 2]",
        "7",
    ]
    path = write_jsonl(*({"request": "Hi", "response": text} for text in answers))
    assert [item.turns[0].completion for item in read_conversations(path)] == answers


@pytest.mark.parametrize("last", ["response.completed", "response.output_item.done"])
def test_responses_stream_is_read_from_any_kind_of_event(
    write_jsonl: Write, last: str, plain_chat: tuple[int, int, int, float | None]
) -> None:
    """Parts, the complete response at the end, or deltas of a truncated stream are sufficient."""
    streams = events("responses-stream.jsonl")
    for kept in (
        lambda event: event["type"] == last,
        lambda event: event["type"].endswith(".delta") or event["type"].endswith("item.added"),
        lambda event: event["type"].endswith(".delta"),
    ):
        selected = [
            {"request": record["request"], "response": [e for e in stream if kept(e)]}
            for record, stream in zip(records("responses-stream.jsonl"), streams, strict=True)
        ]
        assert counts(write_jsonl(*selected)) == plain_chat


def test_u2028_does_not_end_lines_or_events(write_jsonl: Write, tmp_path: Path) -> None:
    text = "one\u2028two one\u2028two \u0085 one"
    delta = {"choices": [{"delta": {"content": text}}]}
    event = f"data: {json.dumps(delta, ensure_ascii=False)}\n\ndata: [DONE]\n\n"
    path = tmp_path / "talk.jsonl"
    record = {"request": {"messages": [{"role": "user", "content": text}]}, "response": event}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    (conversation,) = read_conversations(path)
    assert conversation.turns[0].completion == text


# Answers that are more than text


def test_streamed_tool_call_equals_the_generated_text(write_jsonl: Write) -> None:
    complete, streamed = records("tool-call.jsonl")
    content = complete["response"]["choices"][0]["message"]["content"]
    arguments = content.partition('"arguments": ')[2]  # cut by max_tokens: it stayed text
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "find_name", "arguments": arguments}}],
    }
    expected = {**streamed["request"], "messages": [*streamed["request"]["messages"], called]}
    assert len(arguments) > 30
    assert counts(write_jsonl(streamed)) == counts(write_jsonl(expected, name="plain.jsonl"))


@pytest.mark.parametrize("index", [{}, {"index": None}, {"index": 0}], ids=["none", "null", "0"])
@pytest.mark.parametrize("together", [False, True], ids=["chunks", "one chunk"])
def test_parallel_tool_calls_with_equal_index_are_separated_by_id(
    write_jsonl: Write, index: dict[str, Any], together: bool
) -> None:
    """Gemini and some versions of vLLM and of Dynamo stream calls like this."""

    def piece(ident: str | None, **function: str) -> dict[str, Any]:
        return {**index, "id": ident, "function": function}

    pieces = [
        piece("a", name="find", arguments='{"a"'),
        piece(None, arguments=": 1"),
        piece("a", arguments="}"),
        piece("b", name="find", arguments=""),
        piece("", arguments='{"b": 2}'),
        piece("c", name="close", arguments="{}"),
    ]
    chunks = [pieces] if together else [[one] for one in pieces]
    response = [{"choices": [{"delta": {"tool_calls": calls}}]} for calls in chunks]
    (conversation,) = read_conversations(write_jsonl({"request": "Hi", "response": response}))
    assert conversation.turns[0].completion == "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in (("find", '{"a": 1}'), ("find", '{"b": 2}'), ("close", "{}"))
    )


def test_tool_call_pieces_may_differ_in_index_and_repeat_the_name(
    write_jsonl: Write,
) -> None:
    expected = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
    first = {"index": 0, "id": "a", "function": {"name": "find", "arguments": '{"a": '}}
    for second in (
        {"index": 1, "function": {"arguments": "1}"}},
        {"index": 0, "function": {"name": "find", "arguments": "1}"}},
        {"index": 0, "id": "b", "function": {"arguments": "1}"}},
    ):
        response = [{"choices": [{"delta": {"tool_calls": [call]}}]} for call in (first, second)]
        (conversation,) = read_conversations(write_jsonl({"request": "Hi", "response": response}))
        assert conversation.turns[0].completion == expected


@pytest.mark.parametrize(
    "name", ["reasoning.jsonl", "responses-reasoning.jsonl", "anthropic-thinking.jsonl"]
)
def test_reasoning_is_counted_streamed_or_not(write_jsonl: Write, name: str) -> None:
    complete, streamed = records(name)
    thought = records("reasoning.jsonl")[0]["response"]["choices"][0]["message"]["reasoning"]
    messages = records("reasoning.jsonl")[0]["request"]["messages"]
    expected_records = [{"messages": messages, "completion": f"<think>\n{thought}\n</think>\n\n"}]
    expected = counts(write_jsonl(*expected_records, name="plain.jsonl"))
    for record in (complete, streamed):
        assert counts(write_jsonl(record)) == expected


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_removed_from_later_turns(write_jsonl: Write, key: str) -> None:
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", key: "so"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    (item,) = read_conversations(write_jsonl({"messages": talk}))
    assert render_turns(item, None) == [
        [("USER: a ASSISTANT:", "<think>\nso\n</think>\n\nb")],
        [("USER: a ASSISTANT:bUSER: c ASSISTANT:", "d"), ("USER: e ASSISTANT:", "f")],
    ]
    # A client that sends it back, as some do: a log's request has it too.
    request = {"messages": talk[:3]}
    (item,) = read_conversations(write_jsonl({"request": request, "response": "d"}))
    assert render_turns(item, None) == [[("USER: a ASSISTANT: b USER: c ASSISTANT:", "d")]]


def test_template_that_omits_reasoning_keeps_generated_text(write_jsonl: Write) -> None:
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "so"},
    ]
    (item,) = read_conversations(write_jsonl({"messages": talk}))

    def template(messages: Any, tools: Any, answering: bool) -> str:
        opened = "<think>\n" if answering else ""
        return "".join(f"[{m['content']}]" for m in messages) + opened

    (((prompt, answer),),) = render_turns(item, template)
    assert (prompt, answer) == ("[a]<think>\n", "so\n</think>\n\nb")


@pytest.mark.parametrize("name", ["chat-n2.jsonl", "stream-n2.jsonl"])
def test_each_answer_is_a_conversation(write_jsonl: Write, name: str) -> None:
    (record,) = records("chat-n2.jsonl")
    answers = [choice["message"]["content"] for choice in record["response"]["choices"]]
    assert answers[0] != answers[1]
    messages = record["request"]["messages"]
    path = write_jsonl(*({"messages": messages, "completion": text} for text in answers))
    assert counts(DATA / name) == counts(path)


@pytest.mark.parametrize("index", [{}, {"index": None}], ids=["none", "null"])
def test_choices_without_index_are_separate_answers(
    write_jsonl: Write, index: dict[str, Any]
) -> None:
    choices = [{**index, "message": {"role": "assistant", "content": text}} for text in "ab"]
    record = {"request": "Hi", "response": {"choices": choices}}
    assert [
        conversation.turns[0].completion for conversation in read_conversations(write_jsonl(record))
    ] == ["a", "b"]
    chunks = [{"choices": [{"index": 0, "text": "a"}]}, {"choices": [{"index": 1, "text": "b"}]}]
    chunks.append({"choices": [{**index, "text": "c"}]})
    path = write_jsonl({"request": "Hi", "response": chunks})
    with pytest.raises(InputError, match=r"jsonl:1: .* some choices of the stream have an index"):
        read_conversations(path)


# Prompts that a server repeats, and several prompts


def echoed(form: str) -> dict[str, Any]:
    prompt, answer = "say it: one two one two", ", one two one two one two"
    ids = {"prompt_token_ids": [*prompt.encode()], "token_ids": [*(prompt + answer).encode()]}
    request: dict[str, Any] = {"prompt": prompt, "echo": True}
    chunks: list[dict[str, Any]] = [{"index": 0, "text": prompt + answer}]
    if form == "stream":
        chunks = [
            {"index": 0, "text": text} for text in (prompt[:9], prompt[9:] + answer[:4], answer[4:])
        ]
    elif form == "ids":
        chunks = [{"index": 0, "text": prompt + answer, **ids}]
    elif form == "ids without the prompt":  # as vLLM gives them
        chunks = [{"index": 0, "text": answer, **ids, "token_ids": [*answer.encode()]}]
    elif form == "several prompts":
        request["prompt"] = ["x", prompt]
        chunks = [{"index": 0, "text": "x"}, {"index": 1, "text": prompt + answer}]
    elif form == "ignored":
        chunks = [{"index": 0, "text": answer}]
    bodies = [{"choices": [chunk]} for chunk in chunks]
    complete = {"choices": chunks}
    return {"request": request, "response": bodies if form == "stream" else complete}


@pytest.mark.parametrize(
    "form",
    ["whole", "stream", "ids", "ids without the prompt", "several prompts", "ignored"],
)
def test_echoed_prompt_is_removed_from_the_answer(write_jsonl: Write, form: str) -> None:
    plain_record = {
        **echoed("ignored"),
        "request": {"prompt": echoed("whole")["request"]["prompt"]},
    }
    expected = counts(write_jsonl(plain_record, name="plain.jsonl"))
    assert counts(write_jsonl(echoed(form))) == expected
    not_asked = echoed("whole")
    not_asked["request"]["echo"] = False
    assert counts(write_jsonl(not_asked)) != expected


def test_chat_echo_removes_the_continued_message(write_jsonl: Write) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    record = {"request": {"messages": messages, "echo": True}, "response": "b c d"}
    (conversation,) = read_conversations(write_jsonl(record))
    assert conversation.turns[0].completion == " d"


def test_echo_without_generated_text_is_an_error(write_jsonl: Write) -> None:
    record = {
        "request": {"prompt": "a", "echo": True, "max_tokens": 0},
        "response": {"choices": [{"text": "a"}]},
    }
    with pytest.raises(InputError, match=r"jsonl:1: response: the answer is empty without"):
        read_conversations(write_jsonl(record))


def test_empty_answer_keeps_other_answers_at_their_prompts(write_jsonl: Write) -> None:
    texts_of = ["", "b", "c", ""]
    choices = [{"index": i, "text": text} for i, text in enumerate(texts_of)]
    record = {"request": {"prompt": ["p", "q"], "n": 2}, "response": {"choices": choices}}
    turns = [item.turns[0] for item in read_conversations(write_jsonl(record))]
    assert [(turn.prompt, turn.completion) for turn in turns] == [("p", "b"), ("q", "c")]
    record["response"]["choices"] = choices[:3]
    with pytest.raises(InputError, match=r"expected 2 choices for each of 2 prompts.* 0, 1, 2"):
        read_conversations(write_jsonl(record))


# Token ids


def test_stream_with_missing_token_ids_is_read_as_text(write_jsonl: Write) -> None:
    pieces = [("one ", [1]), ("two ", None), ("", [2])]
    chunks = [{"choices": [{"text": text, "token_ids": ids}]} for text, ids in pieces]
    chunks[0]["prompt_token_ids"] = [5]
    (conversation,) = read_conversations(
        write_jsonl({"request": {"prompt": "p"}, "response": chunks})
    )
    assert not conversation.has_token_ids
    assert (conversation.turns[0].prompt, conversation.turns[0].completion) == ("p", "one two ")


def as_turns(name: str) -> list[dict[str, Any]]:
    return [
        {
            "prompt_token_ids": record["response"]["prompt_token_ids"],
            "completion_token_ids": record["response"]["choices"][0]["token_ids"],
        }
        for record in records(name)
    ]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("chat-token-ids.jsonl", 3),
        ("stream-token-ids.jsonl", 1),
        ("completions-stream-token-ids.jsonl", 1),
        ("server-debug.log", 3),
    ],
)
def test_recorded_token_ids_are_exact(write_jsonl: Write, name: str, number: int) -> None:
    turns = as_turns("chat-token-ids.jsonl")[:number]
    expected = replay([write_jsonl(*({"turns": [turn]} for turn in turns))]).total
    report = replay([DATA / name], ReplayOptions(tokenizer="ids"))
    assert report.tokenizer is None
    assert report.total.num_steps == expected.num_steps
    assert report.total.num_tokens == expected.num_tokens == 23 * number
    assert report.total.tokens_per_step == expected.tokens_per_step


# vLLM's own log


def test_vllm_log_stream_is_read_as_text(write_jsonl: Write) -> None:
    request, answer = records("completions.jsonl")[0]["request"], CHAT[0]
    path = write_jsonl({"request": request, "response": {"choices": [{"text": answer}]}})
    assert counts(DATA / "server-debug-stream.log") == counts(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("server-info.log", r"the log has no prompt; vLLM writes .* VLLM_LOGGING_LEVEL=DEBUG"),
        ("server-completions.log", r"the log has no answer; vLLM logs none of /v1/completions"),
    ],
)
def test_vllm_log_error_names_the_missing_setting(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay([DATA / name], ReplayOptions(tokenizer="bytes"))


def test_log_of_older_vllm_is_read_among_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        "Loading weights: 100%\n"
        "\x1b[36m(APIServer pid=1)\x1b[0;0m INFO 08-01 12:00:00 [logger.py:43] Received request "
        "chatcmpl-1: prompt: 'it\\'s\\n', params: SamplingParams(n=1, seed=None), "
        "prompt_token_ids: [1, 2, 3], prompt_embeds shape: None, lora_request: None.\n"
        '(APIServer pid=1) INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        "Traceback (most recent call last):\n"
        'INFO 08-01 12:00:01 [logger.py:70] Generated response chatcmpl-1: output: "it\'s", '
        "output_token_ids: [1, 2, 4], finish_reason: stop\n"
    )
    (conversation,) = read_conversations(path)
    assert conversation.turns[0].prompt_token_ids == (1, 2, 3)
    assert conversation.turns[0].completion_token_ids == (1, 2, 4)
    path.write_text("INFO 08-01 12:00:00 [api_server.py:1] started\n")
    with pytest.raises(InputError, match="without requests: set --enable-log-requests"):
        read_conversations(path)


AT = "INFO 08-01 12:00:00 [logger.py:43] "


def server_log(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{AT}{line}\n" for line in lines))
    return path


def log_request(ident: str, prompt: str, ids: str, n: int = 1) -> str:
    params = f"SamplingParams(n={n}, seed=None)"
    return (
        f"Received request {ident}: prompt: {prompt!r}, params: {params}, prompt_token_ids: {ids}"
    )


def test_vllm_log_answers_have_separate_token_ids(tmp_path: Path) -> None:
    path = server_log(
        tmp_path / "server.log",
        log_request("r", "p", "[1, 2]", n=3),
        "Generated response r details: output_token_ids: [9], finish_reason: stop",
        "Generated response r details: output_token_ids: [3, 4], finish_reason: stop",
        "Generated response r: output: 'a', finish_reason: stop",
        "Generated response r: output: 'b', output_token_ids: [5, 6], finish_reason: stop",
        "Generated response r: output: 'c', finish_reason: stop",
    )
    turns = [item.turns[0] for item in read_conversations(path)]
    assert [turn.completion_token_ids for turn in turns] == [(3, 4), (5, 6), None]
    assert [turn.prompt_token_ids for turn in turns] == [(1, 2), (1, 2), None]
    assert (turns[2].prompt, turns[2].completion) == ("p", "c")


def test_vllm_log_streams_of_several_answers_have_no_token_ids(tmp_path: Path) -> None:
    path = server_log(
        tmp_path / "server.log",
        "Received request r: prompt: None, params: SamplingParams(n=2, seed=None), "
        "prompt_token_ids: [1, 2]",
        "Generated response r (streaming delta) details: output_token_ids: [3]",
        "Generated response r (streaming delta) details: output_token_ids: [5]",
        "Generated response r (streaming complete): output: 'a', finish_reason: stop",
        "Generated response r (streaming complete): output: 'b', finish_reason: stop",
    )
    with pytest.raises(InputError, match=r"server.log:4: .* or a text .prompt."):
        read_conversations(path)


def test_vllm_log_ignores_log_lines_within_texts(tmp_path: Path) -> None:
    quoted = f"{AT}Generated response r: output: 'stolen', output_token_ids: [9]"
    path = server_log(
        tmp_path / "server.log",
        log_request("r", f"{quoted} SamplingParams(n=7, token_ids: [8]", "[1, 2]"),
        f'Request 1 JSON body: {{"prompt": "{quoted}"}}',
        f'Request 1 JSON body: {{"prompt": "{log_request("r", "other", "[7]")}"}}',
        "Generated response r: output: 'token_ids: [9]', output_token_ids: [3, 4]",
    )
    (conversation,) = read_conversations(path)
    assert conversation.turns[0].prompt_token_ids == (1, 2)
    assert conversation.turns[0].completion_token_ids == (3, 4)


def test_vllm_log_requests_with_equal_ids_are_not_mixed(tmp_path: Path) -> None:
    answered = "Generated response r: output: 'a', output_token_ids: [3, 4]"
    later = [log_request("r", "p", "[1]"), answered, log_request("r", "q", "[2]"), answered]
    conversations = read_conversations(server_log(tmp_path / "server.log", *later))
    assert [item.turns[0].prompt_token_ids for item in conversations] == [(1,), (2,)]


def test_vllm_log_skips_damaged_lines(tmp_path: Path) -> None:
    path = server_log(
        tmp_path / "server.log",
        log_request("r", "p", "[1]"),
        log_request("s", "p", "[1 2]"),
        "Generated response r: output: '\\N{}', output_token_ids: [3, 4]",
        "Generated response r: output: 'a', output_token_ids: [3, 4]",
    )
    good = (
        log_request("t", "p", "[1]"),
        "Generated response t: output: 'a', output_token_ids: [3, 4]",
    )
    with path.open("a") as file:
        file.write("".join(f"{AT}{line}\n" for line in good * 2))
    (item,) = load_inputs([path])
    assert [conversation.turns[0].completion_token_ids for conversation in item.conversations] == [
        (3, 4)
    ] * 3
    assert "server.log:2: not a line of vLLM's log: invalid literal for int()" in item.notes[0]
    assert "server.log:3: not a line of vLLM's log: (unicode error)" in item.notes[0]


def test_batch_requests_with_equal_ids_are_an_error(write_jsonl: Write) -> None:
    """A folder may contain several batches if their requests have different ids."""

    def make_request(content: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": content}]}
        return {"custom_id": "r", "url": "/v1/chat/completions", "body": body}

    answer = {"custom_id": "r", "response": {"body": {"choices": [{"message": {"content": "a"}}]}}}
    path = write_jsonl(answer, name="output.jsonl")
    write_jsonl({"custom_id": ["r"]}, b"{", make_request("p"), name="input.jsonl")
    (path.parent / "tsconfig.json").write_text("{\n // not JSON\n}\n")
    (conversation,) = read_conversations(path)
    assert conversation.turns[0].messages[0]["content"] == "p"
    write_jsonl(make_request("q"), name="second.jsonl")
    again = path.rename(path.with_name("output2.jsonl"))
    with pytest.raises(InputError, match=r"output2.jsonl:1: several requests .* are 'r'"):
        read_conversations(again)


def test_batch_without_input_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "output.jsonl"
    path.write_bytes((DATA / "run-batch/output.jsonl").read_bytes())
    with pytest.raises(InputError, match="put the batch's input into the same folder"):
        read_conversations(path)
    piped = io.TextIOWrapper(io.BytesIO(path.read_bytes()))
    monkeypatch.setattr(sys, "stdin", piped)
    monkeypatch.chdir(DATA / "run-batch")
    with pytest.raises(InputError, match=r"stdin:1: .* pass the file, not a pipe"):
        read_conversations(Path("-"))
