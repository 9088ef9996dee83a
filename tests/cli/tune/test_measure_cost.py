"""Tests `ngram-npu measure-cost` with a server that streams over HTTP as vLLM does."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ngram_npu_cli import command as cli
from ngram_npu_cli.replay import InputError
from ngram_npu_cli.tune import load_cost
from ngram_npu_cli.tune.measure_cost import Stream, compute_step_time

STEP_S = 0.002


class FakeServer(ThreadingHTTPServer):
    """Drafts `k` tokens in each step of each request, and accepts all of them."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.k = 0
        self.fails_after = 1 << 30  # number of completions until the server answers 503
        self.key = ""  # the API key that the server requires; empty: none
        self.metrics_status = 200
        self.sends_usage = True
        self.burst = 1  # number of chunks that arrive together, as through a proxy that buffers
        self.steps_per_chunk = 1  # as set by vLLM's --stream-interval
        self.answer = b""  # if not empty, sent in place of the chunks
        self.drafted = 0
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def _is_refused(self) -> bool:
        """Refuses a request without the key, as vLLM does with --api-key: only for paths of /v1."""
        expected = f"Bearer {self.server.key}"
        if not self.server.key or self.headers["Authorization"] == expected:
            return False
        self.send_error(401, f"Unauthorized {self.headers['Authorization']}")
        return True

    def do_GET(self) -> None:
        if self.path.startswith("/v1") and self._is_refused():
            return
        if self.path == "/v1/models":
            text = json.dumps({"data": [{"id": "tiny"}]})
        elif self.server.metrics_status != 200:
            self.send_error(self.server.metrics_status)
            return
        else:
            # The metrics are those of two engines. A comment line has the same prefix.
            text = (
                "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.\n"
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {self.server.drafted}.0\n'
                'vllm:spec_decode_num_draft_tokens_total{engine="1"} 3.0\n'
            )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused():
            return
        with self.server.lock:
            self.server.bodies.append(body)
            if len(self.server.bodies) > self.server.fails_after:
                self.send_error(503, "busy")
                return
        self.send_response(200)
        self.end_headers()
        num_left, pending = body["max_tokens"], []
        if self.server.answer:
            self.wfile.write(self.server.answer)
            return
        while num_left > 0:
            num_generated = 0
            for _ in range(self.server.steps_per_chunk):
                time.sleep(STEP_S * (1 + self.server.k))
                with self.server.lock:
                    self.server.drafted += self.server.k
                num_generated += 1 + self.server.k
            num_left -= num_generated
            pending.append(b'data: {"choices": [{"text": "x"}], "usage": null}\n\n')
            if len(pending) == self.server.burst or num_left <= 0:
                self.wfile.write(b"".join(pending))
                self.wfile.flush()
                pending.clear()
        if self.server.sends_usage and body.get("stream_options") == {"include_usage": True}:
            usage = {"completion_tokens": body["max_tokens"]}
            self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(autouse=True)
def _delete_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()


def measure_cost(server: FakeServer, output: Path, *more: str) -> int:
    options = ["--url", server.url, "--batch-size", "4,1", "--rounds", "2", "--max-tokens", "160"]
    return cli.main(["measure-cost", str(output), *options, *more])


