"""Defines the formats of logs as tables of JMESPath expressions, and the names that they use.

A preset has the keys of its records and a mapping as in `--map`, which docs/guides/logs.md
describes. Of the keys, `a|b` requires at least one, `a^b` one of them that is not empty, and `-a`
that there is none. In the mapping, `a|b` and `a^b` are short for `a || b`.
"""

from __future__ import annotations

from typing import Any

_ANSWER = "answer=response || completion || output"
_BATCH_ANSWER = "answer=response || result.message || result"
_MESSAGES = "messages|conversation|chat_messages|trajectory|traj"
_REQUEST = (
    "request_body|requestBody|RequestBody|modelInput|full_request|backendRequestBody|request|req"
)
_RESPONSE = (
    "response_body|responseBody|ResponseBody|modelOutput|full_response|backendResponseBody|"
    "response|resp|completion|output"
)
_CONTEXT = "system=system || instructions || system_prompt || system_message, tools=tools"
CONVERSATION_KEYS = (
    *("conversation_id", "conversationId", "conversationID", "conv_id", "thread_id", "threadId"),
    *("session_id", "sessionId", "chat_id", "chatId", "dialog_id", "dialogue_id"),
)
_CHAT = "|".join(CONVERSATION_KEYS)
_ORDER = (
    "turn|turn_index|turn_id|message_index|message_idx|index|idx|seq|sequence|position|step|"
    "timestamp|created_at|createdAt|create_time|created|time|date|datetime|ts|start_time|startTime"
)
_PART = f"conversation={_CHAT}, time={_ORDER}"
_PAIR_PROMPT = "prompt^question^query^input^instruction"
_PAIR_ANSWER = "completion^response^output^answer^reply^generated_text^target"
# In some records, "reasoning" is a text, in others a switch.
_PAIR_TEXTS = f"{_PAIR_PROMPT} {_PAIR_ANSWER} -context -contexts -history -documents -reasoning"
_PAIR_KEYS = f"{_PAIR_TEXTS} -reasoning_content -thinking"
_PAIR = f"messages={_PAIR_PROMPT}, {_CONTEXT}, answer={_PAIR_ANSWER}"
_REASONING = "reasoning_content|thinking"
_TRACE = "traceId|trace_id|sessionId|session_id|startTime|start_time|projectId|project_id"
_SPAN = "traceId|trace_id|traceID|TraceId|spanId|span_id|spanID|SpanId|context"
_SPAN_FIELDS = "messages=messages, answer=answer, tools=tools, system=system, id=id"

