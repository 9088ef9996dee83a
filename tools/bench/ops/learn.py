"""What a store brings by how much it has learned, and what learning takes (`ngram-npu learn`)."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ngram_npu import NgramConfig
from ngram_npu.store import BLOCK_TOKENS
from ngram_npu_cli.learn import LearnOptions, Point, learn
from ngram_npu_cli.learn.curve import MOST_TOKENS, Replayed, holding, split
from ngram_npu_cli.learn.learn_report import label
from ngram_npu_cli.learn.reading import Heard, Tokenizing, read_logs
from ngram_npu_cli.logs.files import find_files
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER

from tools.bench.data import default_data
from tools.bench.ops.base import Op, Result, Skipped
from tools.bench.options import BenchError, Options

LARGE_BYTES = 100_000_000


class Learn(Op):
    name = "learn"
    help = "the learning curves of recorded sets, and the time and memory for 100 MB of logs"
    sizes = ()
    unused_settings = frozenset({"config", "k", "match_policy", "threads", "rounds", "device"})
    assumptions: Mapping[str, Any] = {
        "curve": "the last tenth of each set, replayed by NgramProposer with a live store, one "
        "turn after the other as a request; before it the store knew that share of the earlier "
        "answers, the newest ones; k = 8, min_draft_probability = 0.177 (limit 40)",
        "store": "of the size that learn chooses",
        "stored": "all earlier answers, without and with the earlier prompts, in a store that "
        "holds everything",
        "speedup": "computed: a drafted token costs 0.05 of a step",
        "large": "the sets one after the other, again and again: for time and memory, the yield of "
        "such text says nothing",
    }

    def run(self, options: Options, skipped: Skipped) -> Iterator[Result]:
        files = find_files(default_data(options.data))
        yield from map(_curve, files)
        yield _large(files)

    def shown(self, result: Result) -> Result:
        return {"set": result["set"], **result["known"]["all"]} if "known" in result else result


def _curve(file: Path) -> Result:
    found = learn([file], options=LearnOptions(tokenizer=DEFAULT_TOKENIZER))
    return {
        "set": file.name.partition(".")[0],
        "conversations": found.conversations,
        "answer_tokens": found.answer_tokens,
        "evaluated": found.evaluated,
        "store_tokens": found.store_tokens,
        "known": {label(of): _figures(of) for of in found.curve},
        "by_k": {f"k{k}": _figures(of) for k, of in found.by_k.items()},
        "stored": _with_prompts(file),
    }


def _figures(of: Point) -> dict[str, float]:
    return {
        "tokens_per_step": round(of.tokens_per_step, 4),
        "drafted_per_step": round(of.drafted_per_step, 4),
        "speedup": round(of.speedup(LearnOptions.cost), 4),
    }


def _with_prompts(file: Path) -> dict[str, Any]:
    """All earlier answers known, and all earlier prompts too."""
    heard = Heard(MOST_TOKENS // BLOCK_TOKENS)
    read_logs([file], heard, Tokenizing(DEFAULT_TOKENIZER, "auto"), LearnOptions())
    talks = list(heard.recent)
    last, answers = split(talks, heard.conversations, list(heard.texts))
    turns = [t for talk in talks[: -len(last)] for r in talk.requests for t in r.turns]
    everything = [(0, part) for t in turns for part in (t.prompt, t.completion) if len(part) > 1]
    least = LearnOptions.min_draft_probability
    config = NgramConfig(sizes="ladder", k=LearnOptions.k, min_draft_probability=least)
    size = holding(everything)
    return {
        name: _figures(Replayed(last, known, config, lambda *_: None).point(1.0, size))
        for name, known in (("answers", answers), ("prompts too", everything))
    }


def _large(files: Sequence[Path]) -> Result:
    """The command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        logs, store = Path(folder, "logs.jsonl"), Path(folder, "learned.store")
        size = 0
        with logs.open("wb") as into:
            while size < LARGE_BYTES:
                size += sum(map(into.write, _lines(files)))
        given = ["learn", str(logs), "-o", str(store), "--tokenizer", DEFAULT_TOKENIZER]
        report = Path(folder, "report.json")
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "ngram_npu_cli", *given, "--json", str(report)],
            stdout=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise BenchError(f"learn: ngram-npu learn ended with {process.returncode}")
        found = json.loads(report.read_text())
    return {
        "set": "large",
        "megabytes": round(size / 1e6),
        **{name: found[name] for name in ("conversations", "answer_tokens", "store_tokens")},
        "points": len(found["sizes"]) + len(found["curve"]) + len(found["by_k"]) - 2,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1024),
        "file_mb": round(found["file_bytes"] / 1e6),
    }


def _lines(files: Sequence[Path]) -> Iterator[bytes]:
    for file in files:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            yield from (line.rstrip(b"\n") + b"\n" for line in opened)