def test_runs_without_and_with_drafts_write_a_cost_file(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    assert measure_cost(server, output) == 0
    with pytest.raises(InputError, match=r"expected a step without drafts .* and a step with"):
        load_cost(str(output))
    server.k = 3
    assert measure_cost(server, output) == 0
    assert measure_cost(server, output) == 0, "this run replaces the previous run"
    contents = json.loads(output.read_text())
    steps = [(s["batch"], s["verified"]) for s in contents["steps"]]
    assert steps == [(1, 1.0), (1, 4.0), (4, 4.0), (4, 16.0)]
    # A sleep takes at least the requested time; how much longer depends on the machine.
    assert all(s["seconds"] > STEP_S / 2 for s in contents["steps"])
    assert [run["model"] for run in contents["runs"]] == ["tiny"] * 3
    assert load_cost(str(output)).batch_sizes == (1, 4)
    assert "batch 4: " in capsys.readouterr().out
    body = server.bodies[0]
    assert (body["model"], body["stream"], body["temperature"]) == ("tiny", True, 0)
    assert body["ignore_eos"] is True


def test_step_time_uses_only_steps_with_all_requests() -> None:
    """A step takes 1 s with one request and 10 s with two. The second starts and ends late."""
    first = [float(n) for n in range(5)] + [4 + 10.0 * n for n in range(1, 12)]
    second = [4.5 + 10.0 * n for n in range(11)] + [110.0 + n for n in range(50)]
    assert compute_step_time([Stream(first), Stream(second)]) == 10.0


@pytest.mark.parametrize(
    "streams", [[[0.0, 1.0, 2.0]], [list(range(20)), list(range(30, 50))], [[], []]]
)
def test_too_few_common_steps_are_an_error(streams: list[list[float]]) -> None:
    with pytest.raises(InputError, match="raise --max-tokens"):
        compute_step_time([Stream(arrived) for arrived in streams])


def test_chunks_read_in_bursts_are_an_error() -> None:
    """A client that falls behind reads several chunks at once."""
    arrived = [float(n // 3) for n in range(60)]
    with pytest.raises(InputError, match="2 requests at once: chunks arrive in bursts: 0 ms"):
        compute_step_time([Stream(arrived), Stream(arrived)])


KEY_ERROR = "OPENAI_API_KEY: expected a key of printable ASCII characters"


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "", "http://127.0.0.1:9: no answer: "),
        (["--url", "ftp://host"], "", "ftp://host: expected a URL such as http://localhost:8000"),
        (["--batch-size", "1,x"], "", "--batch-size: invalid list of integers value: '1,x'"),
        (["--batch-size", "0"], "", "--batch-size: must be at least 1, got 0"),
        ([], "sk-sec\u00fcret", KEY_ERROR),
    ],
)
def test_invalid_options_are_errors_that_show_no_key(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    key: str,
    message: str,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    output = tmp_path / "cost.json"
    assert cli.main(["measure-cost", str(output), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "sk-" not in error
    assert not output.exists()


def test_failure_keeps_earlier_batch_sizes(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that admits too few concurrent requests fails at the largest batch size."""
    output, options = tmp_path / "cost.json", ("--rounds", "1")
    assert measure_cost(server, output, *options) == 0
    old_cost = json.loads(output.read_text())
    server.k = 3
    server.fails_after = len(server.bodies) + 5  # three before the first round, one at batch size 1
    assert measure_cost(server, output, *options) == 2
    error = capsys.readouterr().err
    assert "/v1/completions answered 503" in error
    assert f"{output} has batch size 1" in error
    new_cost = json.loads(output.read_text())
    steps = new_cost["steps"]
    assert [(s["batch"], s["verified"]) for s in steps] == [(1, 1.0), (1, 4.0), (4, 4.0)]
    assert [s for s in steps if s["verified"] == s["batch"]] == old_cost["steps"]
    assert len(new_cost["runs"]) == 2


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"burst": 1 << 30}, "arrive in bursts"),
        ({"burst": 2}, "arrive in bursts"),
        # Without a counter of drafts, accepted drafts look like chunks of several steps.
        ({"steps_per_chunk": 2}, "--stream-interval 1"),
        ({"steps_per_chunk": 2, "k": 3}, "--stream-interval 1"),
        ({"metrics_status": 404, "k": 3}, "--stream-interval 1"),
        ({"metrics_status": 500}, "/metrics answered 500: "),
        ({"metrics_status": 403, "k": 3}, "or does not count its drafts"),
        ({"metrics_status": 403, "sends_usage": False}, "at /metrics or `usage` in the stream"),
        ({"fails_after": 3}, "/v1/completions answered 503"),
        ({"answer": b'data: {"error": {"message": "died"}}\n\n'}, "sent data: .*died"),
        ({"answer": b"data: [DONE]\n\n"}, "/v1/completions sent no text"),
        ({"answer": b"data: {\n\n"}, "http://127.*: Expecting property name"),
    ],
)
def test_unusable_server_is_reported_in_one_line(
    server: FakeServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    behaviour: dict[str, Any],
    message: str,
) -> None:
    vars(server).update(behaviour)
    output = tmp_path / "cost.json"
    assert measure_cost(server, output) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert "has batch size" not in error
    assert not output.exists()


def test_api_key_is_sent_and_never_shown(
    server: FakeServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.key = "sk-right"
    output = tmp_path / "cost.json"
    assert measure_cost(server, output) == 2
    error = capsys.readouterr().err
    assert "/v1/models answered 401: it expects an API key: set OPENAI_API_KEY" in error
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    for model in ([], ["--model", "tiny"]):
        assert measure_cost(server, output, *model) == 2
        error = capsys.readouterr().err
        assert "answered 401: it does not accept the key in OPENAI_API_KEY" in error
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right\n")  # a shell does not always strip a line end
    assert measure_cost(server, output, "--batch-size", "1", "--rounds", "1") == 0
    captured = capsys.readouterr()
    assert "sk-" not in output.read_text() + captured.out + captured.err


def test_missing_draft_counter_means_no_drafts(server: FakeServer, tmp_path: Path) -> None:
    server.metrics_status = 404
    output = tmp_path / "cost.json"
    assert measure_cost(server, output, "--model", "other") == 0
    assert [s["verified"] for s in json.loads(output.read_text())["steps"]] == [1.0, 4.0]
    assert {body["model"] for body in server.bodies} == {"other"}


def test_file_of_another_format_is_not_changed(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    output.write_text('{"mine": 1}')
    assert measure_cost(server, output) == 2
    assert "exists and is not a file of step times" in capsys.readouterr().err
    assert output.read_text() == '{"mine": 1}'
