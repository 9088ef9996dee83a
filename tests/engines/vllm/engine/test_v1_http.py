"""`vllm serve` with the plugin, called by OpenAI's client: text, streams, aborts, metrics, and
error 400 for requests that a store cannot separate from others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from engines import MAX_MODEL_LEN, Request
from openai import BadRequestError
from processes import METHODS, Server, find_start_lines
from v1_runs import make_requests

if TYPE_CHECKING:
    from conftest import Runs


class Answer(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    metrics = str(tmp_path_factory.mktemp("metrics"))
    options = METHODS["plugin"].make_arguments(model)
    folder = tmp_path_factory.mktemp("server")
    server = Server(model, folder, options, PROMETHEUS_MULTIPROC_DIR=metrics)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def requests(model: Path) -> dict[int, Request]:
    """Greedy requests by number, except those that OpenAI's API cannot express."""
    greedy = make_requests(model)
    return {i: request for i, request in enumerate(greedy) if not request[1].bad_words}


@pytest.fixture(scope="module")
def expected(runs: Runs, requests: dict[int, Request]) -> dict[int, Answer]:
    """Answers of an engine without speculation."""
    outputs = {i: runs("none", "greedy").outputs[i][0] for i in requests}
    return {i: Answer(o.token_ids, o.text, o.finish_reason) for i, o in outputs.items()}


def _start(server: Server, request: Request, *, stream: bool) -> Any:
    prompt, params = request
    extra = {
        name: getattr(params, name)
        for name in ("ignore_eos", "repetition_penalty", "stop_token_ids")
    }
    return server.complete(
        prompt,
        params.max_tokens,
        extra,
        stop=params.stop or None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stream=stream,
    )


def _complete(server: Server, request: Request) -> Answer:
    (choice,) = _start(server, request, stream=False).choices
    return Answer(choice.token_ids, choice.text, choice.finish_reason)


def _stream(server: Server, request: Request) -> Answer:
    answer = Answer([], "", None)
    for chunk in _start(server, request, stream=True):
        for choice in chunk.choices:
            token_ids, text = answer.token_ids + choice.token_ids, answer.text + choice.text
            answer = Answer(token_ids, text, choice.finish_reason)
    return answer


def _abort(server: Server, request: Request) -> int:
    """Closes a stream after its first chunk. Returns the chunk's number of tokens."""
    stream = _start(server, request, stream=True)
    first = next(iter(stream))
    stream.close()
    return len(first.choices[0].token_ids)


def test_concurrent_completions_and_streams_equal_no_speculation(
    server: Server, requests: dict[int, Request], expected: dict[int, Answer]
) -> None:
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = {
            i: pool.submit(_stream if i % 2 else _complete, server, request)
            for i, request in requests.items()
        }
    assert {i: answer.result() for i, answer in answers.items()} == expected


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
    with ThreadPoolExecutor(len(chosen) + len(aborted)) as pool:
        others = {i: pool.submit(_stream, server, requests[i]) for i in chosen}
        received = sum(pool.map(lambda request: _abort(server, request), aborted))
    assert {i: answer.result() for i, answer in others.items()} == {i: expected[i] for i in chosen}
    # The gauges are from the engine's last step, so each further request updates them.
    answers, deadline = [], time.monotonic() + 30
    while True:
        answers.append(_complete(server, requests[0]))
        after = server.read_metrics()
        unfinished = after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"]
        if not unfinished or time.monotonic() > deadline:
            break
    assert unfinished == 0
    assert answers == [expected[0]] * len(answers)
    generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    of_others = sum(len(expected[i].token_ids) for i in [*chosen, *[0] * len(answers)])
    limit = sum(params.max_tokens or 0 for _, params in aborted)
    assert received <= generated - of_others < 0.8 * limit


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


def test_misspelled_or_missing_scope_is_error_400(model: Path, tmp_path: Path) -> None:
    method = METHODS["store_padded"].with_options(scope="required")
    server = Server(model, tmp_path, method.make_arguments(model))
    salt, named = {"cache_salt": "a"}, {"vllm_xargs": {"ngram_npu_scope": "a"}}
    try:
        server.wait_until_ready()
        for extra, message in (
            ({"vllm_xargs": {"ngram_npu_scop": "a"}, **salt}, "unknown key 'ngram_npu_scop' in"),
            ({"vllm_xargs": {"ngram_npu_scope": -1}}, "ngram_npu_scope in extra_args"),
            ({}, "scope='required': expected a cache_salt"),
        ):
            with pytest.raises(BadRequestError, match=f"ngram_npu: {message}"):
                server.complete([5, 6, 7], 4, extra)
        for extra in (salt, named, {**named, **salt}):
            assert server.complete([5, 6, 7], 4, extra).usage.completion_tokens == 4
        assert "those with none of the three are refused" in server.log.read_text()
    finally:
        server.stop()
