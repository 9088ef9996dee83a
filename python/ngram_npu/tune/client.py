"""Measures step times of a server over HTTP: `ngram-npu measure-cost`.

A streaming server sends each request one chunk per step. So while a known number of requests is
running, the time between two chunks is the time of a step. The number of tokens that a step
verifies follows from the server's count of drafted tokens (`/metrics` of vLLM).
"""

from __future__ import annotations

import datetime
import http.client
import json
import statistics
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ngram_npu.errors import ReplayError, one_line, printable
from ngram_npu.output import atomic_output
from ngram_npu.tune.costs import FORMAT

__all__ = ["Stream", "measure_cost", "steps_of"]

_TIMEOUT_S = 600
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_PHRASE = "one two three four five six seven eight nine ten eleven twelve "
"""Repetitive text, so that every step finds n-gram drafts."""
_TOKENS_OF_PHRASE = 12
_LEAST_STEPS = 8


@dataclass
class Stream:
    """When the chunks of one request arrived, in seconds."""

    arrived: list[float] = field(default_factory=list)


def measure_cost(
    output: Path,
    *,
    url: str,
    model: str | None,
    batch_sizes: str,
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
    command: str,
    report: Callable[[str], None],
) -> None:
    """Measure at each batch size and add the times to a file for `load_cost`.

    Args:
        output: the file; created if it does not exist.
        url: of the server, without /v1.
        model: its name on the server; None: the first that the server lists.
        batch_sizes: separated by commas: "1,4,16".
        prompt_tokens: approximate length of each prompt.
        max_tokens: of each answer.
        rounds: per batch size; the median counts.
        command: command line to store in the file.
        report: called with each result as a line.

    Raises:
        ReplayError: the server's answer is not as expected, or the file has another format.
    """
    try:
        sizes = sorted({int(part) for part in batch_sizes.split(",")})
        if sizes[0] < 1:
            raise ValueError
    except ValueError as error:
        raise ReplayError(f"{batch_sizes:.80}: expected batch sizes such as 1,4,16") from error
    found = _read(output)
    server = _Server(url)
    name = model or server.model()
    prompt = _PHRASE * max(1, prompt_tokens // _TOKENS_OF_PHRASE)
    server.run(name, prompt, 1, max_tokens)  # warms up, and fills the prefix cache
    for batch in sizes:
        times, drafted = [], []
        for _ in range(rounds):
            before = server.drafted()
            streams = server.run(name, prompt, batch, max_tokens)
            chunks = sum(len(stream.arrived) for stream in streams)
            drafted.append((server.drafted() - before) / chunks)
            times.append(steps_of(streams))
        per_request = statistics.median(drafted)
        verified = round(batch * (1 + per_request), 2)
        seconds = float(f"{statistics.median(times):.4g}")
        _add(found, batch, verified, seconds)
        report(
            f"batch {batch}: {1e3 * seconds:.2f} ms per step, {per_request:.2f} drafted tokens per "
            "request"
        )
    found["runs"].append(
        {
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "model": name,
        }
    )
    with atomic_output(output) as scratch:
        scratch.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def steps_of(streams: Sequence[Stream]) -> float:
    """Median time between two chunks of a request while all requests are running, in seconds.

    Raises:
        ReplayError: they never ran together for long enough.
    """
    begin = max((stream.arrived[0] for stream in streams if stream.arrived), default=0.0)
    end = min((stream.arrived[-1] for stream in streams if stream.arrived), default=0.0)
    gaps = []
    for stream in streams:
        inside = [at for at in stream.arrived if begin <= at <= end]
        gaps += [later - at for at, later in pairwise(inside)]
    if len(gaps) < _LEAST_STEPS * len(streams):
        raise ReplayError(
            f"{len(streams)} requests at once: expected {_LEAST_STEPS} steps with all of them "
            f"running, got {len(gaps) // max(1, len(streams))}; raise "
            "--max-tokens, or lower --batch-size to what the server runs at once"
        )
    return statistics.median(gaps)


class _Server:
    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ReplayError(f"{url:.200}: expected a URL such as http://localhost:8000")
        self._url = url
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._host = parts.netloc
        self._is_secure = parts.scheme == "https"

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, timeout=_TIMEOUT_S)

    def model(self) -> str:
        try:
            return str(json.loads(self._get("/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ReplayError(f"{self._url}: /v1/models lists no model; pass --model") from error

    def drafted(self) -> float:
        """Tokens drafted so far; 0 if the server has no such counter: it does not speculate."""
        try:
            text = self._get("/metrics")
        except ReplayError:
            return 0.0
        lines = [line for line in text.splitlines() if line.startswith(_DRAFTED)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def run(self, model: str, prompt: str, batch: int, max_tokens: int) -> list[Stream]:
        """Sends ``batch`` equal requests at once."""
        streams = [Stream() for _ in range(batch)]
        failed: list[BaseException] = []

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
            raise ReplayError(f"{self._url}: {one_line(failed[0]):.300}") from failed[0]
        return streams

    def _stream(self, model: str, prompt: str, max_tokens: int, stream: Stream) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        connection = self._connect()
        try:
            connection.request(
                "POST",
                f"{self._path}/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            if answer.status != 200:
                said = answer.read(300).decode(errors="replace")
                raise ReplayError(f"/v1/completions answered {answer.status}: {said}")
            while line := answer.readline():
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    stream.arrived.append(time.perf_counter())
        finally:
            connection.close()

    def _get(self, path: str) -> str:
        connection = self._connect()
        try:
            connection.request("GET", self._path + path)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ReplayError(f"{self._url}: no answer: {one_line(error):.200}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise ReplayError(f"{self._url}: {path} answered {answer.status}")
        return text


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
        raise ReplayError(
            f"{output}: exists and is not a file of step times: {printable(one_line(error)):.200}"
        ) from error
    return found


def _add(found: dict[str, Any], batch: int, verified: float, seconds: float) -> None:
    """Adds a time, or replaces that of an earlier run for the same step."""
    steps = [s for s in found["steps"] if (s["batch"], s["verified"]) != (batch, verified)]
    steps.append({"batch": batch, "verified": verified, "seconds": seconds})
    found["steps"] = sorted(steps, key=lambda s: (s["batch"], s["verified"]))
