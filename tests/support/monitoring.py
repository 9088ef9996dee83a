"""Reads the metric names in examples/monitoring."""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "monitoring"


def find_metric_names(file: str, prefix: str) -> set[str]:
    """Returns the names with this prefix in the queries of a dashboard or of alert rules."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    if file.endswith(".json"):
        panels = json.loads(text)["panels"]
        queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
        text = " ".join(queries)
    return set(re.findall(rf"\b{prefix}\w+", text))
