"""Converts messages to the text that a model reads.

A model's own template is the Jinja template of its Hugging Face folder. Without one, the default
here: `USER: {user} ASSISTANT:`, a system's text as it stands, `TOOL: {result}`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, RecordError, one_line

from ngram_npu_cli.logs.records import Conversation, Message, Turn

ChatTemplate = Callable[[Sequence[Message], Sequence[Any], bool], str]
"""(messages, tools, whether the assistant answers next) -> text."""

_LABELS = {"system": "", "developer": "", "user": "USER: ", "assistant": "ASSISTANT: "}


def texts(
    conversation: Conversation, template: ChatTemplate | None, *, as_is: bool = False
) -> list[list[tuple[str, str]]]:
    """The conversation as lists of (prompt, completion) texts; a prompt is the text a turn adds.

    Some templates change earlier turns, for example leave out old reasoning. The next turn then
    does not continue the context: a new list begins, whose first prompt is the whole context.

    Args:
        conversation: one without token ids.
        template: the model's own; None: the default.
        as_is: use no template; join the contents by line ends.
    """
    if template is None or as_is or any(turn.raw for turn in conversation.turns):
        return _in_default_template(conversation.turns, as_is)
    requests: list[list[tuple[str, str]]] = []
    messages: list[Message] = []
    tools: list[Any] = []
    context = ""
    for turn in conversation.turns:
        tools += turn.tools
        messages += turn.messages_or_prompt()
        whole = template(messages, tools, True)
        message = turn.answer or {"role": "assistant", "content": turn.completion or ""}
        messages.append(message)
        after = template(messages, tools, False)
        # The model generates what the template puts around an answer, except the last line end.
        answer = turn.completion or ""
        if after.startswith(whole):
            answer = after[len(whole) :].rstrip("\n")
            if message.get("reasoning_content", "") not in answer:
                answer = _thought(message) + answer  # generated, although the template omits it
        if whole.endswith("<think>\n"):
            answer = answer.removeprefix("<think>\n")
        if requests and whole.startswith(context):
            requests[-1].append((whole[len(context) :], answer))
        else:
            requests.append([(whole, answer)])
        context = whole + answer
    return requests


def _in_default_template(turns: Sequence[Turn], as_is: bool) -> list[list[tuple[str, str]]]:
    """A turn after one with reasoning begins a new list: reasoning leaves the context."""
    requests: list[list[tuple[str, str]]] = [[]]
    context: list[str] = []
    for turn in turns:
        prompt = _plain(turn, as_is)
        whole = prompt if requests[-1] else "".join([*context, prompt])
        requests[-1].append((whole, turn.completion or ""))
        thought = turn.answer is not None and _thought(turn.answer)
        kept = _without_reasoning(turn.answer) if turn.answer and thought else turn.completion
        context += [prompt, kept or ""]
        if thought:
            requests.append([])
    return [request for request in requests if request]


def _plain(turn: Turn, as_is: bool) -> str:
    if turn.raw or (as_is and not turn.messages):
        return turn.prompt or ""
    if as_is:
        return "\n".join(message["content"] for message in turn.messages)
    parts = [json.dumps(turn.tools, ensure_ascii=False)] if turn.tools else []
    for message in turn.messages_or_prompt():
        parts.append(_LABELS.get(message["role"], "TOOL: ") + _without_reasoning(message))
    return " ".join([*parts, "ASSISTANT:"])


def completion_text(message: Message) -> str:
    """The text that the model generated: its reasoning, its text, its tool calls."""
    return _thought(message) + _without_reasoning(message)


def _thought(message: Message) -> str:
    said = message.get("reasoning_content")
    return f"<think>\n{said}\n</think>\n\n" if said else ""


def _without_reasoning(message: Message) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder; None where it has none.

    Raises:
        InputError: it cannot be read, or the package jinja2 is not installed.
    """
    settings = _settings(folder / "tokenizer_config.json")
    source = settings.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        named = {item.get("name"): item.get("template") for item in source}
        source = named.get("default")
    file = folder / "chat_template.jinja"
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    try:
        sandbox: Any = importlib.import_module("jinja2.sandbox")
        loop_controls: Any = importlib.import_module("jinja2.ext").loopcontrols
    except ImportError as error:
        raise InputError(
            f"{folder}: its chat template needs the package jinja2: pip install jinja2, or choose "
            "--chat-template default"
        ) from error
    # A template is an untrusted program; in the sandbox it can access only its arguments.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loop_controls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda _: "2026-01-01"  # the same text every day
    special = {name: _special(settings.get(name)) for name in ("bos_token", "eos_token")}

    def render(messages: Sequence[Message], tools: Sequence[Any], answering: bool) -> str:
        try:
            text: str = compiled.render(
                messages=[_with_objects(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=answering,
                **special,
            )
        except Exception as error:  # a template may fail in any way
            raise RecordError(
                f"{folder}: its chat template refuses this conversation: {one_line(error):.200}; "
                "--chat-template default does without it"
            ) from error
        return text

    try:
        compiled = environment.from_string(source)
    except Exception as error:
        raise InputError(
            f"{folder}: its chat template cannot be used: {one_line(error):.200}"
        ) from error
    return render


def _with_objects(message: Message) -> Message:
    """Tool-call arguments as objects: an API gives them as JSON text, templates expect objects."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments")
        with suppress(ValueError):  # a text that is not JSON is left as it is
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({"type": "function", "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {one_line(error):.200}") from error
    return found if isinstance(found, dict) else {}


def _special(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)
