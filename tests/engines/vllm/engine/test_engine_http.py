"""`vllm serve` with the plugin on, asked by OpenAI's client: text, streams, aborts, metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
import request_sets
from engine_runs import ENGINE, METHODS, Request
from http_server import START_S, Server
from openai import AsyncOpenAI
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from conftest import Runs

T = TypeVar("T")


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None


class Servers(NamedTuple):
    good: Server
    mistyped: Server


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Both at once, since starting takes most of their time."""
    folders = [tmp_path_factory.mktemp(name) for name in ("good", "mistyped")]
    (folders[0] / "metrics").mkdir()
    speculative = json.dumps(METHODS["plugin"].speculative_config)
    started = [
        Server(
            model,
            folder,
            {
                **ENGINE,
                "served_model_name": "tiny",
                "speculative_config": speculative,
                "additional_config": json.dumps({section: {"engine": "scan"}}),
            },
            NGRAM_NPU_VLLM="1",
            PROMETHEUS_MULTIPROC_DIR=str(folders[0] / "metrics"),
        )
        for folder, section in zip(folders, ("ngram_npu", "ngram-npu"), strict=True)
    ]
    try:
        started[0].wait_until_ready()
        yield Servers(*started)
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="module")
def server(servers: Servers) -> Server:
    return servers.good


@pytest.fixture(scope="module")
def requests(model: Path) -> dict[int, Request]:
    """Requests of the greedy set, by number, that OpenAI's API can express."""
    all_of_them = request_sets.greedy(request_sets.Prompts(AutoTokenizer.from_pretrained(model)))
    return {i: request for i, request in enumerate(all_of_them) if not request[1].bad_words}


@pytest.fixture(scope="module")
def expected(runs: Runs, requests: dict[int, Request]) -> dict[int, Answer]:
    """Answers of an engine without speculation."""
    outputs = {i: runs("none", "greedy").outputs[i][0] for i in requests}
    return {i: Answer(o.token_ids, o.text, o.finish_reason) for i, o in outputs.items()}


def _ask(server: Server, work: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
    async def asking() -> T:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with AsyncOpenAI(api_key="none", base_url=url, max_retries=0, timeout=120) as client:
            return await work(client)

    return asyncio.run(asking())


def _form(request: Request) -> dict[str, Any]:
    prompt, params = request
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": params.max_tokens,
        "stop": params.stop or None,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "extra_body": {
            "ignore_eos": params.ignore_eos,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": params.stop_token_ids,
            "return_token_ids": True,
        },
    }


async def _complete(client: AsyncOpenAI, request: Request) -> Answer:
    (choice,) = (await client.completions.create(**_form(request))).choices
    return Answer(choice.token_ids, choice.text, choice.finish_reason)


async def _stream(client: AsyncOpenAI, request: Request) -> Answer:
    answer = Answer([], "", None)
    async for chunk in await client.completions.create(**_form(request), stream=True):
        for choice in chunk.choices:
            token_ids, text = answer.token_ids + choice.token_ids, answer.text + choice.text
            answer = Answer(token_ids, text, choice.finish_reason)
    return answer


def test_completions_one_after_the_other(
    server: Server, requests: dict[int, Request], expected: dict[int, Answer]
) -> None:
    chosen = [0, 1, 2, 3, 4, 5]

    async def work(client: AsyncOpenAI) -> list[Answer]:
        return [await _complete(client, requests[i]) for i in chosen]

    assert _ask(server, work) == [expected[i] for i in chosen]


def test_all_at_once_half_of_them_streamed(
    server: Server, requests: dict[int, Request], expected: dict[int, Answer]
) -> None:
    async def work(client: AsyncOpenAI) -> list[Answer]:
        asked = [
            (_stream if i % 2 else _complete)(client, request) for i, request in requests.items()
        ]
        return await asyncio.gather(*asked)

    assert dict(zip(requests, _ask(server, work), strict=True)) == expected


def test_streams_that_are_given_up_end_and_disturb_nobody(
    server: Server, requests: dict[int, Request], expected: dict[int, Answer]
) -> None:
    chosen = [i for i in requests if i % 8 in (0, 5, 7)]
    long = []
    for prompt, params in (requests[i] for i in requests if i % 8 in (0, 3, 7)):
        until_the_end = params.clone()
        until_the_end.max_tokens = ENGINE["max_model_len"] - 20
        long.append((prompt[:20], until_the_end))
    before = server.counters()

    async def give_up(client: AsyncOpenAI, request: Request) -> int:
        stream = await client.completions.create(**_form(request), stream=True)
        first = await anext(aiter(stream))
        await stream.close()
        return len(first.choices[0].token_ids)

    async def work(client: AsyncOpenAI) -> tuple[list[int], list[Answer]]:
        others = asyncio.gather(*[_stream(client, requests[i]) for i in chosen])
        return await asyncio.gather(*[give_up(client, request) for request in long]), await others

    seen, answers = _ask(server, work)
    assert dict(zip(chosen, answers, strict=True)) == {i: expected[i] for i in chosen}
    # The gauges are those of the engine's last step: one more request makes one more step.
    answers, deadline = [], time.monotonic() + 30
    while True:
        answers.append(_ask(server, lambda client: _complete(client, requests[0])))
        after = server.counters()
        waiting = after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"]
        if not waiting or time.monotonic() > deadline:
            break
    assert waiting == 0
    assert answers == [expected[0]] * len(answers)
    generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    rest = generated - sum(len(expected[i].token_ids) for i in [*chosen, *[0] * len(answers)])
    assert sum(seen) <= rest < 0.8 * sum(params.max_tokens or 0 for _, params in long)


def test_metrics_count_drafts(server: Server) -> None:
    found = server.counters()
    drafted = found["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted > found["vllm:spec_decode_num_accepted_tokens_total"] >= 300
    assert found["vllm:spec_decode_num_drafts_total"] > 0
    assert found["ngram_npu_draft_tokens_total"] > 300
    assert found["ngram_npu_rows_total"] > found["ngram_npu_drafts_total"] > 0
    assert found["ngram_npu_proposals_total"] > 0
    (line,) = [line for line in server.log.read_text().splitlines() if "drafts for this en" in line]
    assert "(method ngram): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "engine=scan" in line
    assert "EngineCore" in line  # by its entry point, in the engine's own process


def test_mistyped_section_is_an_error_before_an_engine_starts(servers: Servers) -> None:
    assert servers.mistyped.process.wait(START_S) != 0
    log = servers.mistyped.log.read_text()
    message = (
        "ngram_npu: unknown section 'ngram-npu' in additional_config; did you mean 'ngram_npu'?"
    )
    assert any(message in line for line in log.splitlines())
    assert "EngineCore" not in log, "no engine was started"
