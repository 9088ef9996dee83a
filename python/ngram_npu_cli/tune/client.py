"""Measures step times of a server over HTTP: `ngram-npu measure-cost`.

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
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu.errors import InputError, one_line, printable
from ngram_npu.output import atomic_output
from ngram_npu.step_time import FORMAT

__all__ = ["Stream", "measure_cost", "steps_of"]

_TIMEOUT_S = 600
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_PHRASE = "one two three four five six seven eight nine ten eleven twelve "
"""Repetitive text, so that every step finds n-gram drafts."""
_TOKENS_OF_PHRASE = 12
_LEAST_STEPS = 8
_KEY_VARIABLE = "OPENAI_API_KEY"
_NO_METRICS = (401, 403, 404, 405, 501)
"""Answers of servers without counts, and of proxies that do not show them. If such a server drafts,
more tokens than chunks arrive."""


@dataclass
class Stream:
    """One request.

    Attributes:
        arrived: when its chunks arrived, in seconds.
        sent: when it was sent.
        tokens: how many the server says it generated; None: it does not say.
    """

    arrived: list[float] = field(default_factory=list)
    sent: float = 0.0
    tokens: int | None = None

    @property
    def seconds(self) -> float:
        return self.arrived[-1] - self.sent


def measure_cost(
    output: Path,
    *,
    url: str,
    model: str | None,
    key_variable: str | None = None,
    batch_sizes: str,
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
    command: str,
    report: Callable[[str], None],
) -> None:
    """Measure at each batch size and add the times to a file for `load_cost`.

    The file is written after each batch size, so that a later failure loses nothing.

    Args:
        output: the file; created if it does not exist.
        url: of the server, without /v1.
        model: its name on the server; None: the first that the server lists.
        key_variable: name of the environment variable that holds the server's API key; None:
            OPENAI_API_KEY, if it is set.
        batch_sizes: separated by commas: "1,4,16".
        prompt_tokens: approximate length of each prompt.
        max_tokens: of each answer.
        rounds: per batch size; the median counts.
        command: command line to store in the file.
        report: called with each result as a line.

    Raises:
        InputError: the server's answer is not as expected, or the file has another format.
    """
    try:
        sizes = sorted({int(part) for part in batch_sizes.split(",")})
        if sizes[0] < 1:
            raise ValueError
    except ValueError as error:
        raise InputError(f"{batch_sizes:.80}: expected batch sizes such as 1,4,16") from error
    found = _read(output)
    server = _Server(url, key_variable)
    name = model or server.model()
    prompt = _PHRASE * max(1, prompt_tokens // _TOKENS_OF_PHRASE)
    server.run(name, prompt, 1, max_tokens)  # warms up, and fills the prefix cache
    _check_that_chunks_are_sent_at_once(server, name, prompt, max_tokens)
    found["runs"].append(
        {
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "model": name,
        }
    )
    for batch in sizes:
        try:
            per_request, seconds = _measure(server, name, prompt, batch, max_tokens, rounds)
        except InputError as error:
            done = ", ".join(map(str, sizes[: sizes.index(batch)]))
            raise InputError(
                f"{error}; {output} has batch size {done}" if done else str(error)
            ) from error
        _add(found, batch, round(batch * (1 + per_request), 2), seconds)
        with atomic_output(output) as scratch:
            scratch.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        report(
            f"batch {batch}: {1e3 * seconds:.2f} ms per step, {per_request:.2f} drafted tokens per "
            "request"
        )


def _measure(
    server: _Server, model: str, prompt: str, batch: int, max_tokens: int, rounds: int
) -> tuple[float, float]:
    """Drafted tokens per request and step, and seconds per step: medians over the rounds."""
    times, drafted = [], []
    for _ in range(rounds):
        before = server.drafted()
        streams = server.run(model, prompt, batch, max_tokens)
        chunks = sum(len(stream.arrived) for stream in streams)
        drafts = (server.drafted() or 0.0) - (before or 0.0)
        if before is None and any(stream.tokens is None for stream in streams):
            raise InputError(
                "expected counts of drafted tokens at /metrics or `usage` in the stream, got "
                "neither: it is not known whether the server drafts; measure without the proxy "
                "that hides them"
            )
        tokens = sum(stream.tokens or 0 for stream in streams)
        # A step yields a token and at most what was drafted. Some chunks of a server that is busy
        # may have two steps.
        if tokens > 1.1 * (chunks + drafts):
            raise InputError(
                f"{batch} requests at once: {tokens} tokens arrived in {chunks} chunks with "
                f"{drafts:g} drafted tokens counted, expected one step per chunk; the server sends "
                "several steps in a chunk (vLLM: pass --stream-interval 1) or does not count its "
                "drafts"
            )
        drafted.append(drafts / chunks)
        times.append(steps_of(streams))
    return statistics.median(drafted), float(f"{statistics.median(times):.4g}")


def _check_that_chunks_are_sent_at_once(
    server: _Server, model: str, prompt: str, max_tokens: int
) -> None:
    """A proxy may hold an answer back until it is complete. Its chunks then arrive as fast as the
    network, although a long answer takes longer than one of a single token.

    Raises:
        InputError: the chunks of an answer arrive far faster than it is generated.
    """
    (short,) = server.run(model, prompt, 1, 1)
    streams = server.run(model, prompt, 1, max_tokens)
    step = steps_of(streams)
    of_answer = (streams[0].seconds - short.seconds) / (len(streams[0].arrived) - 1)
    if step < of_answer / 4:
        raise InputError(
            f"chunks arrive in bursts: {1e3 * step:.2g} ms apart, in an answer that takes "
            f"{1e3 * of_answer:.2g} ms per chunk; measure without the proxy that holds them back"
        )


def steps_of(streams: Sequence[Stream]) -> float:
    """Median time per chunk of a request while all requests are running, in seconds.

    Chunks that arrive in a burst, as through a proxy that buffers, share the time since the burst
    before.

    Raises:
        InputError: they never ran together for long enough.
    """
    begin = max((stream.arrived[0] for stream in streams if stream.arrived), default=0.0)
    end = min((stream.arrived[-1] for stream in streams if stream.arrived), default=0.0)
    inside = [[at for at in stream.arrived if begin <= at <= end] for stream in streams]
    gaps = [later - at for of in inside for at, later in pairwise(of)]
    apart = sum(gaps) / max(1, len(gaps)) / 5
    times: list[float] = []
    for of in inside:
        arrived = np.array(of)
        first = np.flatnonzero(np.diff(arrived, prepend=-np.inf) > apart)
        chunks = np.diff(first, append=len(arrived))
        times += (np.diff(arrived[first]) / chunks[1:]).tolist()
    if len(times) < _LEAST_STEPS * len(streams):
        bursts = len(gaps) >= 2 * len(times) > 0
        raise InputError(
            f"{len(streams)} requests at once: expected {_LEAST_STEPS} steps with all of them "
            f"running, got {len(times) // max(1, len(streams))}; raise --max-tokens, "
            + (
                "or measure without the proxy that holds chunks back: they arrive in bursts"
                if bursts
                else "or lower --batch-size to what the server runs at once"
            )
        )
    return statistics.median(times)


class _Server:
    def __init__(self, url: str, key_variable: str | None) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url:.200}: expected a URL such as http://localhost:8000")
        self._url = url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._host = parts.netloc
        self._is_secure = parts.scheme == "https"
        self._key_variable = key_variable or _KEY_VARIABLE
        key = _key(key_variable)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, timeout=_TIMEOUT_S)

    def model(self) -> str:
        status, text = self._get("/v1/models")
        if status != 200:
            raise self._refused("/v1/models", status, text)
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{self._url}: /v1/models lists no model; pass --model") from error

    def drafted(self) -> float | None:
        """Tokens drafted so far; 0 if the server has no such counter: it does not speculate. None
        if it shows no counters."""
        status, text = self._get("/metrics")
        if status in _NO_METRICS:
            return None
        if status != 200:
            raise self._refused("/metrics", status, text)
        lines = [line for line in text.splitlines() if line.startswith(_DRAFTED)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def run(self, model: str, prompt: str, batch: int, max_tokens: int) -> list[Stream]:
        """Sends ``batch`` equal requests at once."""
        streams = [Stream() for _ in range(batch)]
        failed: list[Exception] = []

        def request(stream: Stream) -> None:
            try:
                self._stream(model, prompt, max_tokens, stream)
            except Exception as error:  # reported by the waiting thread
                failed.append(error)

        threads = [threading.Thread(target=request, args=(s,), daemon=True) for s in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            error = failed[0]
            if isinstance(error, InputError):
                raise error
            raise InputError(f"{self._url}: {one_line(error):.300}") from error
        return streams

    def _stream(self, model: str, prompt: str, max_tokens: int, stream: Stream) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        chunks: list[tuple[float, bytes]] = []
        connection = self._connect()
        try:
            stream.sent = time.perf_counter()
            connection.request(
                "POST",
                f"{self._path}/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json", **self._headers},
            )
            answer = connection.getresponse()
            if answer.status != 200:
                said = answer.read(300).decode(errors="replace")
                raise self._refused("/v1/completions", answer.status, said)
            while line := answer.readline():
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    chunks.append((time.perf_counter(), line))
        finally:
            connection.close()
        for at, line in chunks:
            chunk = json.loads(line.removeprefix(b"data:"))
            if "error" in chunk:
                raise InputError(f"{self._url}: /v1/completions sent {line.decode():.300}")
            if chunk.get("choices"):
                stream.arrived.append(at)
            if chunk.get("usage"):
                stream.tokens = chunk["usage"]["completion_tokens"]
        if not stream.arrived:
            raise InputError(f"{self._url}: /v1/completions sent no text")

    def _get(self, path: str) -> tuple[int, str]:
        """The status and the text of the answer."""
        connection = self._connect()
        try:
            connection.request("GET", self._path + path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"{self._url}: no answer: {one_line(error):.200}") from error
        finally:
            connection.close()

    def _refused(self, path: str, status: int, said: str) -> InputError:
        if status in (401, 403):  # the server's own words may repeat the key
            said = (
                f"it does not accept the key in {self._key_variable}"
                if self._headers
                else f"it expects an API key: set {_KEY_VARIABLE}, or name the variable that holds "
                "it with --api-key-env"
            )
        return InputError(f"{self._url}: {path} answered {status}: {' '.join(said.split()):.300}")


def _key(variable: str | None) -> str:
    """The API key in an environment variable; empty: there is none. Errors never show it.

    Raises:
        InputError: a variable is named and holds none, or the key cannot be in a header.
    """
    key = os.environ.get(variable or _KEY_VARIABLE, "").strip()
    if variable is not None and not key:  # the name may be a key, passed by mistake
        raise InputError(
            "--api-key-env: expected the name of an environment variable that holds the API key, "
            "got one that is not set or is empty"
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise InputError(
            f"{variable or _KEY_VARIABLE}: expected a key of printable ASCII characters without "
            "spaces"
        )
    return key


def _read(output: Path) -> dict[str, Any]:
    if not output.is_file():  # a device is written only; reading /dev/full would not end
        return {
            "format": FORMAT,
            "about": "seconds of a step of a model by batch size and by the tokens that it "
            "verifies, all requests together (ngram-npu measure-cost)",
            "runs": [],
            "steps": [],
        }
    try:
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT!r}, got {found['format']!r}")
        found["runs"], found["steps"] = list(found["runs"]), list(found["steps"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{output}: exists and is not a file of step times: {printable(one_line(error)):.200}"
        ) from error
    return found


def _add(found: dict[str, Any], batch: int, verified: float, seconds: float) -> None:
    """Adds a time, or replaces that of an earlier run for the same step."""
    steps = [s for s in found["steps"] if (s["batch"], s["verified"]) != (batch, verified)]
    steps.append({"batch": batch, "verified": verified, "seconds": seconds})
    found["steps"] = sorted(steps, key=lambda s: (s["batch"], s["verified"]))
