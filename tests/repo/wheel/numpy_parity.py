"""Compares every operator on numpy arrays with its reference, without torch and pytest.
tools/pythons.py runs this script with each Python."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ngram_npu import _C
from ops.parity import as_arrays, check_results
from ops.specs import OPSPECS, clone_args

assert "torch" not in sys.modules
num_samples = 0
for spec in OPSPECS.values():
    for sample in spec.samples:
        expected_args, got_args = clone_args(sample.args), clone_args(sample.args)
        expected = as_arrays(spec.reference(*expected_args))
        got = as_arrays(getattr(_C, spec.name)(*got_args))
        check_results(spec, sample, got, got_args, expected, expected_args)
        num_samples += 1
assert num_samples >= 10 * len(OPSPECS)
