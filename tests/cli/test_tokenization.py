"""Tests tokenizers and chat templates."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from log_samples import ANSWER, MESSAGES, REQUEST, RESPONSE, USER
from ngram_npu.errors import InputError, RecordError
from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.logs.values import Conversation, Turn
from ngram_npu_cli.tokenization import (
    Tokenization,
    load_tokenizer,
    make_chat_template,
    render_turns,
)

REASONED = MESSAGES[1] | {"reasoning_content": "hm"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def make_conversation(*turns: Any, tools: Any = ()) -> Conversation:
    return Conversation(tuple(Turn(tuple(context), answer) for context, answer in turns), "", tools)


def test_default_template_adds_to_the_context_of_earlier_turns() -> None:
    second = {"role": "tool", "content": "x"}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    conversation = make_conversation((MESSAGES[:1], call), ([second], MESSAGES[1]), tools=("t",))
    rendered = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert render_turns(conversation, None) == [
        [(f'["t"] USER: {USER} ASSISTANT:', rendered), ("TOOL: x ASSISTANT:", ANSWER)]
    ]


def test_conversation_and_its_requests_have_the_same_tokens(write_jsonl: Any) -> None:
    more = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "There."}]
    choice = {"index": 0, "message": more[1]}
    log = write_jsonl(
        {"messages": [*MESSAGES, *more]},
        {"request": REQUEST, "response": RESPONSE},
        {"request": {"messages": [*MESSAGES, more[0]]}, "response": {"choices": [choice]}},
    )
    whole, first, second = (render_turns(c, None)[0] for c in LogReader([log]))
    assert whole[0] == first[0]
    assert second == [("".join(whole[0]) + whole[1][0], "There.")]


def test_reasoning_leaves_the_context_of_later_turns() -> None:
    conversation = make_conversation((MESSAGES[:1], REASONED), (MESSAGES[:1], MESSAGES[1]))
    first, second = render_turns(conversation, None)
    assert first == [(f"USER: {USER} ASSISTANT:", f"<think>\nhm\n</think>\n\n{ANSWER}")]
    assert second[0][0] == f"USER: {USER} ASSISTANT:{ANSWER}USER: {USER} ASSISTANT:"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}{% endif %}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer of one word per token, and a template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {word: i for i, word in enumerate(["?", "user", "assistant", "Where", "is", "it"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


def test_template_of_the_folder_renders_prompt_answer_and_end(folder: Path) -> None:
    template = load_tokenizer(str(folder)).template
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    conversation = make_conversation((MESSAGES[:1], MESSAGES[1]), (MESSAGES[:1], call))
    assert render_turns(conversation, template) == [
        [
            (f"<s><user>{USER}<end>\n<assistant>", f"{ANSWER}<end>"),
            (f"\n<user>{USER}<end>\n<assistant>", "1<end>"),
        ]
    ]


def test_template_that_omits_reasoning_begins_a_new_request(folder: Path) -> None:
    conversation = make_conversation((MESSAGES[:1], REASONED), (MESSAGES[:1], MESSAGES[1]))
    first, second = render_turns(conversation, load_tokenizer(str(folder)).template)
    assert first[0][1] == f"<think>\nhm\n</think>\n\n{ANSWER}<end>"
    assert second[0][0].endswith(f"{ANSWER}<end>\n<user>{USER}<end>\n<assistant>")


def test_tokenizer_of_the_folder_ignores_its_truncation(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode(USER) == [3, 4, 5, 0]
    assert tokenizer.vocab is not None
    assert tokenizer.vocab()["Where"] == 3
    conversation = make_conversation((MESSAGES[:1], MESSAGES[1]))
    request = Tokenization(str(folder), "default").tokenize(conversation)[0]
    # USER : Where is it ? ASSISTANT :, and the answer "In the box."
    assert request.tokens().tolist() == [0, 0, 3, 4, 5, *[0] * 7]
    assert request.spans() == [(8, 12)]


def test_rejecting_template_and_wrong_text_are_errors_of_the_record() -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, "?")),
        chat_template="{{ raise_exception('no') }}",
    )
    conversation = make_conversation((MESSAGES[:1], MESSAGES[1]))
    with pytest.raises(RecordError, match="rejects the conversation: no"):
        render_turns(conversation, make_chat_template(tokenizer))
    surrogate = make_conversation(([{"role": "user", "content": "\ud800"}], MESSAGES[1]))
    with pytest.raises(RecordError, match="surrogate"):
        Tokenization("bytes").tokenize(surrogate)


def test_missing_folder_is_reported_before_a_missing_package(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r'^tokenizer "/no/such": there is no such folder$'):
        load_tokenizer("/no/such")


@pytest.mark.parametrize("name", ["no-such", "org/model", "."])
def test_missing_tokenizer_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected mistral-v1, bytes, or a folder or a model"):
        load_tokenizer(str(tmp_path) if name == "." else name)


def test_code_in_the_folder_of_a_tokenizer_is_not_executed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, transformers asks, and executes the code if the answer is y."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    executed = tmp_path / "executed"
    (tmp_path / "own.py").write_text(f"open({str(executed)!r}, 'w')\nclass Own: ...\n")
    with contextlib.suppress(InputError):
        load_tokenizer(str(tmp_path))
    assert not executed.exists()
