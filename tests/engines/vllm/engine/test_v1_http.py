"""`vllm serve` with the plugin, called by OpenAI's client: text, streams, aborts, metrics, and
error 400 for requests that a store cannot separate from others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
import v1_runs
from engines import LADDER
from openai import AsyncOpenAI, BadRequestError, OpenAI
from processes import ASYNC_V1, START_S, Server, find_start_lines
from v1_runs import MAX_MODEL_LEN, NGRAM, NGRAM_GPU, Request

if TYPE_CHECKING:
    from conftest import Runs

T = TypeVar("T")


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None


class Servers(NamedTuple):
    good: Server
    misspelled: Server


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts both servers at once, because starting takes most of the time."""
    folders = [tmp_path_factory.mktemp(name) for name in ("good", "misspelled")]
    metrics = tmp_path_factory.mktemp("metrics")
    servers = []
    for folder, section in zip(folders, ("ngram_npu", "ngram-npu"), strict=True):
        additional = {section: {"engine": "scan"}}
        options = {
            **v1_runs.OPTIONS,
            "speculative_config": NGRAM,
            "additional_config": additional,
        }
        servers.append(Server(model, folder, options, PROMETHEUS_MULTIPROC_DIR=str(metrics)))
    try:
        servers[0].wait_until_ready()
        yield Servers(*servers)
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def server(servers: Servers) -> Server:
    return servers.good


@pytest.fixture(scope="module")
def requests(model: Path) -> dict[int, Request]:
    """Greedy requests by number, except those that OpenAI's API cannot express."""
    greedy = v1_runs.make_greedy(v1_runs.Prompts(model))
    return {i: request for i, request in enumerate(greedy) if not request[1].bad_words}


@pytest.fixture(scope="module")
def expected(runs: Runs, requests: dict[int, Request]) -> dict[int, Answer]:
    """Answers of an engine without speculation."""
    outputs = {i: runs("none", "greedy").outputs[i][0] for i in requests}
    return {i: Answer(o.token_ids, o.text, o.finish_reason) for i, o in outputs.items()}


