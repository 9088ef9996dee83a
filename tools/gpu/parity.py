"""A bounded part of the parity suite on a GPU, for tools under which it runs slowly.

    compute-sanitizer --tool memcheck python -m tools.gpu.parity --seconds 25

Samples of all operators in turn, in an order that a seed decides, until the time is over. Without
torch's pooling of memory (PYTORCH_NO_CUDA_MEMORY_CACHING=1) each tensor is an allocation of its
own, and what lies beyond its guards is nobody's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests")]

from without_hypothesis import install_where_missing  # noqa: E402

install_where_missing()

from backends import Backend  # noqa: E402
from on_device import call_on  # noqa: E402
from ops.parity import check_parity  # noqa: E402
from opspecs import OPSPECS, OpSpec, Sample  # noqa: E402


def run(specs: Sequence[OpSpec], backend: Backend, seconds: float, seed: int) -> dict[str, int]:
    """
    Returns:
        How many samples of each operator were compared; at least one.

    Raises:
        MismatchError: of the first that differs.
    """
    rng = np.random.default_rng(seed)
    end = time.monotonic() + seconds
    with backend.drawing():
        left: dict[str, list[Sample]] = {}
        for spec in specs:
            samples = list(spec.samples(np.random.default_rng(seed)))
            left[spec.name] = [samples[i] for i in rng.permutation(len(samples))]
    done = dict.fromkeys(left, 0)
    while any(left.values()):
        for spec in specs:
            if not left[spec.name]:
                continue
            if time.monotonic() > end and done[spec.name] > 0:
                return done
            check_parity(spec, backend, left[spec.name].pop())
            done[spec.name] += 1
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.parity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    backend = Backend(f"device-{given.device}", call_on(given.device), device=given.device)
    done = run(list(OPSPECS.values()), backend, given.seconds, given.seed)
    print("RESULT", json.dumps({"samples": done}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
