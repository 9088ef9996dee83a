"""Fills one store from a folder of logs, with Ray Data on all machines of a Ray cluster.

    python learn_folder.py s3://bucket/logs/ all.store --shares 64 --tokenizer ORG/NAME

Each task reads a share of the files and returns a store. This process merges the stores in the
order of the files. Without a cluster, Ray starts one on this machine. Every machine needs
ngram_npu, the tokenizer, and access to the folder: remote storage, or a file system that all share.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
from ngram_npu_cli.learn import LearnOptions, format_report, learn


def fill_store(row: dict[str, Any], folder: str, num_shares: int, tokenizer: str) -> dict[str, Any]:
    """Returns the row with the bytes of the store of its share."""
    options = LearnOptions(shard=f"{row['item']}/{num_shares}", tokenizer=tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "share.store"
        learn([folder], path, options)
        return {**row, "store": path.read_bytes()}


def learn_folder(folder: str, output: Path, num_shares: int, tokenizer: str) -> str:
    """Saves the store of all logs in a folder, and returns a report."""
    shares = ray.data.from_items(list(range(1, num_shares + 1)), override_num_blocks=num_shares)
    rows = shares.map(fill_store, fn_args=(folder, num_shares, tokenizer))
    with tempfile.TemporaryDirectory() as scratch:
        for row in rows.iter_rows():
            (Path(scratch) / f"{row['item']}.store").write_bytes(row["store"])
        # The text of the newest share must be the newest in the store.
        stores = [Path(scratch) / f"{number}.store" for number in range(1, num_shares + 1)]
        return format_report(learn(stores, output, LearnOptions(tokenizer=tokenizer)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a folder, also as a URL that fsspec can open")
    parser.add_argument("output", type=Path, help="the file of the store")
    parser.add_argument("--shares", type=int, default=8, help="number of tasks (default: 8)")
    parser.add_argument("--tokenizer", required=True, help="as for ngram-npu learn")
    arguments = parser.parse_args()
    ray.init(include_dashboard=False)
    print(learn_folder(arguments.folder, arguments.output, arguments.shares, arguments.tokenizer))


if __name__ == "__main__":
    main()
