"""Benchmarks your server with and without drafting: runs `vllm bench serve` and writes JSON.

    python tools/vllm_serve_bench.py --model MODEL [--json FILE] [--bench "OPTION ..."] \
        [-- SERVE-OPTION ...]

For each variant the script starts `vllm serve MODEL SERVE-OPTION ...`, waits until it answers, runs
`vllm bench serve OPTION ...`, reads `/metrics`, and stops the server. The variants take turns, so
that a hot or busy machine affects all of them equally. Needs only the `vllm` command, with
ngram_npu installed in the same environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

BENCH = (
    "--dataset-name random --random-input-len 1024 --random-output-len 256 --num-prompts 64 "
    "--max-concurrency 16 --ignore-eos --temperature 0 --num-warmups 16"
)
FIGURES = (
    "output_throughput",
    "total_token_throughput",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
)
COUNTERS = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "ngram_npu_propose_seconds_total",
    "ngram_npu_proposals_total",
)


class ServerError(Exception):
    """The server did not come up; the end of its log is printed before."""


def variants(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """By name, what each adds to `vllm serve`."""
    k = arguments.num_speculative_tokens
    lookup = {
        "prompt_lookup_min": arguments.prompt_lookup_min,
        "prompt_lookup_max": arguments.prompt_lookup_max,
    }
    ours = {
        "method": "custom_class",
        "model": "ngram_npu.vllm.NgramProposer",
        "num_speculative_tokens": k,
    }
    stock = {"method": "ngram", "num_speculative_tokens": k, **lookup}
    return {
        "none": [],
        "ngram": ["--speculative-config", json.dumps(stock)],
        "ngram_npu": [
            "--speculative-config",
            json.dumps(ours),
            "--additional-config",
            json.dumps({"ngram_npu": lookup}),
        ],
    }


def main() -> int:
    arguments = _arguments()
    chosen = {name: variants(arguments)[name] for name in arguments.variants.split(",")}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for number in range(arguments.repeat):
        for name, options in chosen.items():
            print(f"run {number + 1} of {arguments.repeat}: {name}", file=sys.stderr)
            runs[name].append(_run(arguments, options))
    figures = {name: _figures(of) for name, of in runs.items()}
    result = {
        "command": _command(sys.argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        **({"note": arguments.note} if arguments.note else {}),
        "model": Path(arguments.model).name,
        "versions": _versions(arguments.vllm),
        "serve": arguments.serve,
        "bench": arguments.bench,
        "repeat": arguments.repeat,
        "figures": figures,
    }
    text = json.dumps(result, indent=1) + "\n"
    if arguments.json is None:
        sys.stdout.write(text)
    else:
        arguments.json.write_text(text)
    for name, of in figures.items():
        shown = ", ".join(f"{key} {value['median']:.4g}" for key, value in of.items())
        print(f"{name:10} {shown}", file=sys.stderr)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as for `vllm serve`")
    parser.add_argument("--vllm", default="vllm", help="the command (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write (default: stdout)")
    parser.add_argument("--note", default="", help="a remark kept in the JSON")
    parser.add_argument("--variants", default="none,ngram,ngram_npu", help="default: %(default)s")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--prompt-lookup-min", type=int, default=2, metavar="N")
    parser.add_argument("--prompt-lookup-max", type=int, default=5, metavar="N")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument(
        "--startup-s", type=float, default=900, help="most seconds until it answers"
    )
    parser.add_argument(
        "--bench", default=BENCH, help="options of `vllm bench serve` (default: %(default)s)"
    )
    parser.add_argument("serve", nargs="*", help="after --: options of `vllm serve`")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        # The engine is a process of its own; its counters reach /metrics through this folder.
        shared = Path(scratch) / "metrics"
        shared.mkdir()
        serve = [arguments.vllm, "serve", arguments.model, "--port", str(arguments.port)]
        with (Path(scratch) / "server.log").open("w+") as log:
            server = subprocess.Popen(
                [*serve, *arguments.serve, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(shared)},
                start_new_session=True,
            )
            try:
                _wait(arguments, server)
                figures = _bench(arguments, Path(scratch))
                figures.update(_counters(arguments.port))
            except Exception:
                log.seek(0)
                sys.stderr.write(log.read()[-4000:])
                raise
            finally:
                _stop(server)
    return figures


def _wait(arguments: argparse.Namespace, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + arguments.startup_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerError(f"the server ended with {server.returncode} before it answered")
        try:
            _get(arguments.port, "health")
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return
    raise ServerError(f"the server did not answer within {arguments.startup_s:.0f} s")


def _bench(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    command = [arguments.vllm, "bench", "serve", "--model", arguments.model]
    command += ["--port", str(arguments.port), *shlex.split(arguments.bench)]
    command += ["--save-result", "--result-dir", str(scratch), "--result-filename", "result.json"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    result = json.loads((scratch / "result.json").read_text())
    return {name: result[name] for name in FIGURES if name in result}


def _counters(port: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in _get(port, "metrics").splitlines():
        name = line.partition("{")[0]
        if name in COUNTERS:
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
        text: bytes = answer.read()
    return text.decode()


def _stop(server: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if server.poll() is None:
            os.killpg(server.pid, sign)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                continue


def _figures(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in set(runs[0]).intersection(*runs):
        values = [run[name] for run in runs]
        of = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        found[name] = {key: float(f"{value:.5g}") for key, value in of.items()}
    return dict(sorted(found.items()))


def _command(words: list[str]) -> str:
    """The command without paths of this machine."""
    kept, options = [Path(words[0]).name], iter(words[1:])
    for word in options:
        if word in ("--vllm", "--json"):
            next(options, None)
        else:
            kept.append(Path(word).name if word.startswith("/") else word)
    return shlex.join(["python", *kept])


def _machine() -> dict[str, Any]:
    """The host; the server's log names the accelerators."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    system = f"{platform.system()} {platform.release()}"
    cores = len(os.sched_getaffinity(0))
    return {"cpu": ", ".join(models) or platform.machine(), "system": system, "cores": cores}


def _versions(vllm: str) -> dict[str, str]:
    def said(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        return (done.stdout.strip().splitlines() or ["unknown"])[-1]

    return {"vllm": said(vllm, "--version"), "ngram_npu": said("ngram-npu", "--version")}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ServerError, subprocess.CalledProcessError) as error:
        sys.exit(f"vllm_serve_bench: {error}")
