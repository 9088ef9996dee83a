"""Long checks with many cases or with deliberate faults."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "support")]  # they run what the tests are made of
