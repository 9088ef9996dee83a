"""The second run on a machine with a GPU: ``make gpu-rest``, after ``make gpu``."""

from __future__ import annotations

import sys

from tools.gpu.__main__ import DEADLINE_SECONDS, environment, findings, rest
from tools.runner import main

if __name__ == "__main__":
    sys.exit(main("gpu.rest", rest, findings, seconds=DEADLINE_SECONDS, environment=environment()))
