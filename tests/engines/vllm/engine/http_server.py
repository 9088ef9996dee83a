"""`vllm serve` in a process of its own."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S = 300


class Server:
    """A server of the model at a free port, with its log in ``folder``."""

    def __init__(
        self, model: Path, folder: Path, options: dict[str, Any], **environment: str
    ) -> None:
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = ["serve", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        paths = [str(_named_vllm(folder)), os.environ.get("PYTHONPATH", "")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", *command, *_words(options)],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    # Else every engine takes the same core, even a busy one.
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    **environment,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("health")
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.log.read_text()[-4000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=10) as answer:
            text: bytes = answer.read()
        return text.decode()

    def counters(self) -> dict[str, float]:
        """Values from `/metrics`, summed over labels."""
        found: dict[str, float] = {}
        for line in self.get("metrics").splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    def stop(self) -> None:
        """The process and its children."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, sign)
                try:
                    self.process.wait(20)
                except subprocess.TimeoutExpired:
                    continue


def _named_vllm(folder: Path) -> Path:
    """A folder whose metadata says that ``vllm`` is installed: the server asks for that name's
    version, but the package is called ``vllm-cpu``."""
    site = folder / "site"
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return site


def _words(options: dict[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        if value is not False:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words
