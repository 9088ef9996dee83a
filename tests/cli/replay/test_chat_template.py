"""Tests chat templates: the model's template, the default template, and reasoning in both."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import read_conversations, read_sample
from ngram_npu_cli.logs.chat_template import load_chat_template, render_turns
from ngram_npu_cli.replay import (
    InputError,
    ReplayOptions,
    ReplayTokenizer,
    replay,
)
from ngram_npu_cli.tune import TuneOptions
from ngram_npu_cli.tune.traffic import read_traffic

Writer = Callable[..., Path]

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
def load_template(tmp_path: Path) -> Callable[[str], Any]:
    """Returns a function that writes a chat template into the folder and loads it."""
    pytest.importorskip("transformers")

    def write_and_load(source: str) -> Any:
        settings = {"chat_template": source, "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_chat_template(tmp_path)

    return write_and_load


def test_template_in_tokenizer_folder_is_rendered(
    write_jsonl: Writer, load_template: Callable[[str], Any]
) -> None:
    template = load_template("{{ bos_token }}" + CHATML)
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
    write_jsonl: Writer, load_template: Callable[[str], Any]
) -> None:
    template = load_template(
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
        ("{% if %}", "rejects this conversation: Expected an expression"),
        ("{{ raise_exception('system role!') }}", "rejects this conversation: system role!"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_failing_template_is_an_input_error(
    write_jsonl: Writer, load_template: Callable[[str], Any], source: str, message: str
) -> None:
    (item,) = read_conversations(write_jsonl({"messages": CHAT}))
    with pytest.raises(InputError, match=message):
        render_turns(item, load_template(source))


def load_and_replay(paths: list[Path], tokenizer: str, **options: Any) -> list[str]:
    inputs = replay(paths, ReplayOptions(tokenizer=tokenizer, **options)).inputs
    return [f"{figures.name}: {note}" for figures in inputs for note in figures.notes]


COMMANDS: list[Callable[..., Any]] = [
    load_and_replay,
    lambda paths, tokenizer, **options: (
        read_traffic(paths, TuneOptions(tokenizer=tokenizer, **options)).notes
    ),
    lambda paths, tokenizer, **options: read_sample(paths, tokenizer, **options).notes,
]


@pytest.mark.parametrize(
    ("command", "items"), [*zip(COMMANDS, ("records", "conversations", "records"), strict=True)]
)
def test_conversation_that_the_template_refuses_is_skipped(
    write_jsonl: Writer,
    tmp_path: Path,
    load_template: Callable[[str], Any],
    command: Any,
    items: str,
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    load_template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role!') }}{% endif %}"
        + CHATML
    )
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    valid_record = {"messages": CHAT}
    refused_record = {"messages": [{"role": "system", "content": "You are terse."}, *CHAT]}
    path = write_jsonl(
        valid_record, refused_record, valid_record, valid_record, name="logs/talk.jsonl"
    )
    (note,) = command([path], tokenizer=str(tmp_path))
    reason = f"{path}:2: {tmp_path}: its chat template rejects this conversation: no system role!"
    assert note.startswith(f"talk: 1 of 4 {items} are skipped (25.0%): {reason}"[:150])
    with pytest.raises(InputError, match=re.escape(reason)):
        command([path], tokenizer=str(tmp_path), strict=True)
    path = write_jsonl(valid_record, refused_record, refused_record, name="logs/talk.jsonl")
    with pytest.raises(
        InputError, match=rf"{re.escape(reason)}.*; 2 of 3 {items} .* more than half"
    ):
        command([path], tokenizer=str(tmp_path))


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_tool_call_without_arguments_has_an_empty_object(
    write_jsonl: Writer, load_template: Callable[[str], Any], arguments: Any
) -> None:
    template = load_template(
        "{% for m in messages %}[{{ m.content }}{% for c in m.tool_calls %}"
        "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}"
        "{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
    )
    function = {"name": "find", "arguments": arguments}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    (item,) = read_conversations(write_jsonl({"messages": [CHAT[0], answer]}))
    assert render_turns(item, template) == [[("[Two primes?]", "[{}]")]]
    assert '{"name": "find", "arguments": {}}' in str(item.turns[0].completion)


@pytest.mark.parametrize("module", ["jinja2", "transformers.utils.chat_template_utils"])
def test_template_without_package_names_the_package(
    load_template: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(InputError, match=f"default, its chat template needs {package}: pip inst"):
        load_template("{{ messages }}")


@pytest.mark.parametrize(
    ("choice", "prompt", "answer"),
    [
        ("auto", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Ho<|im_end|>"),
        ("default", "USER: Hi ASSISTANT:", "Ho"),
        ("none", "Hi", "Ho"),
    ],
)
def test_chat_template_option_selects_the_template(
    write_jsonl: Writer,
    tmp_path: Path,
    load_template: Callable[[str], Any],
    choice: Any,
    prompt: str,
    answer: str,
) -> None:
    load_template(CHATML)  # writes the template into the folder
    encoded_texts: list[str] = []

    def encode(text: str) -> list[int]:
        encoded_texts.append(text)
        return list(text.encode())

    replay(
        [write_jsonl({"prompt": "Hi", "completion": "Ho"}, name="logs/talk.jsonl")],
        options=ReplayOptions(chat_template=choice),
        tokenizer=ReplayTokenizer("fake", "made up", None, encode, tmp_path),
    )
    assert encoded_texts == [prompt, answer]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_removed_from_later_turns(write_jsonl: Writer, key: str) -> None:
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
    # Some clients send the reasoning back, so a logged request may contain it.
    (item,) = read_conversations(
        write_jsonl({"request": {"messages": messages[:3]}, "response": "d"})
    )
    assert render_turns(item, None) == [[("USER: a ASSISTANT: b USER: c ASSISTANT:", "d")]]


def test_template_that_omits_reasoning_keeps_generated_text(write_jsonl: Writer) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "b", "reasoning": "so"}]
    (item,) = read_conversations(write_jsonl({"messages": messages}))

    def template(messages: Any, tools: Any, answering: bool) -> str:
        prefix = "<think>\n" if answering else ""
        return "".join(f"[{m['content']}]" for m in messages) + prefix

    (((prompt, answer),),) = render_turns(item, template)
    assert (prompt, answer) == ("[Two primes?]<think>\n", "so\n</think>\n\nb")
