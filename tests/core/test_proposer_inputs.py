"""NgramProposer's errors, its warnings, and copies of it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramIndex, NgramProposer

ROWS = 5
CONFIG = NgramConfig(min_n=2, max_n=4, k=3)
ENGINES = ["scan", "index"]
OPERATORS = {"scan": "ngram_step_", "index": "ngram_index_step_"}


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "token_ids": rng.integers(0, 3, (ROWS, 80), dtype=np.int32),
        "num_tokens": np.array([40, 0, 79, 2, 33], np.int32),
        "sampled_token_ids": rng.integers(0, 3, (ROWS, 2), dtype=np.int32),
    }


def _tensors(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.tensor(array) for name, array in batch.items()}


@pytest.mark.parametrize("config", [None, {"min_n": 2}])
def test_a_config_is_wanted(config: Any) -> None:
    with pytest.raises(TypeError, match="NgramProposer: config: expected NgramConfig, got"):
        NgramProposer(config)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["token_ids", "num_tokens", "sampled_token_ids", "discard"])
@pytest.mark.parametrize("first", ["torch", "numpy"])
def test_torch_and_numpy_are_not_mixed(first: str, name: str, engine: Any) -> None:
    proposer = NgramProposer(CONFIG, engine)
    arrays = {**_batch(), "discard": np.zeros(ROWS, np.bool_)}
    ours, theirs = arrays, _tensors(arrays)
    if first == "torch":
        ours, theirs = theirs, ours
    mixed: dict[str, Any] = {**ours, name: theirs[name]}
    with pytest.raises(ValueError, match=rf"^{OPERATORS[engine]}: \w+: expected a .*, got \w+$"):
        proposer.step(**mixed)
    assert proposer.index is None


def test_an_index_is_of_one_kind() -> None:
    proposer = NgramProposer(CONFIG, "index")
    proposer.step(**_batch())
    with pytest.raises(ValueError, match=r"token_ids: expected a numpy array, got Tensor"):
        proposer.step(**_tensors(_batch()))
    with pytest.raises(ValueError, match=r"slot_indices: expected a numpy array, got Tensor"):
        proposer.reset(torch.zeros(1, dtype=torch.int32))
    proposer = NgramProposer(CONFIG, "index")
    proposer.step(**_tensors(_batch()))
    with pytest.raises(ValueError, match=r"expected a torch.Tensor as index, got nda"):
        proposer.reset(np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.zeros((ROWS, 80), np.int64)}, "token_ids: expected int32, got int64"),
        ({"token_ids": np.zeros(80, np.int32)}, "token_ids: .* got rank 1"),
        ({"token_ids": [[1]]}, "token_ids: .* got list"),
        ({"num_tokens": np.zeros(3, np.int32)}, "num_tokens: expected size 5, got size 3"),
        ({"sampled_token_ids": np.zeros((ROWS, 2))}, "expected int32, got float64"),
        ({"sampled_token_ids": np.zeros((ROWS, 2), np.int64)}, r"got int64 \(convert it: "),
    ],
)
def test_a_refused_call_keeps_no_index(change: dict[str, Any], message: str) -> None:
    proposer = NgramProposer(CONFIG, "index")
    with pytest.raises(ValueError, match=f"ngram_index_step_: .*{message}"):
        proposer.step(**{**_batch(), **change})
    assert proposer.index is None
    if "sampled_token_ids" not in change:
        prompts = {name: {**_batch(), **change}[name] for name in ("token_ids", "num_tokens")}
        with pytest.raises(ValueError, match=f"ngram_index_append_: .*{message}"):
            proposer.append(**prompts)
        assert proposer.index is None
    proposer.step(**_batch())
    assert proposer.index is not None
    assert proposer.index.num_slots == ROWS


def test_the_index_refuses_rows_on_a_device_and_auto_scans_them() -> None:
    batch = {name: tensor.to("meta") for name, tensor in _tensors(_batch()).items()}
    rows = {name: batch[name] for name in ("token_ids", "num_tokens")}
    refused = ": expected .* on meta, got .*: the index is in host memory"
    for config, engine, option in (
        (CONFIG, "index", "engine"),
        (NgramConfig(sizes="ladder"), "auto", "sizes"),
    ):
        proposer = NgramProposer(config, engine)
        for method, given in (("step", batch), ("propose", rows), ("append", rows)):
            with pytest.raises(ValueError, match=f"^NgramProposer: {option}{refused}"):
                getattr(proposer, method)(**given)
    assert NgramProposer(CONFIG, "auto").step(**batch).next_token_ids.device.type == "meta"


def test_rows_without_a_slot_are_warned_of_once() -> None:
    proposer = NgramProposer(CONFIG, "index", num_slots=3)
    few = _batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposer.step(**{**few, "sampled_token_ids": few["sampled_token_ids"][:3]})
        proposer.step(**few, slot_indices=np.array([2, 1, 0, 7, 8], np.int32))
    batch, other = _batch(), _batch()
    with pytest.warns(UserWarning, match="index has 3 slots; rows beyond are scanned") as seen:
        found = proposer.step(**batch)
    assert seen[0].filename == __file__
    truth = NgramProposer(CONFIG, "scan").step(**other)
    np.testing.assert_array_equal(found.draft_token_ids, truth.draft_token_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposer.step(**batch)
    prompts = NgramProposer(CONFIG, "index", num_slots=3)
    with pytest.warns(UserWarning, match="3 slots"):
        prompts.append(batch["token_ids"], batch["num_tokens"])


def test_the_warning_breaks_no_graph() -> None:
    proposer = NgramProposer(CONFIG, "index", num_slots=3)
    batch, other = _tensors(_batch()), _tensors(_batch())
    proposer.append(**{n: other[n][:3] for n in ("token_ids", "num_tokens")})  # makes the index
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: proposer.step(**given), fullgraph=True, backend="eager")
    truth = NgramProposer(CONFIG, "scan").step(**other)
    assert torch.equal(compiled(batch).draft_token_ids, truth.draft_token_ids)


def _through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES = [copy.copy, copy.deepcopy, _through_pickle]


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("kind", [dict, _tensors])
def test_a_copy_makes_an_index_of_its_own(
    kind: Callable[[dict[str, np.ndarray]], Any], duplicate: Callable[[Any], Any]
) -> None:
    fresh = NgramProposer(CONFIG, "index", num_slots=9)
    used = duplicate(fresh)
    assert used.index is None
    batch = kind(_batch())
    used.step(**batch)
    again = duplicate(used)
    assert again.index is None
    assert (again.config, again.engine) == (used.config, used.engine)
    found, truth = again.step(**kind(_batch())), fresh.step(**kind(_batch()))
    assert np.array_equal(found.draft_token_ids, truth.draft_token_ids)
    assert again.index is not used.index
    assert again.index.num_slots == 9
    assert used.index.statistics.rows_indexed == again.index.statistics.rows_indexed


@pytest.mark.parametrize("duplicate", COPIES)
def test_an_index_is_not_copied(duplicate: Callable[[Any], Any]) -> None:
    for index in (
        NgramIndex(2, 100, min_n=2, max_n=4),
        NgramIndex(2, 100, min_n=2, max_n=4, kind="torch"),
    ):
        with pytest.raises(TypeError, match=r"^NgramIndex: .* make a new one"):
            duplicate(index)


TYPED = """
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type

from ngram_npu import Drafts, NgramProposer, StepResult

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

def calls(proposer: NgramProposer, array: Ids, mask: Mask, tensor: torch.Tensor) -> None:
    assert_type(proposer.propose(array, array, num_sampled=array), Drafts[npt.NDArray[Any]])
    assert_type(proposer.propose(tensor, tensor).draft_token_ids, torch.Tensor)
    assert_type(proposer.step(tensor, tensor, tensor), StepResult[torch.Tensor])
    proposer.step(array, array, array, discard=mask)
    proposer.reset([1, 2])  # type: ignore[type-var]
    proposer.propose(array, tensor)  # type: ignore[type-var]
    proposer.step(tensor, tensor, array)  # type: ignore[type-var]
    proposer.append(tensor, tensor, slot_indices=array)  # type: ignore[type-var]
"""


def test_mypy_refuses_mixed_calls(tmp_path: Path) -> None:
    """It also knows the result types. In strict mode an unused ignore is an error. Run where lint
    runs, it shares its cache."""
    pytest.importorskip("mypy")
    file = tmp_path / "calls.py"
    file.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
