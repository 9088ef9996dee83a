"""Runs speculators with one fault each in the engine, each in a process of its own, which may
crash. Prints one line of JSON: each process's exit status and result. Argument: the model."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

REQUESTS = 4


def no_fault(speculator: Any) -> None:
    """No fault, for comparison."""


def num_rejected_off_by_one(speculator: Any) -> None:
    """Rows with rejected drafts end one token too early."""
    propose, (tokens, lengths) = speculator.propose, speculator._state

    def wrong(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrong_lengths = lengths.clone()
        wrong_lengths[input_batch.idx_mapping] -= (args[5] > 0).int()
        speculator._state = tokens, wrong_lengths
        return propose(input_batch, *args, **kwargs)

    speculator.propose = wrong


def history_overwritten(speculator: Any) -> None:
    """The drafts are written to the next tokens' places, one place too early."""
    propose, (tokens, lengths) = speculator.propose, speculator._state

    def wrong(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(input_batch, *args, **kwargs)
        rows = input_batch.idx_mapping
        tokens[rows, lengths[rows] - 1] = drafts[:, 0].int()
        return drafts

    speculator.propose = wrong


def int32_drafts(speculator: Any) -> None:
    propose = speculator.propose
    speculator.propose = lambda *args, **kwargs: propose(*args, **kwargs).int()


def one_token_too_many(speculator: Any) -> None:
    propose = speculator.propose

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(*args, **kwargs)
        return torch.cat([drafts, drafts[:, -1:]], dim=1)

    speculator.propose = wrong


FAULTS = [
    no_fault,
    num_rejected_off_by_one,
    history_overwritten,
    int32_drafts,
    one_token_too_many,
]


def _run(model: Path, fault: Any, result: Path) -> None:
    method = replace(v2_runs.METHODS["async-scan"], prepare=fault)
    result.write_text(json.dumps(asdict(v2_runs.run(model, method, first=REQUESTS))))


def _forked(model: Path, fault: Any, result: Path) -> dict[str, Any]:
    """Forks after vLLM's import, which takes most of a process's time, and before vLLM has run."""
    child = os.fork()
    if child == 0:
        try:
            _run(model, fault, result)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = json.loads(result.read_text()) if result.exists() else {}
    return {"status": status, "result": found}


if __name__ == "__main__":
    import v2_runs

    with tempfile.TemporaryDirectory() as folder:
        model = Path(sys.argv[1])
        ends = {f.__name__: _forked(model, f, Path(folder) / f.__name__) for f in FAULTS}
    print("\nRESULT " + json.dumps(ends))
