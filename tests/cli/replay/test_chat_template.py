"""Chat templates: the model's and the default, and reasoning in them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import read_sample
from ngram_npu_cli.logs.chat_template import load_chat_template, render_turns
from ngram_npu_cli.replay import (
    Conversation,
    InputError,
    ReplayInput,
    ReplayOptions,
    ReplayTokenizer,
    Turn,
    read_conversations,
    replay,
)
from ngram_npu_cli.tune import TuneOptions
from ngram_npu_cli.tune.traffic import read_traffic

Write = Callable[..., Path]

CHAT = [
    {"role": "user", "content": "Two primes?"},
    {"role": "assistant", "content": "2 and 3."},
    {"role": "user", "content": "Two more?"},
    {"role": "assistant", "content": "5 and 7."},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def with_template(tmp_path: Path) -> Callable[[str], Any]:
    pytest.importorskip("jinja2")

    def load(source: str) -> Any:
        settings = {"chat_template": source, "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_chat_template(tmp_path)

    return load


def test_template_of_a_folder_is_rendered(
    write_jsonl: Write, with_template: Callable[[str], Any]
) -> None:
    template = with_template("{{ bos_token }}" + CHATML)
    function = {"name": "find", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    (item,) = read_conversations(write_jsonl({"messages": [*messages, *CHAT[2:]]}))
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
        ("{{ raise_exception('system role!') }}", "rejects this conversation: system role!"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_failing_template_is_an_input_error(
    write_jsonl: Write, with_template: Callable[[str], Any], source: str, message: str
) -> None:
    (item,) = read_conversations(write_jsonl({"messages": CHAT}))
    with pytest.raises(InputError, match=message):
        render_turns(item, with_template(source))


def load_and_replay(paths: list[Path], tokenizer: str, **more: Any) -> list[str]:
    inputs = replay(paths, ReplayOptions(tokenizer=tokenizer, **more)).inputs
    return [f"{figures.name}: {note}" for figures in inputs for note in figures.notes]


EVERY_COMMAND: list[Callable[..., Any]] = [
    load_and_replay,
    lambda paths, tokenizer, **more: (
        read_traffic(paths, TuneOptions(tokenizer=tokenizer, **more)).notes
    ),
    lambda paths, tokenizer, **more: read_sample(paths, tokenizer, **more).notes,
]


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=["replay", "tune", "learn"])
def test_conversation_refused_by_the_template_is_skipped(
    write_jsonl: Write, tmp_path: Path, with_template: Callable[[str], Any], command: Any
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    with_template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role!') }}{% endif %}"
        + CHATML
    )
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    good = {"messages": CHAT}
    refused = {"messages": [{"role": "system", "content": "You are terse."}, *CHAT]}
    path = write_jsonl(good, refused, good, good, name="logs/talk.jsonl")
    (note,) = command([path], tokenizer=str(tmp_path))
    reason = f"{path}:2: {tmp_path}: its chat template rejects this conversation: no system role!"
    assert note.startswith(f"talk: 1 of 4 conversations are skipped (25.0%): {reason}"[:150])
    with pytest.raises(InputError, match=re.escape(reason)):
        command([path], tokenizer=str(tmp_path), strict=True)
    path = write_jsonl(good, refused, refused, name="logs/talk.jsonl")
    with pytest.raises(InputError, match=rf"{re.escape(reason)}.*; 2 of 3 conv.* more than half"):
        command([path], tokenizer=str(tmp_path))


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_tool_call_without_arguments_has_an_empty_object(
    write_jsonl: Write, with_template: Callable[[str], Any], arguments: Any
) -> None:
    template = with_template(
        "{% for m in messages %}[{{ m.content }}{% for c in m.tool_calls %}"
        "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}"
        "{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
    )
    function = {"name": "find", "arguments": arguments}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    (item,) = read_conversations(write_jsonl({"messages": [CHAT[0], called]}))
    assert render_turns(item, template) == [[("[Two primes?]", "[{}]")]]
    assert '{"name": "find", "arguments": {}}' in str(item.turns[0].completion)


def test_template_without_jinja2_names_the_package(
    with_template: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(InputError, match="pip install jinja2, or choose --chat-template default"):
        with_template("{{ messages }}")


@pytest.mark.parametrize(
    ("choice", "prompt", "answer"),
    [
        ("auto", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Ho<|im_end|>"),
        ("default", "USER: Hi ASSISTANT:", "Ho"),
        ("none", "Hi", "Ho"),
    ],
)
def test_chat_template_option_selects_the_template(
    tmp_path: Path, with_template: Callable[[str], Any], choice: Any, prompt: str, answer: str
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
    assert seen == [prompt, answer]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_removed_from_later_turns(write_jsonl: Write, key: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 3, "abcdef", strict=True)
    ]
    messages[1][key] = "so"
    (item,) = read_conversations(write_jsonl({"messages": messages}))
    assert render_turns(item, None) == [
        [("USER: a ASSISTANT:", "<think>\nso\n</think>\n\nb")],
        [("USER: a ASSISTANT:bUSER: c ASSISTANT:", "d"), ("USER: e ASSISTANT:", "f")],
    ]
    # Some clients send it back, so that a log's request has it too.
    (item,) = read_conversations(
        write_jsonl({"request": {"messages": messages[:3]}, "response": "d"})
    )
    assert render_turns(item, None) == [[("USER: a ASSISTANT: b USER: c ASSISTANT:", "d")]]


def test_template_that_omits_reasoning_keeps_generated_text(write_jsonl: Write) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "b", "reasoning": "so"}]
    (item,) = read_conversations(write_jsonl({"messages": messages}))

    def template(messages: Any, tools: Any, answering: bool) -> str:
        opened = "<think>\n" if answering else ""
        return "".join(f"[{m['content']}]" for m in messages) + opened

    (((prompt, answer),),) = render_turns(item, template)
    assert (prompt, answer) == ("[Two primes?]<think>\n", "so\n</think>\n\nb")
