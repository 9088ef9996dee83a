"""Tests the example that fills a store with Ray Data, on Ray's local cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import make_conversations
from ngram_npu_cli.learn import LearnOptions, learn

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ray_data" / "learn_folder.py"


@pytest.mark.slow
def test_store_of_ray_data_is_that_of_one_process(
    tmp_path: Path, no_torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray saves the cluster's authentication token there
    folder = tmp_path / "logs"
    folder.mkdir()
    for seed, name in enumerate("abcdefg"):
        records = make_conversations(5, seed, name)
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    output = tmp_path / "ray.store"
    subprocess.run(
        [sys.executable, EXAMPLE, folder, output, "--shares", "3", "--tokenizer", "bytes"],
        check=True,
    )
    learn([folder], tmp_path / "one.store", LearnOptions(tokenizer="bytes"))
    assert output.read_bytes() == (tmp_path / "one.store").read_bytes()
