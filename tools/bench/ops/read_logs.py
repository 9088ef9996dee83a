"""Measures how fast logs are read with one and with two processes."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from ngram_npu_cli.logs.conversations import Conversation, TokenRequest
from ngram_npu_cli.logs.reader import read_logs
from ngram_npu_cli.logs.tokenization import Tokenization
from ngram_npu_cli.options import ReadingOptions
from ngram_npu_cli.replay import load_inputs
from ngram_npu_cli.tune.traffic import PickledConversation

from tools.bench.data import find_data
from tools.bench.measure import compute_spread, measure_wait_ns, round_digits
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import Options

JOBS = (1, 2)


@dataclass(frozen=True)
class Log:
    """A file to read, of the same conversations as the other files, repeated.

    Attributes:
        name: Description of the records and the tokenizer.
        megabytes: Size of the file.
        has_ids: Whether its conversations are recorded as token ids instead of chat messages.
        is_for_tune: Whether conversations are only parsed, as by tune, and not tokenized.
    """

    name: str
    megabytes: int
    has_ids: bool = False
    is_for_tune: bool = False


LOGS = (
    Log("chat messages, mistral-v1", 96),
    Log("token ids", 120, has_ids=True),
    Log("chat messages, not tokenized", 120, is_for_tune=True),
)


class ReadLogs(Op):
    name = "read-logs"
    help = "reading of logs in one process and with two worker processes"
    sizes = ()
    assumptions: Mapping[str, Any] = {
        "file": "one file of JSON lines in the page cache",
        "start": "the fork server is started by a run before the first round; the start of the "
        "workers and the loading of their tokenizers are part of each time",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        inputs = load_inputs([find_data(options.data)], ReadingOptions(strict=True))
        recorded = [conversation for item in inputs for conversation in item.conversations]
        tokenization = Tokenization("mistral-v1")
        for log in LOGS:
            convert = PickledConversation.of if log.is_for_tune else tokenization.tokenize
            records = [
                _make_ids_record(tokenization.make_requests(conversation))
                if log.has_ids
                else _make_chat_record(conversation)
                for conversation in recorded
            ]
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "log.jsonl"
                _write_file(file, records, log.megabytes)
                yield {"log": log.name} | _measure(file, convert, options.rounds)


def _make_chat_record(conversation: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.prompt})
        messages.append({"role": "assistant", "content": turn.completion})
    return {"messages": messages}


def _make_ids_record(requests: Sequence[TokenRequest]) -> dict[str, Any]:
    return {
        "turns": [
            {
                "prompt_token_ids": turn.prompt.tolist(),
                "completion_token_ids": turn.completion.tolist(),
            }
            for request in requests
            for turn in request.turns
        ]
    }


def _write_file(path: Path, records: Sequence[dict[str, Any]], megabytes: int) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    with path.open("w") as file:
        for line in cycle(lines):
            file.write(line)
            if file.tell() >= megabytes * 1e6:
                break


def _measure(file: Path, convert: Callable[[Conversation], Any], num_rounds: int) -> Result:
    """Returns the speeds of both numbers of processes, which alternate."""
    num_conversations = _read(file, convert, 2, 0).num_conversations
    rounds: list[dict[int, _Times]] = []
    for number in range(num_rounds):
        order = JOBS if number % 2 == 0 else JOBS[::-1]
        rounds.append({jobs: _read(file, convert, jobs, num_conversations) for jobs in order})
    megabytes = file.stat().st_size / 1e6
    result: Result = {"megabytes": round_digits(megabytes), "conversations": num_conversations}
    for jobs in JOBS:
        times = [one_round[jobs] for one_round in rounds]
        result[f"jobs {jobs}"] = {
            "megabytes_per_s": _describe([megabytes / t.wall_s for t in times]),
            "megabytes_per_cpu_s": _describe([megabytes / t.cpu_s for t in times]),
            "cpu_s": _describe([t.cpu_s for t in times]),
            "cpu_s_of_this_process": _describe([t.own_cpu_s for t in times]),
            "waited_for_a_core_s": _describe([t.waited_s for t in times]),
        }
    result["speedup"] = _describe([r[1].wall_s / r[2].wall_s for r in rounds])
    return result


def _describe(values: Sequence[float]) -> dict[str, float]:
    return {name: round_digits(value) for name, value in compute_spread(values).items()}


@dataclass(frozen=True)
class _Times:
    """Times of reading a file. `cpu_s` and `waited_s` include the worker processes."""

    num_conversations: int
    wall_s: float
    own_cpu_s: float
    cpu_s: float
    waited_s: float


def _read(
    file: Path, convert: Callable[[Conversation], Any], jobs: int, num_conversations: int
) -> _Times:
    """Reads a file of `num_conversations`; 0: of an unknown number, without the workers' times."""
    num_received = 0
    worker_times = (0.0, 0.0)

    def receive(*_: Any) -> None:
        nonlocal num_received, worker_times
        num_received += 1
        if num_received == num_conversations:  # the workers have finished and end next
            pids = [child.pid for child in multiprocessing.active_children()]
            times = [_read_times(f"/proc/{pid}") for pid in pids]
            worker_times = sum(t[0] for t in times), sum(t[1] for t in times)

    start, own_cpu_s, own_waited_ns = time.perf_counter(), time.process_time(), measure_wait_ns()
    read_logs([file], ReadingOptions(jobs=jobs), receive, convert=convert)
    wall_s, own_cpu_s = time.perf_counter() - start, time.process_time() - own_cpu_s
    waited_s = (measure_wait_ns() - own_waited_ns) / 1e9 + worker_times[1]
    return _Times(num_received, wall_s, own_cpu_s, own_cpu_s + worker_times[0], waited_s)


def _read_times(process: str) -> tuple[float, float]:
    """Returns the seconds for which the threads of a process had a core, and waited for one."""
    cpu_ns = waited_ns = 0
    for file in Path(process).glob("task/*/schedstat"):
        cpu, waited, _ = file.read_text().split()
        cpu_ns, waited_ns = cpu_ns + int(cpu), waited_ns + int(waited)
    return cpu_ns / 1e9, waited_ns / 1e9
