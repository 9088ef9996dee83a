"""Defines the formats of logs as tables of JMESPath expressions.

Each preset has the fields of `--map`, which docs/guides/logs.md describes, and `keys`, which a
record must have: `a|b` is at least one of them, `a^b` one of them that is not empty, and `-a` none.
`records` selects nested records, and `keep` those that are calls of a model.
"""

from __future__ import annotations

from typing import Any

_ANSWER = "response || completion || output"
_SYSTEM = "system || instructions"
_SENDER = "role|sender|from|author|speaker"
_CONTENT = "content|text|value|message|parts"
_CONVERSATION = (
    "conversation_id|conversationId|thread_id|threadId|session_id|sessionId|chat_id|dialog_id"
)
_TURN = "turn|turn_index|turn_id|message_index|message_idx|index|idx|seq|sequence|position|step"
_TIME = (
    "timestamp|created_at|createdAt|create_time|created|time|date|datetime|ts|start_time|startTime"
)
_QUESTION = "prompt^question^query^input^instruction^user^human"
_REPLY = "completion^response^output^answer^reply^assistant^generated_text^target"

PRESETS: dict[str, dict[str, str]] = {
    "turns": {"keys": "turns", "turns": "turns"},
    "token-ids": {"keys": "prompt_token_ids completion_token_ids", "turns": "@"},
    "bedrock": {
        "keys": "modelId input output",
        "messages": "input.inputBodyJson",
        "answer": "json(output.outputBodyJson)",
        "id": "requestId",
    },
    "anthropic-batch": {
        "keys": "custom_id params result",
        "messages": "params",
        "answer": "result.message || result",
    },
    "anthropic-batch-requests": {
        "keys": "custom_id params",
        "messages": "params",
        "conversation": "custom_id",
    },
    "anthropic-batch-results": {
        "keys": "custom_id result",
        "answer": "result.message || result",
        "conversation": "custom_id",
    },
    "openai-batch": {"keys": "custom_id body response", "messages": "body", "answer": "response"},
    "openai-batch-requests": {
        "keys": "custom_id body",
        "messages": "body",
        "conversation": "custom_id",
    },
    "openai-batch-responses": {
        "keys": "custom_id response -request -messages -prompt",
        "answer": "response",
        "conversation": "custom_id",
    },
    "litellm": {
        "keys": "call_type messages|proxy_server_request response",
        "messages": "messages || proxy_server_request.body || proxy_server_request",
        "answer": "response",
        "tools": "proxy_server_request.body.tools || proxy_server_request.tools || "
        "model_parameters.tools",
        "id": "request_id || id",
    },
    "openai-response": {
        "keys": "choices messages|prompt|request|object",
        "messages": "request || @",
        "answer": "@",
    },
    "request-response": {
        "keys": "request response|completion|output",
        "messages": "request",
        "answer": _ANSWER,
    },
    "messages-response": {
        "keys": "messages response|completion|output",
        "messages": "@",
        "answer": _ANSWER,
    },
    "langsmith": {
        "keys": "inputs outputs",
        "records": "child_runs[?run_type=='llm'] || [@]",
        "keep": "!run_type || run_type == 'llm'",
        "messages": "inputs",
        "answer": "json(outputs)",
        "tools": "extra.invocation_params.tools",
    },
    "langfuse": {
        "keys": "input output traceId|trace_id|sessionId|session_id|observations|startTime|"
        "start_time|projectId|project_id",
        "records": "observations[?type=='GENERATION'] || [@]",
        "keep": "!type || type == 'GENERATION'",
        "messages": "input",
        "answer": "output",
    },
    "opentelemetry-event": {
        "keys": "body traceId|trace_id|spanId|span_id",
        "records": "[event(@)]",
        "keep": "name",
        "messages": "messages",
        "content": "message",
        "answer": "answer",
        "tools": "tools",
        "system": "system",
        "conversation": "conversation",
        "time": "time",
    },
    "opentelemetry": {
        "keys": "attributes|tags traceId|trace_id|traceID|spanId|span_id|spanID|context",
        "records": "[span(@)]",
        "keep": "messages || answer",
        "messages": "messages",
        "answer": "answer",
        "tools": "tools",
        "system": "system",
        "id": "id",
    },
    "rows": {
        "keys": f"{_SENDER} {_CONTENT} {_CONVERSATION}",
        "content": "@",
        "conversation": _CONVERSATION.replace("|", " || "),
        "time": f"{_TURN}|{_TIME}".replace("|", " || "),
    },
    "open-webui": {
        "keys": "chat",
        "messages": "chat.messages || thread(chat.history.messages, chat.history.currentId)",
        "system": "chat.system || chat.params.system",
    },
    "chatgpt": {"keys": "mapping current_node", "messages": "thread(mapping, current_node)"},
    "messages": {
        "keys": "messages|conversation|chat_messages",
        "messages": "messages || conversation || chat_messages",
        "system": _SYSTEM,
        "tools": "tools",
    },
    "sharegpt": {
        "keys": "conversations",
        "messages": "conversations",
        "system": _SYSTEM,
        "tools": "tools",
    },
    "instruction": {
        "keys": "instruction input output^response -history",
        "messages": "join('\\n', [instruction, input][?@])",
        "answer": "output || response",
        "system": "system",
    },
    "pairs": {
        "keys": f"{_QUESTION} {_REPLY} -context -history -documents",
        "messages": _QUESTION.replace("^", " || "),
        "answer": _REPLY.replace("^", " || "),
        "system": f"{_SYSTEM} || system_prompt",
        "tools": "tools",
    },
}
"""Presets by name. A record is read with the first preset that matches."""

RESPONSES = {
    "candidates": "candidates[].{index: index, message: content}",
    "generations": "generations[][].{message: message, text: text}",
    "results": "results[].{text: outputText}",
    "generation": "[{text: generation}]",
    "outputs": "outputs[].{text: text}",
}
"""By a response's key, the choices of responses that are not OpenAI's: of Gemini, LangChain, and
Bedrock's Titan, Llama and Mistral."""

_ROLE_NAMES = {
    "user": "human prompter humanmessage humanmessagechunk",
    "assistant": "ai gpt chatgpt bing bard model bot agent function_call aimessage aimessagechunk",
    "system": "systemmessage",
    "tool": "observation function toolmessage functionmessage",
}
ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in (role, *names.split())}
"""OpenAI's roles by the names of roles in other formats."""

_MESSAGE_KEYS = {
    *("role", "from", "content", "value", "name", "tool_calls", "tool_call_id", "function_call"),
    *("refusal", "reasoning", "reasoning_content", "thinking", "id", "type", "annotations"),
    *("audio", "weight", "timestamp", "model", "status", "prefix"),
}


def is_message(item: Any) -> bool:
    """Whether a value is a message whose list is one conversation. A message with other keys may be
    one row of many conversations."""
    has_role = isinstance(item, dict) and bool({"role", "from"} & item.keys())
    return has_role and item.keys() <= _MESSAGE_KEYS
