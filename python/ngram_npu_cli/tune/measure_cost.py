"""Measures step times of a server over HTTP, for `ngram-npu measure-cost`.

A streaming server sends each request one chunk per step. So while a known number of requests is
running, the time per chunk is the time of a step. The number of tokens that a step verifies follows
from the server's count of drafted tokens (`/metrics` of vLLM).
"""

from __future__ import annotations

import datetime
import http.client
import json
import os
import statistics
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu.errors import InputError, escape_unprintable, import_optional, to_one_line
from ngram_npu.output import atomic_output
from ngram_npu.step_time import FORMAT

from ngram_npu_cli.options import MeasureCostOptions

__all__ = ["Stream", "compute_step_time", "measure_cost"]

_TIMEOUT_S = 600
_DRAFT_COUNTER = "vllm:spec_decode_num_draft_tokens_total"
_PHRASE = "one two three four five six seven eight nine ten eleven twelve "
"""Repetitive text, so that every step finds n-gram drafts."""
_PHRASE_TOKENS = 12
_MIN_STEPS = 8
_KEY_VARIABLE = "OPENAI_API_KEY"
_NO_METRICS_STATUS = (401, 403, 404, 405, 501)
"""HTTP statuses of servers without counts, and of proxies that hide counts. If such a server
drafts, more tokens than chunks arrive."""


@dataclass
class Stream:
    """The times in seconds at which a request was sent and its chunks arrived, and the number of
    generated tokens; None if the server does not report this number."""

    arrived: list[float] = field(default_factory=list)
    sent: float = 0.0
    tokens: int | None = None


def measure_cost(
    options: MeasureCostOptions, *, command: str, report: Callable[[str], None]
) -> None:
    """Measures step times at each batch size, and adds the times to a file for `load_cost`.

    The file is created if it does not exist, and written after each batch size, so that a later
    failure loses nothing. `report` is called with each result as a line.

    Raises:
        InputError: The server's answer is not as expected, or the file has another format.
    """
    output = options.output
    sizes = sorted(options.batch_sizes)
    contents = _read_file(output)
    server = _Server(options)
    server.run(1, options.max_tokens)  # warms up, and fills the prefix cache
    _check_bursts(server, options.max_tokens)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    contents["runs"].append({"command": command, "date": now, "model": server.model})
    for batch in sizes:
        try:
            per_request, seconds = _measure_step(server, batch, options.max_tokens, options.rounds)
        except InputError as error:
            done = ", ".join(map(str, sizes[: sizes.index(batch)]))
            raise InputError(
                f"{error}; {output} has batch size {done}" if done else str(error)
            ) from error
        _add_step(contents, batch, round(batch * (1 + per_request), 2), seconds)
        with atomic_output(output) as scratch:
            scratch.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        report(
            f"batch {batch}: {1e3 * seconds:.2f} ms per step, {per_request:.2f} drafted tokens per "
            "request"
        )


def _measure_step(server: _Server, batch: int, max_tokens: int, rounds: int) -> tuple[float, float]:
    """Returns medians over the rounds: drafted tokens per request and step, seconds per step."""
    times, drafted = [], []
    for _ in range(rounds):
        before = server.count_drafted()
        streams = server.run(batch, max_tokens)
        chunks = sum(len(stream.arrived) for stream in streams)
        drafts = (server.count_drafted() or 0.0) - (before or 0.0)
        if before is None and any(stream.tokens is None for stream in streams):
            raise InputError(
                "expected counts of drafted tokens at /metrics or `usage` in the stream, got "
                "neither, so the server's drafts cannot be counted; measure without the proxy "
                "that hides them"
            )
        tokens = sum(stream.tokens or 0 for stream in streams)
        # A step yields at most one token more than it drafts. A busy server may sometimes send two
        # steps in one chunk.
        if tokens > 1.1 * (chunks + drafts):
            raise InputError(
                f"{batch} requests at once: {tokens} tokens arrived in {chunks} chunks with "
                f"{drafts:g} drafted tokens counted, expected one step per chunk; the server sends "
                "several steps in a chunk (vLLM: pass --stream-interval 1) or does not count its "
                "drafts"
            )
        drafted.append(drafts / chunks)
        times.append(compute_step_time(streams))
    return statistics.median(drafted), float(f"{statistics.median(times):.4g}")


def _check_bursts(server: _Server, max_tokens: int) -> None:
    """Raises an InputError if most chunks arrive far faster than the answer is generated.

    A proxy may buffer several chunks, or the whole answer. Such chunks arrive as fast as the
    network allows, although a long answer takes longer than an answer of a single token.
    """
    (short,), (long,) = server.run(1, 1), server.run(1, max_tokens)
    step_seconds = compute_step_time([long])
    extra_seconds = (long.arrived[-1] - long.sent) - (short.arrived[-1] - short.sent)
    per_chunk = extra_seconds / (len(long.arrived) - 1)
    if step_seconds < per_chunk / 4:
        raise InputError(
            f"chunks arrive in bursts: {1e3 * step_seconds:.2g} ms apart, in an answer that takes "
            f"{1e3 * per_chunk:.2g} ms per chunk; measure without the proxy that buffers them"
        )


