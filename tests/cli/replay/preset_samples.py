"""Writes the same conversations, each a question and an answer, in the shape of every preset."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

CONVERSATIONS = [
    (
        f'Repeat this list; twice, please: {name}, {name}s\nand "{name}" | {number}',
        f'1. {name}; 2. {name}s; 3. "{name}"\n1. {name}; 2. {name}s; 3. "{name}" ({number})',
    )
    for number, name in enumerate(["apple", "Übergröße", "pear 🍐", "plum", "fig"])
]

Record = dict[str, Any]
TIME = "2026-01-0{}T00:00:00.123456789Z"


def user(text: str) -> Record:
    return {"role": "user", "content": text}


def assistant(text: str) -> Record:
    return {"role": "assistant", "content": text}


def completion(answer: str) -> Record:
    choice = {"index": 0, "message": assistant(answer), "finish_reason": "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": {}}


def parts(text: str) -> list[Record]:
    return [{"type": "text", "text": text}]


def attribute_list(attributes: Record) -> list[Record]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]


def indexed(question: str, answer: str) -> Record:
    return {
        "gen_ai.system": "openai",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": question,
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": answer,
    }


def span(number: int, attributes: Any, **more: Any) -> Record:
    return {"name": "chat m", "traceId": f"t{number}", "spanId": f"s{number}"} | {
        "attributes": attributes,
        **more,
    }


def semantic(question: str, answer: str) -> Record:
    """Attributes of OpenTelemetry's semantic conventions, whose values are JSON."""
    inputs = [{"role": "user", "parts": [{"type": "text", "content": question}]}]
    outputs = [{"role": "assistant", "parts": [{"type": "text", "content": answer}]}]
    return {
        "gen_ai.input.messages": json.dumps(inputs),
        "gen_ai.output.messages": json.dumps(outputs),
    }


def event(number: int, name: str, body: Record) -> Record:
    return {"event_name": name, "body": body, "trace_id": f"t{number}", "span_id": f"s{number}"}


def bedrock(request: Record, response: Any) -> Record:
    return {
        "schemaType": "ModelInvocationLog",
        "timestamp": TIME.format(1),
        "requestId": "r",
        "operation": "Converse",
        "modelId": "m",
        "input": {"inputContentType": "application/json", "inputBodyJson": request},
        "output": {"outputContentType": "application/json", "outputBodyJson": response},
    }


def langchain(kind: str, text: str) -> Record:
    path = ["langchain", "schema", "messages", f"{kind}Message"]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": {"content": text}}


def tree(question: str, answer: str) -> Record:
    return {
        "a": {"id": "a", "parentId": None, "childrenIds": ["b", "x"], **user(question)},
        "x": {"id": "x", "parentId": "a", "childrenIds": [], **assistant("not chosen")},
        "b": {"id": "b", "parentId": "a", "childrenIds": [], **assistant(answer)},
    }


def chatgpt(question: str, answer: str) -> Record:
    def node(parent: str | None, role: str, text: str) -> Record:
        content = {"content_type": "text", "parts": [text]}
        return {"parent": parent, "message": {"author": {"role": role}, "content": content}}

    return {
        "root": {"parent": None, "message": None},
        "a": node("root", "user", question),
        "b": node("a", "assistant", answer),
    }


def chatgpt_code(answer: str) -> dict[str, Any]:
    content = {"content_type": "code", "language": "unknown", "text": answer}
    recap = {"content_type": "reasoning_recap", "content": "Thought for 5 s"}
    contents = {"b": ("a", recap), "c": ("b", content)}
    return {
        name: {"parent": parent, "message": {"author": {"role": "assistant"}, "content": content}}
        for name, (parent, content) in contents.items()
    }


def rows(number: int, question: str, answer: str) -> list[Record]:
    return [
        {"conversation_id": number, "created_at": TIME.format(2), **assistant(answer)},
        {"conversation_id": number, "created_at": TIME.format(1), **user(question)},
    ]


