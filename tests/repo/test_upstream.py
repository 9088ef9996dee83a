"""Tests that docs/design/upstream.md lists exactly what the plugin for vLLM replaces. An engine
test compares the declaration with the modules of vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from ngram_npu.engines.vllm.patching import ASCEND_SYMBOLS, INSTANCE_SYMBOLS, SYMBOLS

PAGE = Path(__file__).parents[2] / "docs" / "design" / "upstream.md"


def list_symbols(heading: str) -> list[str]:
    """Returns the symbols in the first column of the table below this heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", section, re.M)
    return [symbol for row in rows for symbol in re.findall(r"`(.*?)`", row)]


def test_page_lists_exactly_the_symbols_that_the_plugin_replaces() -> None:
    assert sorted(list_symbols("vLLM")) == sorted(SYMBOLS + INSTANCE_SYMBOLS)
    assert sorted(list_symbols("vLLM-Ascend")) == sorted(ASCEND_SYMBOLS)
