"""Input files: each format, each compression, and the errors for files of no known format."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import read_sample
from ngram_npu_cli import command as cli
from ngram_npu_cli.logs import files as files_module
from ngram_npu_cli.logs.chat_template import render_turns
from ngram_npu_cli.logs.formats import FORMATS
from ngram_npu_cli.replay import (
    Conversation,
    InputError,
    ReplayInput,
    ReplayOptions,
    ReplayTokenizer,
    Turn,
    load_inputs,
    read_conversations,
    replay,
)
from ngram_npu_cli.tune import TuneOptions
from ngram_npu_cli.tune.traffic import read_traffic

Write = Callable[..., Path]

CHAT = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": [{"type": "text", "text": "Two primes?"}, {"type": "image_url"}]},
    {"role": "assistant", "content": "2 and 3."},
    {"role": "user", "content": "Two more?"},
    {"role": "assistant", "content": "5 and 7."},
]
CHAT_TEXTS = [
    ("You are terse. USER: Two primes? ASSISTANT:", "2 and 3."),
    ("USER: Two more? ASSISTANT:", "5 and 7."),
]
SHARED = [
    {"from": "system", "value": "You are terse."},
    {"from": "human", "value": "Two primes?"},
    {"from": "gpt", "value": "2 and 3."},
    {"from": "human", "value": "Two more?"},
    {"from": "gpt", "value": "5 and 7."},
]
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n</tool_call>'
FUNCTION = {"name": "find", "arguments": '{"city": "Oslo"}'}
CALLS = [{"id": "call_1", "type": "function", "function": FUNCTION}]
CALLED = {"role": "assistant", "content": None, "tool_calls": CALLS}
AGENT = [
    {"role": "user", "content": "Weather in Oslo?"},
    CALLED,
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "It rains.", "reasoning_content": "The tool says rain."},
]
AGENT_TEXTS = [
    ("USER: Weather in Oslo? ASSISTANT:", CALL),
    ("TOOL: rain ASSISTANT:", "<think>\nThe tool says rain.\n</think>\n\nIt rains."),
]
NINE = {"role": "assistant", "content": "9."}
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": NINE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2},
}
ASKED = {"model": "m", "temperature": 0, "messages": [*CHAT, {"role": "user", "content": "More?"}]}
LOGGED = [
    (
        "You are terse. USER: Two primes? ASSISTANT: 2 and 3. USER: Two more? ASSISTANT: 5 and 7. "
        "USER: More? ASSISTANT:",
        "9.",
    )
]
TOOLS = [{"type": "function", "function": {"name": "find"}}]
STREAM = [
    {"choices": [{"delta": {"role": "assistant", "content": "9"}}]},
    {"choices": [{"delta": {"content": "."}}]},
    {"choices": [], "usage": {}},
]
KIND = {"system": "Be kind.", "messages": [{"role": "user", "content": "Find."}]}
FOUND = [
    {"type": "text", "text": "Well."},
    {"type": "tool_use", "name": "find", "input": {"city": "Oslo"}},
]

RECORDS: list[tuple[str, object, list[tuple[str, str]]]] = [
    ("turns", {"turns": [{"prompt": "Hi", "completion": "Ho"}]}, [("USER: Hi ASSISTANT:", "Ho")]),
    ("messages", {"messages": CHAT}, CHAT_TEXTS),
    ("messages", {"conversation_id": "ab", "model": "vicuna", "conversation": CHAT}, CHAT_TEXTS),
    ("messages", CHAT, CHAT_TEXTS),
    ("messages", {"messages": AGENT}, AGENT_TEXTS),
    (
        "messages",
        {"messages": AGENT, "tools": TOOLS},
        [(f"{json.dumps(TOOLS)} {AGENT_TEXTS[0][0]}", CALL), AGENT_TEXTS[1]],
    ),
    ("log", {"request": ASKED, "response": COMPLETION}, LOGGED),
    ("log", {"request": json.dumps(ASKED), "response": json.dumps(COMPLETION)}, LOGGED),
    ("log", {"request": {"body": ASKED}, "response": {"status": 200, "body": COMPLETION}}, LOGGED),
    ("log", {**COMPLETION, "messages": ASKED["messages"]}, LOGGED),
    ("log", {"messages": ASKED["messages"], "response": COMPLETION}, LOGGED),
    ("log", {"request": ASKED, "response": STREAM}, LOGGED),
    (
        "log",
        {"request": KIND, "response": {"role": "assistant", "content": FOUND}},
        [("Be kind. USER: Find. ASSISTANT:", f"Well.\n{CALL}")],
    ),
    ("log", {"messages": ASKED["messages"], "response": "9."}, LOGGED),
    ("log", {"request": ASKED, "response": {"content": "9.", "stop": True}}, LOGGED),
    (
        "log",
        {
            "request": ASKED,
            "response": 'data: {"content": "9", "stop": false}\n\ndata: {"content": "."}\n\n',
        },
        LOGGED,
    ),
    ("log", {"messages": ASKED["messages"], "output": "9.", "model": "m"}, LOGGED),
    ("log", {"request": "Hi", "response": "Ho"}, [("USER: Hi ASSISTANT:", "Ho")]),
    (
        "log",
        {"request": {"prompt": "[INST] Hi [/INST]"}, "response": {"choices": [{"text": " Ho"}]}},
        [("[INST] Hi [/INST]", " Ho")],
    ),
    ("sharegpt", {"id": "QWJhYvA_0", "conversations": SHARED}, CHAT_TEXTS),
    ("sharegpt", {"conversations": CHAT}, CHAT_TEXTS),
    ("pairs", {"prompt": "Hi", "completion": "Ho"}, [("USER: Hi ASSISTANT:", "Ho")]),
    ("pairs", {"prompt": "Hi", "response": "Ho", "score": 1}, [("USER: Hi ASSISTANT:", "Ho")]),
    ("pairs", {"prompt": "Hi", "output": "Ho"}, [("USER: Hi ASSISTANT:", "Ho")]),
    ("pairs", {"prompt": CHAT[:2], "completion": CHAT[2:3]}, CHAT_TEXTS[:1]),
]


def plain(conversations: list[Conversation]) -> list[tuple[str, str]]:
    return [turn for item in conversations for part in render_turns(item, None) for turn in part]


@pytest.mark.parametrize(("name", "record", "expected"), RECORDS, ids=range(len(RECORDS)))
@pytest.mark.parametrize("form", ["lines", "array", "pretty", "insisted"])
def test_format_is_detected_from_content(
    tmp_path: Path, name: str, record: Any, expected: list[tuple[str, str]], form: str
) -> None:
    path = tmp_path / "traffic.json"
    records = [record, record]
    if form == "array":
        path.write_text(json.dumps(records))
    elif form == "pretty":
        path.write_text("\n" + json.dumps(records, indent=2) + "\n")
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    conversations = read_conversations(path, format_name=name if form == "insisted" else None)
    assert plain(conversations) == expected * 2


@pytest.mark.parametrize(
    "record",
    [
        {"system": "You are terse.", "messages": CHAT[1:]},
        {"system": [{"type": "text", "text": "You are terse."}], "messages": CHAT[1:]},
        {"instructions": "You are terse.", "conversation": CHAT[1:]},
        {"system": "You are terse.", "conversations": SHARED[1:]},
        {"system": "You are terse.", "prompt": CHAT[1:2], "completion": CHAT[2:]},
        {"system": "You are terse.", "messages": CHAT},  # some records have it twice
    ],
)
def test_separate_system_text_is_part_of_the_prompt(
    write_jsonl: Write, record: dict[str, Any]
) -> None:
    assert plain(read_conversations(write_jsonl(record))) == CHAT_TEXTS


def test_tools_as_json_text_are_part_of_the_prompt(write_jsonl: Write) -> None:
    record = {"messages": AGENT, "tools": json.dumps(TOOLS)}
    prompt = f"{json.dumps(TOOLS)} {AGENT_TEXTS[0][0]}"
    assert plain(read_conversations(write_jsonl(record)))[0] == (prompt, CALL)
    with pytest.raises(InputError, match=":1: tools must be an array, got a string"):
        read_conversations(write_jsonl({"messages": AGENT, "tools": "find"}))


def test_array_of_messages_is_one_conversation_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([*CHAT[:2], None, *CHAT[2:]]))
    with pytest.raises(InputError, match=r":1: messages\[2\] must be an object, got null"):
        read_conversations(path)
    # Records that have a role are records, wherever they stand.
    records = [{"prompt": "Hi", "completion": "Ho"}, {"role": "user", "content": "x"}] * 2
    path.write_text(json.dumps([*records, records[0]], indent=1))
    (item,) = load_inputs([path])
    assert [conversation.turns[0].completion for conversation in item.conversations] == ["Ho"] * 3
    assert item.notes[0].startswith("2 of 5 records are skipped (40.0%): ")


@pytest.mark.parametrize(
    "value", ["[" * 3000 + '"]"' + "]" * 3000, "9" * 5000], ids=["deep", "long"]
)
def test_line_that_python_cannot_parse_is_skipped(tmp_path: Path, value: str) -> None:
    path = tmp_path / "talk.json"
    records = [{"prompt": f"]{i}", "completion": "Ho", "more": i} for i in range(3)]
    path.write_text(json.dumps(records).replace('"more": 1', f'"more": {value}'))
    with pytest.raises(InputError, match=":1: not JSON that can be read"):
        load_inputs([path])
    path.write_text(f'{{"prompt": {value}}}\nx\n' + "".join(json.dumps(r) + "\n" for r in records))
    (item,) = load_inputs([path])
    assert len(item.conversations) == 3
    assert item.notes[0].startswith("2 of 5 records are skipped (40.0%): ")


def test_file_may_contain_a_single_value(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    for indent in (None, 2):
        for value in ({"messages": CHAT}, CHAT):
            path.write_text(json.dumps(value, indent=indent))
            assert plain(read_conversations(path)) == CHAT_TEXTS


def test_log_reads_each_choice_as_a_conversation(
    write_jsonl: Write,
) -> None:
    two = [{"message": {"role": "assistant", "content": text}} for text in ("9.", "13.")]
    conversations = read_conversations(
        write_jsonl({"request": ASKED, "response": {"choices": two}})
    )
    assert [len(item.turns) for item in conversations] == [1, 1]
    assert [item.turns[0].completion for item in conversations] == ["9.", "13."]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": CHAT[:2]}, r'no message of the role "assistant" \(roles: system, user\)'),
        ({"messages": [{"role": "user"}, 3]}, r"messages\[1\] must be an object, got the number 3"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role must be a string, got null"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content must be a string"),
        ({"messages": "hello"}, '"messages" must be an array, got a string'),
        ({"conversations": ["hello"]}, r"conversations\[0\] must be an object, got a string"),
        ({"request": ASKED, "response": 500}, "response must be an object, got the number 500"),
        ({"request": ASKED, "response": {"error": "busy"}}, "the response is an error: busy"),
        ({"request": ASKED, "response": {"choices": [{}]}}, "the answer is empty"),
        (
            {"request": {"model": "x"}, "response": COMPLETION},
            'must have "messages", "input" or a text "prompt"',
        ),
        ({"prompt": 3, "completion": "x"}, "prompt must be a string, got the number 3"),
        ({"question": "x", "answer": "y"}, 'no format has these keys: "question", "answer"'),
        (["a", "b"], "expected an object, got an array"),
    ],
)
def test_error_names_line_and_value_and_a_working_example(
    write_jsonl: Write, record: object, message: str
) -> None:
    path = write_jsonl({"prompt": "a", "completion": "b"}, record)
    with pytest.raises(InputError, match=message) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    if isinstance(record, dict):
        # The example in the message is valid.
        example = str(caught.value).partition("works: ")[2] or str(caught.value)
        example = example.partition("this would work: ")[2].partition(" or ")[0] or example
        assert read_conversations(write_jsonl(json.loads(example)))


def test_help_lists_all_formats(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["replay", "--help"])
    listed = capsys.readouterr().out.replace("\n", "").partition("--format {")[2].partition("}")[0]
    assert set(FORMATS) <= set(listed.split(","))


def test_format_option_rejects_other_formats(write_jsonl: Write) -> None:
    path = write_jsonl({"prompt": "a", "completion": "b"})
    with pytest.raises(InputError, match=r':1: missing key "messages"; read as messages, of wh'):
        read_conversations(path, format_name="messages")


# Files


def test_stdin_is_read_compressed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps({"messages": CHAT}).encode()
    for content in (raw, gzip.compress(raw)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        (item,) = load_inputs(["-"])
        assert item.name == "stdin"
        assert item.conversations[0].where == "stdin:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"prompt": "a", "completion": "b"},\n{"prompt" "c"}\n]', ":3: not JSON: Exp"),
        ('[{"prompt": "a", "completion": "b"}\n{}]', ":2: not JSON: Expecting , or ] after"),
        ('[{"prompt": "a", "completion": "b"}]\n{}', ":2: not JSON: Extra data"),
        ('[\n{"prompt": "a",\n"completion": "b"}', ":3: not JSON: Expecting , or ]"),
        ('[\n{"prompt": "a",\n"comp', ":3: not JSON: "),
        ('{\n"prompt": "a",\n"completion": 3\n}', ":1: completion must be a string, got the nu"),
        ("[]", "empty, no conversation"),
        ("[\n\n3]", ":3: expected an object, got the number 3"),
    ],
)
def test_document_error_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "traffic.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_conversations(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("indent", [None, 1])
def test_document_may_be_longer_than_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    monkeypatch.setattr(files_module, "_MAX_LINE_MIB", 1)
    records = [{"id": i, "prompt": "ü€" * 3000, "completion": "b" * i} for i in range(200)]
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8")
    conversations = read_conversations(path)
    assert [item.turns[0].completion for item in conversations] == ["b" * i for i in range(200)]
    monkeypatch.setattr(files_module, "_MAX_DOCUMENT_MIB", 2)
    with pytest.raises(InputError, match="longer than 2 MiB; write one record per line"):
        read_conversations(path)


# Chat templates

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[str], Any]:
    pytest.importorskip("jinja2")

    def load(source: str) -> Any:
        from ngram_npu_cli.logs.chat_template import load_chat_template

        settings = {"chat_template": source, "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_chat_template(tmp_path)

    return load


def test_template_of_a_folder_is_rendered(
    write_jsonl: Write, with_template: Callable[[str], Any]
) -> None:
    template = with_template("{{ bos_token }}" + CHATML)
    (item,) = read_conversations(write_jsonl({"messages": AGENT[:3] + CHAT[3:]}))
    (turns,) = render_turns(item, template)
    assert turns == [
        (
            "<s><|im_start|>user\nWeather in Oslo?<|im_end|>\n<|im_start|>assistant\n",
            '{"city": "Oslo"}<|im_end|>',
        ),
        (
            "\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>user\nTwo more?<|im_end|>\n"
            "<|im_start|>assistant\n",
            "5 and 7.<|im_end|>",
        ),
    ]


def test_template_that_changes_earlier_turns_makes_separate_requests(
    write_jsonl: Write, with_template: Callable[[str], Any]
) -> None:
    template = with_template(
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.content }}]{% endif %}"
        "{% endfor %}"
    )
    (item,) = read_conversations(write_jsonl({"messages": CHAT}))
    assert render_turns(item, template) == [
        [("[Two primes?]", "[2 and 3.]")],
        [("[Two primes?][Two more?]", "[5 and 7.]")],
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "its chat template cannot be used: Expected an expression"),
        ("{{ raise_exception('system role!') }}", "refuses this conversation: system role!"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_failing_template_is_an_input_error(
    write_jsonl: Write, with_template: Callable[[str], Any], source: str, message: str
) -> None:
    (item,) = read_conversations(write_jsonl({"messages": CHAT}))
    with pytest.raises(InputError, match=message):
        render_turns(item, with_template(source))


EVERY_COMMAND: list[Callable[..., Any]] = [
    lambda paths, **more: load_and_replay(paths, **more),
    lambda paths, tokenizer, **more: (
        read_traffic(paths, TuneOptions(tokenizer=tokenizer, **more)).notes
    ),
    lambda paths, tokenizer, **more: read_sample(paths, tokenizer, **more).notes,
]


def load_and_replay(paths: list[Path], tokenizer: str, **more: Any) -> list[str]:
    inputs = replay(paths, ReplayOptions(tokenizer=tokenizer, **more)).inputs
    return [f"{figures.name}: {note}" for figures in inputs for note in figures.notes]


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=["replay", "tune", "learn"])
def test_conversation_refused_by_the_template_is_skipped(
    write_jsonl: Write, tmp_path: Path, with_template: Callable[[str], Any], command: Any
) -> None:
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    with_template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role!') }}{% endif %}"
        + CHATML
    )
    model = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    good, refused = {"messages": CHAT[1:]}, {"messages": CHAT}
    path = write_jsonl(good, refused, good, good, name="logs/talk.jsonl")
    (note,) = command([path], tokenizer=str(tmp_path))
    reason = f"{path}:2: {tmp_path}: its chat template refuses this conversation: no system role!"
    assert note.startswith(f"talk: 1 of 4 conversations are skipped (25.0%): {reason}"[:150])
    with pytest.raises(InputError, match=re.escape(reason)):
        command([path], tokenizer=str(tmp_path), strict=True)
    path = write_jsonl(good, refused, refused, name="logs/talk.jsonl")
    with pytest.raises(InputError, match=rf"{re.escape(reason)}.*; 2 of 3 conv.* more than half"):
        command([path], tokenizer=str(tmp_path))


def test_tool_call_without_arguments_has_an_empty_object(
    write_jsonl: Write, with_template: Callable[[str], Any]
) -> None:
    template = with_template(
        "{% for m in messages %}[{{ m.content }}{% for c in m.tool_calls %}"
        "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}"
        "{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
    )
    for arguments in ("", None, {}, "{}"):
        function = {"name": "find", "arguments": arguments}
        called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        record = {"messages": [{"role": "user", "content": "Hi"}, called]}
        (item,) = read_conversations(write_jsonl(record))
        assert render_turns(item, template) == [[("[Hi]", "[{}]")]]
        assert item.turns[0].completion == CALL.replace('{"city": "Oslo"}', "{}")


def test_template_without_jinja2_names_the_package(
    with_template: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(InputError, match="pip install jinja2, or choose --chat-template default"):
        with_template("{{ messages }}")


def test_template_none_uses_texts_unchanged(write_jsonl: Write) -> None:
    (item,) = read_conversations(write_jsonl({"prompt": "[INST] a", "completion": "b"}))
    assert render_turns(item, None, as_is=True) == [[("[INST] a", "b")]]


@pytest.mark.parametrize(
    ("choice", "prompt"),
    [
        ("auto", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("default", "USER: Hi ASSISTANT:"),
        ("none", "Hi"),
    ],
)
def test_replay_uses_the_template_of_the_tokenizer_folder(
    tmp_path: Path, with_template: Callable[[str], Any], choice: Any, prompt: str
) -> None:
    with_template(CHATML)  # writes it into the folder
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return list(text.encode())

    conversation = Conversation("a", (Turn("Hi", "Ho"),))
    replay(
        inputs=[ReplayInput("in", (conversation,))],
        options=ReplayOptions(chat_template=choice),
        tokenizer=ReplayTokenizer("fake", "made up", None, encode, tmp_path),
    )
    assert seen == [prompt, "Ho<|im_end|>" if choice == "auto" else "Ho"]