PRESETS: dict[str, tuple[str, str]] = {
    "turns": ("turns", "turns=turns"),
    "token-ids": ("prompt_token_ids completion_token_ids", "turns=@"),
    "bedrock": (
        "modelId input output",
        "messages=input.inputBodyJson, answer=json(output.outputBodyJson), id=requestId",
    ),
    "batch": (
        "custom_id body^params response^result",
        f"messages=body^params, {_BATCH_ANSWER}",
    ),
    "batch-requests": ("custom_id body^params", "messages=body^params, conversation=custom_id"),
    "batch-results": (
        "custom_id response^result -request -messages -prompt",
        f"{_BATCH_ANSWER}, conversation=custom_id",
    ),
    "litellm": (
        "call_type messages|proxy_server_request response",
        "messages=messages || proxy_server_request.body || proxy_server_request, answer=response, "
        "tools=proxy_server_request.body.tools || proxy_server_request.tools || "
        "model_parameters.tools, id=request_id || id",
    ),
    "openai-response": (
        "choices messages|prompt|request|object",
        "messages=request || @, answer=@",
    ),
    "request-response": (f"{_REQUEST} {_RESPONSE}", f"messages={_REQUEST}, answer={_RESPONSE}"),
    "inspect": ("messages output epoch store", "messages=messages"),
    "messages-response": ("messages response|completion|output", f"messages=@, {_ANSWER}"),
    "langsmith": (
        "inputs outputs",
        "records=tree(@, 'child_runs'), keep=!run_type || run_type == 'llm', "
        "messages=inputs, answer=json(outputs), tools=extra.invocation_params.tools",
    ),
    "langfuse": (
        f"input output observations|{_TRACE} -ml_app",
        "records=observations[?type=='GENERATION'] || [@], keep=!type || type == 'GENERATION', "
        "messages=input, answer=output",
    ),
    "opentelemetry-event": (
        f"body {_SPAN}",
        f"records=[span(@)], keep=messages || answer, {_SPAN_FIELDS}, content=messages[0], "
        "conversation=id, time=time",
    ),
    "weave": (
        "op_name inputs output",
        "keep=inputs.messages || inputs.input, messages=inputs, answer=output",
    ),
    "opentelemetry": (
        f"attributes|tags|SpanAttributes {_SPAN}",
        f"records=[span(@)], keep=messages, {_SPAN_FIELDS}",
    ),
    "lm-eval": (
        "doc arguments resps",
        "messages=arguments.gen_args_0.arg_0, answer=json(resps)[0][0]",
    ),
    "claude-code": (
        "parentUuid sessionId",
        "keep=message && isSidechain != `true` && isSidechain != 'true', "
        "content={message: json(message)}, conversation=sessionId, time=timestamp",
    ),
    "rows": (
        f"role|sender|from|author|speaker content|text|value|message|parts {_CHAT}",
        f"content=@, {_PART}",
    ),
    "message-rows": (f"message {_CHAT}", f"content=json(message), {_PART}"),
    "open-webui": (
        "chat",
        "messages=chat.messages || thread(chat.history.messages, chat.history.currentId), "
        "system=chat.system || chat.params.system",
    ),
    "chatgpt": ("mapping current_node", "messages=thread(mapping, current_node)"),
    "chat-ui": ("messages rootMessageId", "messages=thread(messages, json(messages)[-1].id)"),
    "librechat": (
        "messages conversationId endpoint -branches -recursive",
        "messages=json(messages)[].{role: isCreatedByUser && 'user' || 'assistant', "
        "content: text || content}",
    ),
    "lobechat": (
        "messages sessions",
        "records=json(messages), content=@, conversation=[sessionId, topicId], time=createdAt",
    ),
    "messages": (
        f"{_MESSAGES} -answer -reply -generated_text -outputs -target "
        "-generation -prediction -chosen -model_output -model_response",
        f"messages={_MESSAGES}, {_CONTEXT}",
    ),
    "sharegpt": ("conversations", f"messages=conversations, {_CONTEXT}"),
    "instruction": (
        "instruction input^context output^response -history",
        f'messages=join(`"\\n"`, [instruction, input, context][?@]), {_ANSWER}, {_CONTEXT}',
    ),
    "history": (
        "instruction|query output|response history",
        "messages=dialog([(json(history) || `[]`)[], "
        'join(`"\\n"`, [instruction, query, input][?@]), output || response][]), '
        f"{_CONTEXT}",
    ),
    "pair-rows": (f"{_PAIR_KEYS} {_CHAT}", f"{_PAIR}, {_PART}"),
    "pairs": (_PAIR_KEYS, _PAIR),
    "reasoning-pairs": (
        f"{_PAIR_TEXTS} {_REASONING}",
        f"messages={_PAIR_PROMPT}, {_CONTEXT}, "
        f"answer={{content: {_PAIR_ANSWER}, reasoning: {_REASONING}}}",
    ),
    "user-assistant": ("user assistant", f"messages=user, answer=assistant, {_CONTEXT}"),
}
"""Keys and mapping of presets by name. A record is read with the first preset that matches."""

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
    "user": "human prompter humanmessage humanmessagechunk customer usermessage",
    "assistant": "ai gpt chatgpt bing bard model bot chatbot agent function_call aimessage "
    "aimessagechunk apimessage",
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


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and is_message(value[0])


def is_message(item: Any) -> bool:
    """Whether a value is a message whose list is one conversation. A message with other keys may be
    one row of many conversations."""
    has_role = isinstance(item, dict) and bool({"role", "from"} & item.keys())
    return has_role and item.keys() <= _MESSAGE_KEYS
