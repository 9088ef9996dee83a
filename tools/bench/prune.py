"""Cuts the committed results down to what the documents quote.

python -m tools.bench.prune

What a table quotes stays, with the values directly beside it (the spread, the counts), and so does
how it was measured. `ALSO` names what is needed beyond the tables.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tools import docs_tables
from tools.bench.figures import RESULTS, Place, place
from tools.bench.report import laid_out

ALSO = {
    # docs/design/drafts.svg
    "acceptance.json": ("whole.peers", "whole_by_limit", "odd_calibration.token"),
    # docs/step-time.svg, and SHORT_ROW in python/ngram_npu/config.py
    "ngram_index_step_-curve.json": ("ours", "peers.vllm-numba", "peers.ours:engine=scan"),
    # SHORT_CONTEXT in python/ngram_npu/config.py
    "vllm-propose.json": ("ours", "peers.ours:engine=scan"),
    # the executors' thresholds in csrc/numpy and csrc/torch
    "crossover.json": ("ratio", "break_even_tokens"),
    # what the bench vllm-predicted reads
    "vllm-end-to-end.json": ("ratio", "drafts.ours"),
    # the setting that docs/guides/tune.md names
    "tune-example.json": ("recommended.config",),
    "async-proof.json": ("failed", "kinds", "totals"),
}
"""Of a result, or of each entry of its `results`, where it is there."""
PROOFS = {
    "ascendc-mutants.json", "cuda-mutants.json", "mutants.json", "fuzz-index.json",
    "fuzz-store.json", "fuzz-store-file.json",
}  # fmt: skip
"""Kept whole: they have no figures to choose from."""
CIRCUMSTANCES = {
    "machine", "versions", "settings", "config", "skipped", "assumptions", "data", "traffic",
    "cost", "tokenizer", "figures",
}  # fmt: skip
"""How something was measured: kept wherever it stands."""


def quoted(name: str, document: dict[str, Any]) -> set[Place]:
    """The places of a result that something quotes.

    Raises:
        LookupError: a table quotes what is not there.
    """
    found = {place(document, path) for path in _by_tables().get(name, ())}
    parts: list[tuple[Place, Any]] = [((), document)]
    if isinstance(results := document.get("results"), list):
        parts += [(("results", i), entry) for i, entry in enumerate(results)]
    for start, within in parts:
        for path in ALSO.get(name, ()):
            with suppress(LookupError):
                found.add((*start, *place(within, path)))
    return found | {tuple("ratio_spread" if k == "ratio" else k for k in one) for one in found}


def cut(value: Any, places: Collection[Place]) -> Any:
    """The value without what is neither quoted, nor beside it, nor says how it was measured."""
    if () in places or not isinstance(value, (dict, list)):
        return value
    below: dict[str | int, set[Place]] = defaultdict(set)
    for key, *rest in places:
        below[key].add(tuple(rest))
    if isinstance(value, list):
        return [cut(one, below[i]) for i, one in enumerate(value) if i in below]
    kept = {}
    for key, one in value.items():
        # A report of `ngram-npu tune` calls so what it chose from.
        if key in CIRCUMSTANCES and not (key == "settings" and isinstance(one, list)):
            kept[key] = one
        elif key in below or not isinstance(one, (dict, list)):
            kept[key] = cut(one, below[key])
    return kept


def pruned(path: Path) -> str:
    """The text of a result's file, cut, in the layout that it has.

    Raises:
        LookupError: nothing quotes the result, or a table quotes what is not there.
    """
    if path.name not in PROOFS | ALSO.keys() | _by_tables().keys():
        raise LookupError(f"{path.name}: expected a table that quotes it, found none")
    text = path.read_text(encoding="utf-8")
    if path.name in PROOFS:
        return text
    document = json.loads(text)
    short = cut(document, quoted(path.name, document))
    for indent in (1, 2):
        if text == json.dumps(document, indent=indent, ensure_ascii=False) + "\n":
            return json.dumps(short, indent=indent, ensure_ascii=False) + "\n"
    return laid_out(short) + "\n"


@cache
def _by_tables() -> dict[str, set[str]]:
    """Paths by file."""
    found: dict[str, set[str]] = {}
    for table in docs_tables.tables().values():
        for file, path, _ in docs_tables.figures(table):
            found.setdefault(file, set()).add(path)
    return found


if __name__ == "__main__":
    for result in sorted(RESULTS.glob("*.json")):
        result.write_text(pruned(result), encoding="utf-8")
