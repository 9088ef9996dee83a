"""Step times over HTTP, from a server that streams as vLLM does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ngram_npu import cli
from ngram_npu.replay import ReplayError
from ngram_npu.tune import load_cost
from ngram_npu.tune.client import Stream, steps_of

STEP_S = 0.002


class FakeServer(ThreadingHTTPServer):
    """Drafts `k` tokens in each step of each request, and accepts all of them."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.k = 0
        self.counts_drafts = True
        self.fails_after = 1 << 30
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

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            text = json.dumps({"data": [{"id": "tiny"}]})
        elif self.path == "/metrics" and self.server.counts_drafts:
            # Two engines, and a counter whose name has the same prefix.
            text = (
                "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.\n"
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {self.server.drafted}.0\n'
                'vllm:spec_decode_num_draft_tokens_total{engine="1"} 3.0\n'
            )
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            if len(self.server.bodies) > self.server.fails_after:
                self.send_error(503, "busy")
                return
        self.send_response(200)
        self.end_headers()
        for _ in range(0, body["max_tokens"], 1 + self.server.k):
            time.sleep(STEP_S * (1 + self.server.k))
            with self.server.lock:
                self.server.drafted += self.server.k
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()


def run(server: FakeServer, output: Path, *more: str) -> int:
    options = ["--url", server.url, "--batch-size", "4,1", "--rounds", "2", "--max-tokens", "160"]
    return cli.main(["measure-cost", str(output), *options, *more])


def test_runs_without_and_with_drafts_make_a_cost(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    assert run(server, output) == 0
    with pytest.raises(ReplayError, match=r"expected a step without drafts .* and one with"):
        load_cost(str(output))
    server.k = 3
    assert run(server, output) == 0
    assert run(server, output) == 0, "in place of the run before"
    found = json.loads(output.read_text())
    steps = [(s["batch"], s["verified"]) for s in found["steps"]]
    assert steps == [(1, 1.0), (1, 4.0), (4, 4.0), (4, 16.0)]
    # A sleep takes at least the time asked for; how much longer depends on the machine.
    assert all(s["seconds"] > STEP_S / 2 for s in found["steps"])
    assert [run["model"] for run in found["runs"]] == ["tiny"] * 3
    assert load_cost(str(output)).batch_sizes == (1, 4)
    assert "batch 4: " in capsys.readouterr().out
    body = server.bodies[0]
    assert (body["model"], body["stream"], body["temperature"]) == ("tiny", True, 0)
    assert body["ignore_eos"] is True


def test_a_server_that_counts_no_drafts_does_not_speculate(
    server: FakeServer, tmp_path: Path
) -> None:
    server.counts_drafts = False
    output = tmp_path / "cost.json"
    assert run(server, output, "--model", "other") == 0
    assert [s["verified"] for s in json.loads(output.read_text())["steps"]] == [1.0, 4.0]


def test_only_steps_of_all_requests_together_count() -> None:
    """A step takes 1 alone and 10 together; the second request starts late and ends late."""
    first = [float(n) for n in range(5)] + [4 + 10.0 * n for n in range(1, 12)]
    second = [4.5 + 10.0 * n for n in range(11)] + [110.0 + n for n in range(50)]
    assert steps_of([Stream(first), Stream(second)]) == 10.0


@pytest.mark.parametrize(
    "streams", [[[0.0, 1.0, 2.0]], [list(range(20)), list(range(30, 50))], [[], []]]
)
def test_too_few_steps_together(streams: list[list[float]]) -> None:
    with pytest.raises(ReplayError, match="raise --max-tokens"):
        steps_of([Stream(of) for of in streams])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: no answer: "),
        (["--url", "ftp://host"], "ftp://host: expected a URL such as http://localhost:8000"),
        (["--batch-size", "1,x"], "1,x: expected batch sizes such as 1,4,16"),
        (["--batch-size", "0"], "0: expected batch sizes"),
    ],
)
def test_bad_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    output = tmp_path / "cost.json"
    assert cli.main(["measure-cost", str(output), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_failing_server_leaves_the_file_as_it_was(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    assert run(server, output) == 0
    before = output.read_text()
    server.fails_after = len(server.bodies) + 4
    assert run(server, output) == 2
    assert "/v1/completions answered 503" in capsys.readouterr().err
    assert output.read_text() == before


def test_a_file_that_is_something_else_is_not_touched(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    output.write_text('{"mine": 1}')
    assert run(server, output) == 2
    assert "exists and is not a file of step times" in capsys.readouterr().err
    assert output.read_text() == '{"mine": 1}'
