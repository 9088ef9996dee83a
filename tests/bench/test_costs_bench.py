"""The bench of costs fitted on logs."""

from __future__ import annotations

from tools.bench.ops.costs import _compared, _edited, _longer


def test_edited_files_and_longer_drafts() -> None:
    files = _edited()
    assert files[0].tokens().tolist() == _edited()[0].tokens().tolist()
    found = _longer(files[:2])
    assert found["k32"]["tokens_per_step"] > 1.5 * found["k8"]["tokens_per_step"] > 1.5


def test_the_comparison_is_of_the_same_drafts() -> None:
    files = _edited()
    found = _compared(files[:2], files[2:4])
    assert found["drafts_as_simulated"]
    assert 0.9 < found["without_store"]["ratio"] < 1.1
