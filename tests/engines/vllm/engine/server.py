"""Runs `vllm serve` in another process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from openai import OpenAI

START_TIMEOUT_S = 300


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
