"""Which of two drafts to take, from a recording of both at every position."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # for the reference's rule
