"""The samples with what the references make of them, made once for all tests in a process: that
takes longer than most of the calls that are compared with them."""

from __future__ import annotations

from functools import cache

import numpy as np
from ngram_npu.ops import workspace_size
from ops.parity import Case, case_of
from ops.specs import OPSPECS, Args, OpSpec, Sample


def sized(spec: OpSpec, args: Args) -> Args:
    """With a workspace of the size that is told to suffice."""
    values = dict(zip([name for name, _ in spec.arguments], args, strict=True))
    first = ("sampled_token_ids", "row_indices", "prev_positions", "token_ids")
    batch = next(len(values[name]) for name in first if values.get(name) is not None)
    return spec.replace(args, workspace=np.zeros(workspace_size(spec.name, batch), np.int32))


@cache
def cases_of(op: str) -> list[Case]:
    """Of what takes a workspace, two samples of three have one of the told size. The reference
    leaves it alone, so a kernel must leave zeros in it."""
    spec = OPSPECS[op]
    samples = list(spec.samples(np.random.default_rng(2026)))
    if "workspace" in spec.tensor_names:
        for i, sample in enumerate(samples):
            if i % 3:
                samples[i] = Sample(sample.label, sized(spec, sample.args), sample.compare)
    return [case_of(spec, sample) for sample in samples]
