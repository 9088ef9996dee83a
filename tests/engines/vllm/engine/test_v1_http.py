"""Tests `vllm serve` with the plugin, called by OpenAI's client: text, streams, aborts, metrics,
a switch of drafting, and error 400 for requests that the engine cannot serve as they ask."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError

import pytest
from engines import MAX_MODEL_LEN, Request
from monitoring import find_metric_names
from openai import BadRequestError
from processes import METHODS, Server, find_start_lines
from v1_runs import make_requests

if TYPE_CHECKING:
    from conftest import Runs


class Completion(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str | None


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = METHODS["plugin"].make_arguments(model)
    folder = tmp_path_factory.mktemp("server")
    server = Server(model, folder, options, VLLM_SERVER_DEV_MODE="1")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def requests(model: Path) -> dict[int, Request]:
    """Greedy requests by index, except those that OpenAI's API cannot express."""
    greedy_requests = make_requests(model)
    return {i: request for i, request in enumerate(greedy_requests) if not request[1].bad_words}


@pytest.fixture(scope="module")
def expected(runs: Runs, requests: dict[int, Request]) -> dict[int, Completion]:
    """Completions of an engine without speculation."""
    outputs = {i: runs("none", "greedy").outputs[i][0] for i in requests}
    return {i: Completion(o.token_ids, o.text, o.finish_reason) for i, o in outputs.items()}


def _start_completion(server: Server, request: Request, *, stream: bool) -> Any:
    prompt, params = request
    extra_args = {
        name: getattr(params, name)
        for name in ("ignore_eos", "repetition_penalty", "stop_token_ids")
    }
    return server.complete(
        prompt,
        params.max_tokens,
        extra_args,
        stop=params.stop or None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stream=stream,
    )


def _complete(server: Server, request: Request) -> Completion:
    (choice,) = _start_completion(server, request, stream=False).choices
    return Completion(choice.token_ids, choice.text, choice.finish_reason)


def _complete_as_stream(server: Server, request: Request) -> Completion:
    completion = Completion([], "", None)
    for chunk in _start_completion(server, request, stream=True):
        for choice in chunk.choices:
            token_ids, text = completion.token_ids + choice.token_ids, completion.text + choice.text
            completion = Completion(token_ids, text, choice.finish_reason)
    return completion


def _abort_stream(server: Server, request: Request) -> int:
    """Closes a stream after its first chunk. Returns the chunk's number of tokens."""
    stream = _start_completion(server, request, stream=True)
    first = next(iter(stream))
    stream.close()
    return len(first.choices[0].token_ids)


def test_concurrent_completions_and_streams_equal_those_without_speculation(
    server: Server, requests: dict[int, Request], expected: dict[int, Completion]
) -> None:
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = {
            i: pool.submit(_complete_as_stream if i % 2 else _complete, server, request)
            for i, request in requests.items()
        }
    assert {i: future.result() for i, future in futures.items()} == expected


def test_aborted_streams_end_without_change_of_other_streams(
    server: Server, requests: dict[int, Request], expected: dict[int, Completion]
) -> None:
    other_indices = [i for i in requests if i % 8 in (0, 5, 7)]
    aborted_requests = []
    for prompt, params in (requests[i] for i in requests if i % 8 in (0, 3, 7)):
        long_params = params.clone()
        long_params.max_tokens = MAX_MODEL_LEN - 20
        aborted_requests.append((prompt[:20], long_params))
    old_metrics = server.read_metrics()
    with ThreadPoolExecutor(len(other_indices) + len(aborted_requests)) as pool:
        futures = [pool.submit(_complete_as_stream, server, requests[i]) for i in other_indices]
        aborts = pool.map(lambda request: _abort_stream(server, request), aborted_requests)
        num_received = sum(aborts)
    assert [future.result() for future in futures] == [expected[i] for i in other_indices]
    # The gauges are those of the engine's last step, so each further request updates the gauges.
    completions, deadline = [], time.monotonic() + 30
    while True:
        completions.append(_complete(server, requests[0]))
        metrics = server.read_metrics()
        num_alive = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        if not num_alive or time.monotonic() > deadline:
            break
    assert num_alive == 0
    assert completions == [expected[0]] * len(completions)
    name = "vllm:generation_tokens_total"
    finished_indices = [*other_indices, *[0] * len(completions)]
    num_finished_tokens = sum(len(expected[i].token_ids) for i in finished_indices)
    num_aborted_tokens = metrics[name] - old_metrics[name] - num_finished_tokens
    limit = sum(params.max_tokens or 0 for _, params in aborted_requests)
    assert num_received <= num_aborted_tokens < 0.8 * limit


