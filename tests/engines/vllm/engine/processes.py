"""Runs engines and servers in separate processes, and shares results among pytest's processes."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from engines import RUNNER, Method
from filelock import FileLock
from ngram_npu import NgramStore
from openai import OpenAI

T = TypeVar("T")

_RUNS: Any = importlib.import_module(f"{RUNNER}_runs")
METHODS: dict[str, Method] = _RUNS.METHODS
"""The drafting methods of the runner that this environment tests."""
make_requests: Callable[[Path], list[Any]] = _RUNS.make_requests
"""Makes this runner's requests, of which `runs` has the results."""
RANK_ENVIRONMENT = {
    "NGRAM_NPU_VLLM": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # there are fewer NUMA nodes than ranks
}
"""Environment of an engine with several ranks."""
START_TIMEOUT_S = 300


def run_once(factory: pytest.TempPathFactory, name: str, run: Callable[[], T]) -> T:
    """Returns the result of `run`, called by the first of pytest's processes that needs it."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / f"{name}.pickle"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            file.write_bytes(pickle.dumps(run()))
    result: T = pickle.loads(file.read_bytes())
    return result


class EngineProcess:
    """Runs serve_offline.py in another process with some of the requests of v1_runs or v2_runs."""

    def __init__(
        self,
        model: Path,
        log: Path,
        method: str,
        request_indices: Sequence[int],
        *calls: list[Any],
        overrides: dict[str, Any] | None = None,
        salt: str = "",
        **environment: str,
    ) -> None:
        """
        Args:
            request_indices: Indices into `make_requests(model)` of the requests to run.
            calls: Calls of `collective_rpc` after the requests.
            overrides: Engine arguments that replace those of the method.
            salt: Cache salt of the last request.
        """
        self._log = log
        requests = make_requests(model)
        prompts = [[requests[i][0], requests[i][1].max_tokens] for i in request_indices]
        prompts[-1] += [salt] if salt else []
        arguments = {**METHODS[method].make_arguments(model), **(overrides or {})}
        script_arguments = map(json.dumps, (arguments, prompts, calls))
        script = Path(__file__).with_name("serve_offline.py")
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(model), *script_arguments],
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> tuple[int, str]:
        """Returns the exit status and the log."""
        return self._process.wait(900), self._log.read_text()

    def read_result(self) -> tuple[dict[str, Any], str]:
        """Returns the result that the script printed, and the log."""
        status, log = self.wait()
        assert status == 0, log[-4000:]
        (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
        return json.loads(line.removeprefix("RESULT ")), log


def find_start_lines(log: str) -> list[str]:
    """Returns the lines in which ngram_npu reports the options of an engine."""
    return [line for line in log.splitlines() if "drafts for this engine" in line]


def find_free_port() -> int:
    """Returns a free port below those that the system gives to other sockets, of which one could
    get it before the server binds it."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def assert_store_has_tokens(file: Path) -> None:
    store = NgramStore.load(file)
    store.check_integrity()
    assert store.statistics.tokens_held > 0


class Server:
    """Runs `vllm serve` in another process at a free port, with its log in `folder`."""

    def __init__(
        self, model: Path, folder: Path, options: dict[str, Any], **environment: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "server.log"
        port = find_free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._client = OpenAI(
            api_key="none", base_url=f"{self._url}/v1", max_retries=0, timeout=120
        )
        options = {"host": "127.0.0.1", "port": port, "served_model_name": "tiny", **options}
        command = ["serve", str(model), *_make_command_arguments(options)]
        path = [str(_make_vllm_metadata(folder)), os.environ["PYTHONPATH"]]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", *command],
                env={
                    **os.environ,
                    "NGRAM_NPU_VLLM": "1",
                    "PYTHONPATH": os.pathsep.join(path),
                    # Otherwise vLLM binds every engine to the same core, even if it is busy.
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    **environment,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("health")
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.log.read_text()[-4000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=10) as response:
            text: bytes = response.read()
        return text.decode()

    def call_workers(self, method: str, *args: Any) -> Any:
        """Calls a method through vLLM's route `/collective_rpc` and returns its results."""
        body = json.dumps({"method": method, "args": args}).encode()
        request = urllib.request.Request(f"{self._url}/collective_rpc", body)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["results"]

    def complete(
        self, prompt: Any, max_tokens: int | None, extra_args: Any = None, **body: Any
    ) -> Any:
        """Requests a greedy completion with token ids, and returns the OpenAI client's response.
        `extra_args` has request parameters that only vLLM defines."""
        extra_args = {"ignore_eos": True, "return_token_ids": True, **(extra_args or {})}
        body |= {"prompt": prompt, "max_tokens": max_tokens, "extra_body": extra_args}
        return self._client.completions.create(model="tiny", temperature=0, **body)

    def read_metrics(self) -> dict[str, float]:
        """Returns the values of `/metrics`, summed over labels."""
        sums: dict[str, float] = {}
        for line in self.get("metrics").splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return sums

    def stop(self) -> None:
        """Stops the process and its children."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal_number)
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    continue


def _make_vllm_metadata(folder: Path) -> Path:
    """Makes a folder with metadata of a package `vllm`. The server reads the version of `vllm`, but
    the installed package is called `vllm-cpu`."""
    site = folder / "site"
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return site


def _make_command_arguments(options: dict[str, Any]) -> list[str]:
    """Makes command-line arguments from options. Dictionaries are passed as JSON."""
    arguments = []
    for name, value in options.items():
        if value is not False and value is not None:
            arguments.append("--" + name.replace("_", "-"))
            if isinstance(value, dict):
                arguments.append(json.dumps(value))
            elif value is not True:
                arguments.append(str(value))
    return arguments
