"""Converts messages to the text that a model reads.

The template is the Jinja template in the model's Hugging Face folder. Without such a template, the
default is used: `USER: {user} ASSISTANT:`, system texts unchanged, `TOOL: {result}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, RecordError, import_optional, to_one_line

from ngram_npu_cli.logs.conversations import Conversation, Message, Turn

ChatTemplate = Callable[[Sequence[Message], Sequence[Any], bool], str]
"""Function from messages, tools, and whether the assistant answers next, to the text."""

_LABELS = {"system": "", "developer": "", "user": "USER: ", "assistant": "ASSISTANT: "}


def render_turns(
    conversation: Conversation, template: ChatTemplate | None, *, as_is: bool = False
) -> list[list[tuple[str, str]]]:
    """Returns lists of pairs of texts: (prompt, completion). A prompt is the text that a turn adds.

    Some templates change earlier turns, for example omit old reasoning. The next turn then does not
    continue the context, so a new list begins, with the complete context as its first prompt.

    Args:
        template: The model's template; None: the default template.
        as_is: Whether no template is used, and contents are joined by line ends.
    """
    if template is None or as_is or any(turn.raw for turn in conversation.turns):
        return _render_default(conversation.turns, as_is)
    requests: list[list[tuple[str, str]]] = []
    messages: list[Message] = []
    tools: list[Any] = []
    context = ""
    for turn in conversation.turns:
        tools += turn.tools
        messages += turn.get_messages()
        prompt = template(messages, tools, True)
        message = turn.answer or {"role": "assistant", "content": turn.completion or ""}
        messages.append(message)
        text_with_answer = template(messages, tools, False)
        # The model also generates the template's text around an answer, except the last line end.
        answer = turn.completion or ""
        if text_with_answer.startswith(prompt):
            answer = text_with_answer[len(prompt) :].rstrip("\n")
            if message.get("reasoning_content", "") not in answer:
                answer = _render_reasoning(message) + answer  # the template omits the reasoning
        if prompt.endswith("<think>\n"):
            answer = answer.removeprefix("<think>\n")
        if requests and prompt.startswith(context):
            requests[-1].append((prompt[len(context) :], answer))
        else:
            requests.append([(prompt, answer)])
        context = prompt + answer
    return requests


def _render_default(turns: Sequence[Turn], as_is: bool) -> list[list[tuple[str, str]]]:
    """Renders the default template. Reasoning is removed from the context of later turns, so a turn
    after one with reasoning begins a new list."""
    requests: list[list[tuple[str, str]]] = [[]]
    context: list[str] = []
    for turn in turns:
        prompt = _render_prompt(turn, as_is)
        request_prompt = prompt if requests[-1] else "".join([*context, prompt])
        requests[-1].append((request_prompt, turn.completion or ""))
        if turn.answer is not None and _render_reasoning(turn.answer):
            context += [prompt, _render_without_reasoning(turn.answer)]
            requests.append([])
        else:
            context += [prompt, turn.completion or ""]
    return [request for request in requests if request]


def _render_prompt(turn: Turn, as_is: bool) -> str:
    if turn.raw or (as_is and not turn.messages):
        return turn.prompt or ""
    if as_is:
        return "\n".join(message["content"] for message in turn.messages)
    parts = [json.dumps(turn.tools, ensure_ascii=False)] if turn.tools else []
    for message in turn.get_messages():
        parts.append(_LABELS.get(message["role"], "TOOL: ") + _render_without_reasoning(message))
    return " ".join([*parts, "ASSISTANT:"])


def render_completion(message: Message) -> str:
    """Returns the text that the model generated: its reasoning, its text, its tool calls."""
    if len(message) == 2:  # only role and content, as in nearly all messages
        return str(message["content"])
    return _render_reasoning(message) + _render_without_reasoning(message)


def _render_reasoning(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""


def _render_without_reasoning(message: Message) -> str:
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
    """Returns the template of a Hugging Face folder; None if the folder has no template."""
    settings = _read_settings(folder / "tokenizer_config.json")
    source = settings.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        templates = {item.get("name"): item.get("template") for item in source}
        source = templates.get("default")
    file = folder / "chat_template.jinja"
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    reason = f"{folder}: without --chat-template default, its chat template"
    import_optional("jinja2", reason, "replay")
    # vLLM uses this renderer too. It runs templates, which are untrusted programs, in a sandbox.
    renderer = import_optional("transformers.utils.chat_template_utils", reason, "replay")
    special_tokens = {name: _get_text(settings.get(name)) for name in ("bos_token", "eos_token")}

    def render(messages: Sequence[Message], tools: Sequence[Any], is_answer_next: bool) -> str:
        try:
            texts, _ = renderer.render_jinja_template(
                [[_parse_arguments(message) for message in messages]],
                tools=list(tools) or None,
                chat_template=source,
                add_generation_prompt=is_answer_next,
                **special_tokens,
            )
        except Exception as error:  # a template may fail in any way
            raise RecordError(
                f"{folder}: its chat template rejects this conversation: "
                f"{to_one_line(error):.200}; --chat-template default uses another one"
            ) from error
        return str(texts[0])

    return render


def _parse_arguments(message: Message) -> Message:
    """Converts arguments of tool calls from JSON text, as in APIs, to objects for templates."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments")
        with suppress(ValueError):  # a text that is not JSON is not changed
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({"type": "function", "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {to_one_line(error):.200}") from error
    return settings if isinstance(settings, dict) else {}


def _get_text(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")