def _wait_for_metrics(server: Server, condition: Callable[[dict[str, float]], bool]) -> Any:
    """Returns the metrics once they satisfy the condition. The engine writes them periodically."""
    deadline = time.monotonic() + 30
    while not condition(metrics := server.read_metrics()):
        assert time.monotonic() < deadline, metrics
        time.sleep(0.2)
    return metrics


def test_metrics_count_drafts_without_folder_for_several_processes(server: Server) -> None:
    metrics = _wait_for_metrics(server, lambda m: m.get("ngram_npu_draft_tokens_total", 0) > 300)
    num_draft_tokens = metrics["vllm:spec_decode_num_draft_tokens_total"]
    assert num_draft_tokens > metrics["vllm:spec_decode_num_accepted_tokens_total"] >= 300
    assert metrics["vllm:spec_decode_num_drafts_total"] > 0
    assert metrics["ngram_npu_rows_total"] > metrics["ngram_npu_drafts_total"] > 0
    assert metrics["ngram_npu_proposals_total"] > 0
    for file in ("grafana-dashboard.json", "alerts.yaml"):
        assert metrics.keys() >= find_metric_names(file, "vllm:") != set()
    (line,) = find_start_lines(server.log.read_text())
    assert "(method ngram): lookup=ngram (n-grams of 2 to 5 tokens, earliest match" in line
    assert "EngineCore" in line  # the engine's own process loaded the plugin


def test_drafting_is_switched_off_and_on_over_http(
    server: Server, requests: dict[int, Request], expected: dict[int, Completion]
) -> None:
    def count_drafts() -> float:
        return server.read_metrics()["vllm:spec_decode_num_draft_tokens_total"]

    for enabled in (False, True):
        assert server.call_workers("ngram_npu_set_drafting", enabled) == [{"drafting": enabled}]
        before = count_drafts()
        assert _complete(server, requests[0]) == expected[0]
        assert (count_drafts() > before) == enabled
        _wait_for_metrics(server, lambda m, value=enabled: m["ngram_npu_drafting"] == value)
    with pytest.raises(HTTPError):
        server.call_workers("ngram_npu_set_drafting", "off")
    assert _complete(server, requests[0]) == expected[0]


def test_rejected_request_gets_error_400_also_as_a_stream(model: Path, tmp_path: Path) -> None:
    """A request that was accepted by the API's process would otherwise end after the status 200."""
    method = METHODS["store_padded"].with_options(scope="private")
    server = Server(model, tmp_path, method.make_arguments(model))
    salt = {"cache_salt": "a"}
    try:
        server.wait_until_ready()
        for stream in (False, True):
            for extra_args, message in (
                ({"vllm_xargs": {"ngram_npu_stor": False}, **salt}, "unknown key 'ngram_npu_stor'"),
                ({"vllm_xargs": {"ngram_npu_scope": "a"}}, "ngram_npu_scope in extra_args"),
                ({"vllm_xargs": {"ngram_npu_store": "no"}}, "ngram_npu_store in extra_args"),
                ({"min_tokens": 3}, "min_tokens: expected none, got 3"),
            ):
                with pytest.raises(BadRequestError, match=f"ngram_npu: {message}"):
                    server.complete([5, 6, 7], 4, extra_args, stream=stream)
        for extra_args in ({}, salt, {"vllm_xargs": {"ngram_npu_store": False}, **salt}):
            assert server.complete([5, 6, 7], 4, extra_args).usage.completion_tokens == 4
        log = server.log.read_text()
        assert "the text of requests without both is not stored" in log
        assert "Traceback" not in log
    finally:
        server.stop()
