"""The comparison of a million rows and the bounded parity suite, on few and on the CPU: they
compare, and they notice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from backends import Backend
from ngram_npu.config import UNLIMITED
from on_device import call_on
from ops.parity import MismatchError
from opspecs import OPSPECS

from tools.gpu import rows, watched
from tools.gpu.rows import CAPACITY, KINDS, DifferenceError, make_batch


def test_all_kinds_come_and_draft() -> None:
    assert rows.run(500, "cpu")["rows"] == {"random": 500}
    drafted = Counter[str]()
    for number in range(6):
        batch = make_batch(number, 300)
        drafted[batch.kind] += rows.check_batch(batch, "cpu")
    assert min(drafted[kind] for kind in KINDS) > 10


def test_batches_hold_what_they_should() -> None:
    seen = [make_batch(number, 400) for number in range(12)]
    assert (make_batch(5, 400).tokens == seen[5].tokens).all()
    lengths = np.concatenate([b.lengths for b in seen])
    assert lengths.min() < 0
    assert lengths.max() > CAPACITY
    assert {b.options["match_policy"] for b in seen} == {0, 1}
    assert UNLIMITED in {b.options["max_len"] for b in seen}


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ("ngram_propose", "result"),
        ("ngram_step_", "result"),
        ("ngram_step_", "row"),
        ("ngram_index_propose_", "result"),
        ("ngram_index_step_", "result"),
        ("ngram_index_step_", "row"),
    ],
)
def test_a_wrong_operator_is_caught(op: str, fault: str) -> None:
    def wrong(*args: Any, **keywords: Any) -> Any:
        results = getattr(torch.ops.ngram_npu, op)(*args, **keywords)
        target = results[0] if fault == "result" else args[0]
        target.view(-1)[target.shape[-1] * 7 if target.dim() > 1 else 7] += 1
        return results

    with pytest.raises(DifferenceError, match=rf"{op}: result \d, row 7 of length"):
        rows.check_batch(make_batch(1, 64), "cpu", {op: wrong})


def test_the_bounded_parity_suite() -> None:
    specs = [OPSPECS["prepare_inputs"], OPSPECS["ngram_propose"]]
    backend = Backend("device-cpu", call_on("cpu"))
    assert set(watched.parity(specs, backend, 0.0).values()) == {1}
    done = watched.parity(specs[:1], backend, 30.0)
    assert done["prepare_inputs"] == len(list(specs[0].samples(np.random.default_rng(1))))

    def wrong(op: str, args: Any) -> Any:
        return tuple(result + 1 for result in call_on("cpu")(op, args))

    with pytest.raises(MismatchError):
        watched.parity(specs[:1], Backend("wrong", wrong), 30.0)