def compute_step_time(streams: Sequence[Stream]) -> float:
    """Returns the median time between two chunks of a request while all requests run, in seconds.

    Raises:
        InputError: The requests did not run at the same time for long enough, or most chunks
            arrived far faster than on average, as if this process or a proxy had delayed them.
    """
    begin = max((stream.arrived[0] for stream in streams if stream.arrived), default=0.0)
    end = min((stream.arrived[-1] for stream in streams if stream.arrived), default=0.0)
    arrivals = [
        [time_s for time_s in stream.arrived if begin <= time_s <= end] for stream in streams
    ]
    times: list[float] = np.concatenate([np.diff(arrived) for arrived in arrivals]).tolist()
    if len(times) < _MIN_STEPS * len(streams):
        raise InputError(
            f"{len(streams)} requests at once: expected {_MIN_STEPS} steps with all of them "
            f"running, got {len(times) // max(1, len(streams))}; raise --max-tokens, or lower "
            "--batch-size to what the server runs at once"
        )
    median, mean = statistics.median(times), statistics.mean(times)
    if median < mean / 4:
        raise InputError(
            f"{len(streams)} requests at once: chunks arrive in bursts: {1e3 * median:.2g} ms "
            f"apart in the median, {1e3 * mean:.2g} ms on average; measure without a proxy that "
            "buffers them, on a machine with idle cores"
        )
    return median


class _Server:
    """Sends requests with `http.client`: httpx takes too much time per chunk to keep up with short
    steps of large batches (docs/guides/tune.md)."""

    def __init__(self, options: MeasureCostOptions) -> None:
        metrics = import_optional("prometheus_client.parser", "measure-cost", "measure")
        self._parse_metrics = metrics.text_string_to_metric_families
        url = options.url
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url:.200}: expected a URL such as http://localhost:8000")
        self._url = url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._host = parts.netloc
        is_secure = parts.scheme == "https"
        self._connect = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        key = _read_key()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._prompt = _PHRASE * max(1, options.prompt_tokens // _PHRASE_TOKENS)
        self.model = options.model or self._find_model()

    def _find_model(self) -> str:
        status, text = self._get("/v1/models")
        if status != 200:
            raise self._make_error("/v1/models", status, text)
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{self._url}: /v1/models lists no model; pass --model") from error

    def count_drafted(self) -> float | None:
        """Returns the number of tokens drafted so far. 0 if the server has no such counter, which
        means that it does not speculate; None if the server shows no counters."""
        status, text = self._get("/metrics")
        if status in _NO_METRICS_STATUS:
            return None
        if status != 200:
            raise self._make_error("/metrics", status, text)
        families = self._parse_metrics(text)
        samples = chain.from_iterable(family.samples for family in families)
        return float(sum(s.value for s in samples if s.name == _DRAFT_COUNTER))

    def run(self, batch: int, max_tokens: int) -> list[Stream]:
        """Sends ``batch`` identical requests at the same time, and returns the responses."""
        body = {
            "model": self.model,
            "prompt": self._prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        with ThreadPoolExecutor(batch) as pool:
            try:
                return list(pool.map(self._stream, [json.dumps(body)] * batch))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise InputError(f"{self._url}: {to_one_line(error):.300}") from error

    def _stream(self, body: str) -> Stream:
        chunks: list[tuple[float, bytes]] = []
        stream = Stream(sent=time.perf_counter())
        with self._send("POST", "/v1/completions", body) as answer:
            if answer.status != 200:
                text = answer.read(300).decode(errors="replace")
                raise self._make_error("/v1/completions", answer.status, text)
            while line := answer.readline():
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    chunks.append((time.perf_counter(), line))
        for arrival, line in chunks:
            chunk = json.loads(line.removeprefix(b"data:"))
            if "error" in chunk:
                raise InputError(f"{self._url}: /v1/completions sent {line.decode():.300}")
            if chunk.get("choices"):
                stream.arrived.append(arrival)
            if chunk.get("usage"):
                stream.tokens = chunk["usage"]["completion_tokens"]
        if not stream.arrived:
            raise InputError(f"{self._url}: /v1/completions sent no text")
        return stream

    @contextmanager
    def _send(
        self, method: str, path: str, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect(self._host, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            connection.request(method, self._path + path, body, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"{self._url}: no answer: {to_one_line(error):.200}") from error
        finally:
            connection.close()

    def _get(self, path: str) -> tuple[int, str]:
        """Returns the status and the text of the answer."""
        with self._send("GET", path) as answer:
            return answer.status, answer.read().decode(errors="replace")

    def _make_error(self, path: str, status: int, text: str) -> InputError:
        if status in (401, 403):  # the server's message may repeat the key
            text = (
                f"it does not accept the key in {_KEY_VARIABLE}"
                if self._headers
                else f"it expects an API key: set {_KEY_VARIABLE}"
            )
        return InputError(f"{self._url}: {path} answered {status}: {' '.join(text.split()):.300}")


def _read_key() -> str:
    """Returns the API key in the environment, or an empty text. Errors do not contain the key."""
    key = os.environ.get(_KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise InputError(
            f"{_KEY_VARIABLE}: expected a key of printable ASCII characters without spaces"
        )
    return key


def _read_file(output: Path) -> dict[str, Any]:
    if not output.is_file():  # a device is not read; reading /dev/full would never end
        return {
            "format": FORMAT,
            "about": "seconds of a step of a model by batch size and by the tokens that it "
            "verifies, all requests together (ngram-npu measure-cost)",
            "runs": [],
            "steps": [],
        }
    try:
        contents: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        if contents["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}, got {contents['format']!r}")
        contents["runs"], contents["steps"] = list(contents["runs"]), list(contents["steps"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = escape_unprintable(to_one_line(error))
        raise InputError(
            f"{output}: exists and is not a file of step times: {reason:.200}"
        ) from error
    return contents


def _add_step(contents: dict[str, Any], batch: int, verified: float, seconds: float) -> None:
    """Adds the time of a step, or replaces the time that an earlier run measured for the same
    step."""
    steps = {(step["batch"], step["verified"]): step for step in contents["steps"]}
    steps[batch, verified] = {"batch": batch, "verified": verified, "seconds": seconds}
    contents["steps"] = [steps[key] for key in sorted(steps)]