EVENTS = [
    {"type": "message_start", "message": {"type": "message", "role": "assistant", "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
]

Shape = Callable[[int, str, str], list[Record]]

SHAPES: dict[str, Shape] = {
    "messages": lambda i, q, a: [{"messages": [user(q), assistant(a)]}],
    "messages: parts": lambda i, q, a: [
        {"messages": [user(q) | {"content": parts(q)}, assistant(a) | {"content": parts(a)}]}
    ],
    "messages: Claude.ai": lambda i, q, a: [
        {"chat_messages": [{"sender": "human", "text": q}, {"sender": "assistant", "text": a}]}
    ],
    "sharegpt": lambda i, q, a: [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
    ],
    "turns": lambda i, q, a: [{"turns": [{"prompt": q, "completion": a}]}],
    "request-response": lambda i, q, a: [
        {"request": {"model": "m", "messages": [user(q)]}, "response": completion(a)}
    ],
    "request-response: Anthropic": lambda i, q, a: [
        {
            "request": {"messages": [user(q)], "max_tokens": 9},
            "response": {"type": "message", **assistant(a), "content": parts(a)},
        }
    ],
    "request-response: Gemini": lambda i, q, a: [
        {
            "request": {"contents": [{"role": "user", "parts": [{"text": q}]}]},
            "response": {"candidates": [{"content": {"role": "model", "parts": [{"text": a}]}}]},
        }
    ],
    "request-response: nginx": lambda i, q, a: [
        {"request": "POST /v1/chat/completions", "request_body": {"messages": [user(q)]}}
        | {"response_body": completion(a)}
    ],
    "inspect": lambda i, q, a: [
        {
            "epoch": 1,
            "store": {"x": 1},
            "messages": [user(q), assistant(a)],
            "output": completion(a),
        }
    ],
    "messages-response": lambda i, q, a: [{"messages": [user(q)], "response": completion(a)}],
    "openai-response": lambda i, q, a: [{"messages": [user(q)], **completion(a)}],
    "batch: OpenAI": lambda i, q, a: [
        {
            "custom_id": f"r{i}",
            "body": {"messages": [user(q)]},
            "response": {"status_code": 200, "body": completion(a)},
            "error": None,
        }
    ],
    "batch-requests, batch-results: OpenAI": lambda i, q, a: [
        {"custom_id": f"r{i}", "method": "POST", "body": {"messages": [user(q)]}},
        {"id": "b", "custom_id": f"r{i}", "response": {"status_code": 200, "body": completion(a)}},
    ],
    "batch: Anthropic": lambda i, q, a: [
        {"custom_id": f"r{i}", "params": {"messages": [user(q)]}}
        | {"result": {"type": "succeeded", "message": assistant(a) | {"content": parts(a)}}},
    ],
    "batch-results, batch-requests: Anthropic": lambda i, q, a: [
        {"custom_id": f"r{i}", "result": {"type": "succeeded", "message": assistant(a)}},
        {"custom_id": f"r{i}", "params": {"messages": [user(q)]}},
    ],
    "litellm": lambda i, q, a: [
        {
            "request_id": f"r{i}",
            "call_type": "acompletion",
            "spend": 0.1,
            "startTime": TIME.format(1),
            "messages": [user(q)],
            "response": completion(a),
        }
    ],
    "litellm: proxy": lambda i, q, a: [
        {
            "request_id": f"r{i}",
            "call_type": "acompletion",
            "messages": {},
            "proxy_server_request": {"body": {"messages": [user(q)]}},
            "response": completion(a),
        }
    ],
    "bedrock": lambda i, q, a: [
        bedrock(
            {"messages": [{"role": "user", "content": [{"text": q}]}]},
            {"output": {"message": {"role": "assistant", "content": [{"text": a}]}}},
        )
    ],
    "bedrock: Anthropic stream": lambda i, q, a: [
        bedrock(
            {"anthropic_version": "bedrock-2023-05-31", "messages": [user(q)]},
            [
                *EVENTS,
                {"type": "content_block_delta", "index": 0}
                | {"delta": {"type": "text_delta", "text": a}},
            ],
        )
    ],
    "langsmith": lambda i, q, a: [
        {
            "id": f"r{i}",
            "run_type": "llm",
            "inputs": {"messages": [[langchain("Human", q)]]},
            "outputs": {"generations": [[{"text": a, "message": langchain("AI", a)}]]},
        }
    ],
    "langsmith: OpenAI": lambda i, q, a: [
        {"run_type": "llm", "inputs": {"messages": [user(q)]}, "outputs": completion(a)}
    ],
    "langsmith: tree": lambda i, q, a: [
        {"run_type": "chain", "inputs": {"x": 1}, "outputs": {"y": 2}}
        | {"child_runs": [{"run_type": "tool", "child_runs": SHAPES["langsmith"](i, q, a)}]}
    ],
    "weave": lambda i, q, a: [
        {"op_name": "chat", "trace_id": f"t{i}", "attributes": {"weave": {"client_version": "1"}}}
        | {"inputs": {"self": "x", "messages": [user(q)]}, "output": completion(a)}
    ],
    "langfuse": lambda i, q, a: [
        {
            "id": f"o{i}",
            "traceId": f"t{i}",
            "type": "GENERATION",
            "startTime": TIME.format(1),
            "input": [user(q)],
            "output": assistant(a),
        }
    ],
    "langfuse: trace": lambda i, q, a: [
        {
            "id": f"t{i}",
            "sessionId": "s",
            "input": q,
            "output": a,
            "observations": [
                {"type": "SPAN", "input": {}, "output": {}},
                {"type": "GENERATION", "input": {"messages": [user(q)]}, "output": a},
            ],
        }
    ],
    "opentelemetry": lambda i, q, a: [span(i, indexed(q, a))],
    "opentelemetry: conventions": lambda i, q, a: [span(i, semantic(q, a))],
    "opentelemetry: OTLP": lambda i, q, a: [span(i, attribute_list(indexed(q, a)))],
    "opentelemetry: span events": lambda i, q, a: [
        span(
            i,
            {"gen_ai.system": "openai"},
            events=[
                {"name": "gen_ai.user.message", "attributes": {"content": q}},
                {"name": "gen_ai.choice", "attributes": {"message": json.dumps(assistant(a))}},
            ],
        )
    ],
    "opentelemetry: OpenInference": lambda i, q, a: [
        span(
            i,
            {
                "llm.input_messages.0.message.role": "user",
                "llm.input_messages.0.message.content": q,
                "llm.output_messages.0.message.role": "assistant",
                "llm.output_messages.0.message.content": a,
            },
        )
    ],
    "opentelemetry: AI SDK": lambda i, q, a: [
        span(i, {"ai.operationId": "ai.generateText", "ai.prompt": q, "ai.response.text": a}),
        span(
            i,
            {
                "ai.operationId": "ai.generateText.doGenerate",
                "ai.prompt.messages": json.dumps([user(q) | {"content": parts(q)}]),
                "ai.response.text": a,
            },
        ),
    ],
    "opentelemetry: MLflow": lambda i, q, a: [
        span(
            i,
            {
                "mlflow.spanType": '"CHAT_MODEL"',
                "mlflow.spanInputs": json.dumps({"messages": [user(q)]}),
                "mlflow.spanOutputs": json.dumps(completion(a)),
            },
        )
    ],
    "opentelemetry: agent": lambda i, q, a: [
        span(i, semantic(q, a) | {"gen_ai.operation.name": name})
        for name in ("invoke_agent", "chat")
    ],
    "opentelemetry-event": lambda i, q, a: [
        event(i, "gen_ai.user.message", {"content": q}),
        event(i, "gen_ai.choice", {"index": 0, "message": {"content": a}}),
    ],
    "open-webui": lambda i, q, a: [
        {"id": f"c{i}", "title": "t", "chat": {"messages": [user(q), assistant(a)]}}
    ],
    "open-webui: tree": lambda i, q, a: [
        {"id": f"c{i}", "chat": {"history": {"messages": tree(q, a), "currentId": "b"}}}
    ],
    "chatgpt": lambda i, q, a: [{"mapping": chatgpt(q, a), "current_node": "b"}],
    "chatgpt: types of content": lambda i, q, a: [
        {"mapping": chatgpt(q, "") | chatgpt_code(a), "current_node": "c"}
    ],
    "chat-ui": lambda i, q, a: [
        {
            "rootMessageId": "r",
            "messages": [
                {"id": "r", "from": "system", "content": "", "ancestors": []},
                {"id": "a", "from": "user", "content": q, "ancestors": ["r"]},
                {"id": "x", "from": "assistant", "content": "not chosen", "ancestors": ["r", "a"]},
                {"id": "b", "from": "assistant", "content": a, "ancestors": ["r", "a"]},
            ],
        }
    ],
    "librechat": lambda i, q, a: [
        {
            "conversationId": f"c{i}",
            "endpoint": "openAI",
            "messages": [
                {"messageId": "a", "sender": "User", "isCreatedByUser": True, "text": q},
                {"messageId": "b", "sender": "GPT-5", "isCreatedByUser": False, "text": a},
            ],
        }
    ],
    "lobechat": lambda i, q, a: [
        {
            "sessions": [{"id": "s"}, {"id": "t"}],
            "messages": [
                {"id": f"{i}{name}", "sessionId": f"s{i}", "createdAt": time, **message}
                for name, time, message in (
                    ("q", TIME.format(1), user(q)),
                    ("a", TIME.format(2), assistant(a)),
                )
            ],
        }
    ],
    "claude-code": lambda i, q, a: [
        {"sessionId": f"s{i}", "isSidechain": side, "timestamp": TIME.format(n)}
        | {"parentUuid": "p", "message": message | {"id": "m"}}
        for n, (side, message) in enumerate(
            [(False, user(q)), (True, user("of an agent")), (False, assistant(a))], start=1
        )
    ],
    "lm-eval": lambda i, q, a: [
        {"doc": {"question": "?"}, "arguments": {"gen_args_0": {"arg_0": q}}, "resps": [[a]]}
    ],
    "history": lambda i, q, a: [{"instruction": "", "input": q, "output": a, "history": []}],
    "rows": rows,
    "message-rows": lambda i, q, a: [
        {"session_id": f"s{i}", "message": {"type": kind, "data": {"content": text}}}
        for kind, text in (("human", q), ("ai", a))
    ],
    "pair-rows": lambda i, q, a: [{"conversation_id": i, "turn": 0, "prompt": q, "response": a}],
    "user-assistant": lambda i, q, a: [{"user": q, "assistant": a}],
    "instruction": lambda i, q, a: [
        {"instruction": q.partition("\n")[0], "input": q.partition("\n")[2], "output": a}
    ],
    **{
        f"pairs: {prompt}, {answer}": lambda i, q, a, prompt=prompt, answer=answer: [
            {"id": i, prompt: q, answer: a}
        ]
        for prompt, answer in (
            ("prompt", "completion"),
            ("input", "output"),
            ("question", "answer"),
            ("instruction", "output"),
        )
    },
}
"""Shapes of the records of a conversation by preset and variant. Each gets a conversation's number,
question and answer."""


def make_records(name: str) -> list[Record]:
    return [
        record
        for i, (question, answer) in enumerate(CONVERSATIONS)
        for record in SHAPES[name](i, question, answer)
    ]
