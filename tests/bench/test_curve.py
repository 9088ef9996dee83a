"""The README's curve shows the committed figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench import curve


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(curve.RESULT.read_text())
    return document


def test_the_lines_are_the_committed_medians() -> None:
    document = _document()
    (axes,) = curve.draw(document).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == list(curve.LINES.values())
    for contestant, label in curve.LINES.items():
        for result, x, y in zip(
            sorted(document["results"], key=lambda result: result["context"]),
            lines[label].get_xdata(),
            lines[label].get_ydata(),
            strict=True,
        ):
            figures = result["ours"] if contestant == "ours" else result["peers"][contestant]
            assert (x, y) == (result["context"], figures["median_us"])
    assert len(document["results"]) >= 6


def test_the_command_draws(tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    curve.main([str(curve.RESULT), str(picture)])
    assert picture.read_text().lstrip().startswith("<?xml")
    assert curve.PICTURE.exists()


@pytest.mark.parametrize("fault", ["batch", "peer"])
def test_a_file_that_is_no_curve_is_refused(fault: str) -> None:
    document = _document()
    if fault == "batch":
        document["results"][0]["batch"] += 1
    else:
        del document["results"][-1]["peers"]["vllm-numba"]
    with pytest.raises(ValueError, match="one batch size" if fault == "batch" else "no vllm-numba"):
        curve.draw(document)