def _call(server: Server, work: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
    async def run() -> T:
        url = f"{server.url}/v1"
        async with AsyncOpenAI(api_key="none", base_url=url, max_retries=0, timeout=120) as client:
            return await work(client)

    return asyncio.run(run())


def _make_body(request: Request) -> dict[str, Any]:
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
    (choice,) = (await client.completions.create(**_make_body(request))).choices
    return Answer(choice.token_ids, choice.text, choice.finish_reason)


async def _stream(client: AsyncOpenAI, request: Request) -> Answer:
    answer = Answer([], "", None)
    async for chunk in await client.completions.create(**_make_body(request), stream=True):
        for choice in chunk.choices:
            token_ids, text = answer.token_ids + choice.token_ids, answer.text + choice.text
            answer = Answer(token_ids, text, choice.finish_reason)
    return answer


def test_sequential_completions_equal_no_speculation(
    server: Server, requests: dict[int, Request], expected: dict[int, Answer]
) -> None:
    chosen = [0, 1, 2, 3, 4, 5]

    async def work(client: AsyncOpenAI) -> list[Answer]:
        return [await _complete(client, requests[i]) for i in chosen]

    assert _call(server, work) == [expected[i] for i in chosen]


def test_concurrent_completions_and_streams_equal_no_speculation(
    server: Server, requests: dict[int, Request], expected: dict[int, Answer]
) -> None:
    async def work(client: AsyncOpenAI) -> list[Answer]:
        calls = [
            (_stream if i % 2 else _complete)(client, request) for i, request in requests.items()
        ]
        return await asyncio.gather(*calls)

    assert dict(zip(requests, _call(server, work), strict=True)) == expected


def test_aborted_streams_end_and_do_not_change_others(
    server: Server, requests: dict[int, Request], expected: dict[int, Answer]
) -> None:
    chosen = [i for i in requests if i % 8 in (0, 5, 7)]
    aborted = []
    for prompt, params in (requests[i] for i in requests if i % 8 in (0, 3, 7)):
        long = params.clone()
        long.max_tokens = MAX_MODEL_LEN - 20
        aborted.append((prompt[:20], long))
    before = server.read_metrics()

    async def abort(client: AsyncOpenAI, request: Request) -> int:
        stream = await client.completions.create(**_make_body(request), stream=True)
        first = await anext(aiter(stream))
        await stream.close()
        return len(first.choices[0].token_ids)

    async def work(client: AsyncOpenAI) -> tuple[list[int], list[Answer]]:
        others = asyncio.gather(*[_stream(client, requests[i]) for i in chosen])
        lengths = await asyncio.gather(*[abort(client, request) for request in aborted])
        return lengths, await others

    received, answers = _call(server, work)
    assert dict(zip(chosen, answers, strict=True)) == {i: expected[i] for i in chosen}
    # The gauges are from the engine's last step, so each further request updates them.
    answers, deadline = [], time.monotonic() + 30
    while True:
        answers.append(_call(server, lambda client: _complete(client, requests[0])))
        after = server.read_metrics()
        unfinished = after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"]
        if not unfinished or time.monotonic() > deadline:
            break
    assert unfinished == 0
    assert answers == [expected[0]] * len(answers)
    generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    of_others = sum(len(expected[i].token_ids) for i in [*chosen, *[0] * len(answers)])
    limit = sum(params.max_tokens or 0 for _, params in aborted)
    assert sum(received) <= generated - of_others < 0.8 * limit


def test_metrics_count_drafts(server: Server) -> None:
    metrics = server.read_metrics()
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted > metrics["vllm:spec_decode_num_accepted_tokens_total"] >= 300
    assert metrics["vllm:spec_decode_num_drafts_total"] > 0
    assert metrics["ngram_npu_draft_tokens_total"] > 300
    assert metrics["ngram_npu_rows_total"] > metrics["ngram_npu_drafts_total"] > 0
    assert metrics["ngram_npu_proposals_total"] > 0
    (line,) = find_start_lines(server.log.read_text())
    assert "(method ngram): prompt_lookup_min=2 prompt_lookup_max=4" in line
    assert "engine=scan" in line
    assert "EngineCore" in line  # from its entry point, in the engine's own process


def test_misspelled_section_is_an_error_before_an_engine_starts(servers: Servers) -> None:
    assert servers.misspelled.process.wait(START_S) != 0
    log = servers.misspelled.log.read_text()
    message = (
        "ngram_npu: unknown section 'ngram-npu' in additional_config; did you mean 'ngram_npu'?"
    )
    assert any(message in line for line in log.splitlines())
    assert "EngineCore" not in log, "no engine was started"


NAMED = {"vllm_xargs": {"ngram_npu_scope": "a"}}
SALT = {"cache_salt": "a"}


class StoreServers(NamedTuple):
    unscoped: Server
    """Method `ngram`, whose runner does not know the owner of a request."""
    required: Server
    """Method `ngram_gpu` with `scope="required"`."""


@pytest.fixture(scope="module")
def store_servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServers]:
    store = {**LADDER, "store": "live"}
    sections = ((NGRAM, store), (NGRAM_GPU, {**store, "scope": "required"}))
    servers = []
    for speculative, section in sections:
        options = {
            **v1_runs.OPTIONS,
            "speculative_config": speculative,
            "additional_config": {"ngram_npu": section},
        }
        folder = tmp_path_factory.mktemp("server")
        servers.append(Server(model, folder, options, python_path=ASYNC_V1))
    try:
        for server in servers:
            server.wait_until_ready()
        yield StoreServers(*servers)
    finally:
        for server in servers:
            server.stop()


def _complete_or_error(server: Server, **more: Any) -> str:
    """Returns the number of tokens of the answer, or the message of error 400."""
    url = f"{server.url}/v1"
    with OpenAI(api_key="none", base_url=url, max_retries=0, timeout=120) as client:
        try:
            answer = client.completions.create(
                model="tiny", prompt=[5, 6, 7], max_tokens=4, temperature=0, extra_body=more
            )
        except BadRequestError as error:
            return str(error)
    return f"tokens: {answer.usage and answer.usage.completion_tokens}"


def test_misspelled_scope_is_error_400(store_servers: StoreServers) -> None:
    for server in store_servers:
        error = _complete_or_error(server, vllm_xargs={"ngram_npu_scop": "a"}, **SALT)
        assert "ngram_npu: unknown key 'ngram_npu_scop' in extra_args" in error
        error = _complete_or_error(server, vllm_xargs={"ngram_npu_scope": -1})
        assert "ngram_npu: ngram_npu_scope in extra_args" in error
        assert "got -1" in error


def test_owner_in_runner_without_scopes_is_error_400(store_servers: StoreServers) -> None:
    server = store_servers.unscoped
    assert _complete_or_error(server) == "tokens: 4"
    assert "ngram_npu: cache_salt: expected none" in _complete_or_error(server, **SALT)
    assert "ngram_npu: ngram_npu_scope: expected none" in _complete_or_error(server, **NAMED)
    assert _complete_or_error(server) == "tokens: 4"
    log = server.log.read_text()
    assert "those with a cache_salt, a LoRA adapter or a scope are refused" in log


def test_missing_scope_is_error_400_where_required(store_servers: StoreServers) -> None:
    server = store_servers.required
    error = _complete_or_error(server)
    assert "ngram_npu: scope='required': expected a cache_salt" in error
    for owner in (SALT, NAMED, {**NAMED, **SALT}):
        assert _complete_or_error(server, **owner) == "tokens: 4"
    assert "those with none of the three are refused" in server.log.read_text()
