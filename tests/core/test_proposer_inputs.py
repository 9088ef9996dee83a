"""Tests the arguments that NgramProposer rejects, its warnings, copies, and type annotations."""

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

NUM_ROWS = 5
CONFIG = NgramConfig(min_n=2, max_n=4, k=3)
ENGINES = ["scan", "index"]
OPERATORS = {"scan": "ngram_step_", "index": "ngram_index_step_"}


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "token_ids": rng.integers(0, 3, (NUM_ROWS, 80), dtype=np.int32),
        "num_tokens": np.array([40, 0, 79, 2, 33], np.int32),
        "sampled_token_ids": rng.integers(0, 3, (NUM_ROWS, 2), dtype=np.int32),
    }


def convert_to_tensors(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.tensor(array) for name, array in batch.items()}


@pytest.mark.parametrize("config", [None, {"min_n": 2}])
def test_config_of_wrong_type_is_rejected(config: Any) -> None:
    with pytest.raises(TypeError, match="NgramProposer: config: expected NgramConfig, got"):
        NgramProposer(config)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["token_ids", "num_tokens", "sampled_token_ids", "discard"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_step_rejects_mixed_arrays_and_tensors(kind: str, name: str, engine: Any) -> None:
    proposer = NgramProposer(CONFIG, engine)
    arrays = {**make_batch(), "discard": np.zeros(NUM_ROWS, np.bool_)}
    arguments = {"numpy": arrays, "torch": convert_to_tensors(arrays)}
    other_kind = "torch" if kind == "numpy" else "numpy"
    mixed_arguments: dict[str, Any] = {**arguments[kind], name: arguments[other_kind][name]}
    with pytest.raises(ValueError, match=rf"^{OPERATORS[engine]}: \w+: expected a .*, got \w+$"):
        proposer.step(**mixed_arguments)
    assert proposer.index is None


def test_index_created_from_arrays_rejects_tensors_and_vice_versa() -> None:
    proposer = NgramProposer(CONFIG, "index")
    proposer.step(**make_batch())
    with pytest.raises(ValueError, match=r"token_ids: expected a numpy array, got Tensor"):
        proposer.step(**convert_to_tensors(make_batch()))
    with pytest.raises(ValueError, match=r"slot_indices: expected a numpy array, got Tensor"):
        proposer.reset(torch.zeros(1, dtype=torch.int32))
    proposer = NgramProposer(CONFIG, "index")
    proposer.step(**convert_to_tensors(make_batch()))
    with pytest.raises(ValueError, match=r"expected a torch.Tensor as index, got nda"):
        proposer.reset(np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.zeros((NUM_ROWS, 80), np.int64)}, "token_ids: expected int32, got int64"),
        ({"token_ids": np.zeros(80, np.int32)}, "token_ids: .* got rank 1"),
        ({"token_ids": [[1]]}, "token_ids: .* got list"),
        ({"num_tokens": np.zeros(3, np.int32)}, "num_tokens: expected size 5, got size 3"),
        ({"sampled_token_ids": np.zeros((NUM_ROWS, 2))}, "expected int32, got float64"),
        ({"sampled_token_ids": np.zeros((NUM_ROWS, 2), np.int64)}, r"got int64 \(convert it: "),
    ],
)
def test_rejected_call_creates_no_index(change: dict[str, Any], message: str) -> None:
    proposer = NgramProposer(CONFIG, "index")
    with pytest.raises(ValueError, match=f"ngram_index_step_: .*{message}"):
        proposer.step(**{**make_batch(), **change})
    assert proposer.index is None
    if "sampled_token_ids" not in change:
        prompts = {name: {**make_batch(), **change}[name] for name in ("token_ids", "num_tokens")}
        with pytest.raises(ValueError, match=f"ngram_index_append_: .*{message}"):
            proposer.append(**prompts)
        assert proposer.index is None
    proposer.step(**make_batch())
    assert proposer.index is not None
    assert proposer.index.num_slots == NUM_ROWS


def test_index_rejects_rows_on_a_device_and_auto_scans_them() -> None:
    batch = {name: tensor.to("meta") for name, tensor in convert_to_tensors(make_batch()).items()}
    rows = {name: batch[name] for name in ("token_ids", "num_tokens")}
    message = ": expected .* on meta, got .*: the index is in host memory"
    for config, engine, option in (
        (CONFIG, "index", "engine"),
        (NgramConfig(sizes="ladder"), "auto", "sizes"),
    ):
        proposer = NgramProposer(config, engine)
        for method, arguments in (("step", batch), ("propose", rows), ("append", rows)):
            with pytest.raises(ValueError, match=f"^NgramProposer: {option}{message}"):
                getattr(proposer, method)(**arguments)
    assert NgramProposer(CONFIG, "auto").step(**batch).next_token_ids.device.type == "meta"


def test_rows_without_a_slot_cause_one_warning() -> None:
    proposer = NgramProposer(CONFIG, "index", num_slots=3)
    batch = make_batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposer.step(**{**batch, "sampled_token_ids": batch["sampled_token_ids"][:3]})
        proposer.step(**batch, slot_indices=np.array([2, 1, 0, 7, 8], np.int32))
    batch, scan_batch = make_batch(), make_batch()
    with pytest.warns(
        UserWarning, match="index has 3 slots; the other rows are scanned"
    ) as records:
        result = proposer.step(**batch)
    assert records[0].filename == __file__
    expected = NgramProposer(CONFIG, "scan").step(**scan_batch)
    assert np.array_equal(result.draft_token_ids, expected.draft_token_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposer.step(**batch)
    proposer = NgramProposer(CONFIG, "index", num_slots=3)
    with pytest.warns(UserWarning, match="3 slots"):
        proposer.append(batch["token_ids"], batch["num_tokens"])


def test_warning_causes_no_graph_break() -> None:
    proposer = NgramProposer(CONFIG, "index", num_slots=3)
    batch, scan_batch = (convert_to_tensors(make_batch()) for _ in range(2))
    rows = {name: scan_batch[name][:3] for name in ("token_ids", "num_tokens")}
    proposer.append(**rows)  # creates the index
    torch._dynamo.reset()
    step: Any = torch.compile(
        lambda arguments: proposer.step(**arguments), fullgraph=True, backend="eager"
    )
    expected = NgramProposer(CONFIG, "scan").step(**scan_batch)
    assert torch.equal(step(batch).draft_token_ids, expected.draft_token_ids)


def pickle_and_unpickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPY_FUNCTIONS = [copy.copy, copy.deepcopy, pickle_and_unpickle]


@pytest.mark.parametrize("duplicate", COPY_FUNCTIONS)
@pytest.mark.parametrize("convert", [dict, convert_to_tensors])
def test_copy_creates_its_own_index(
    convert: Callable[[dict[str, np.ndarray]], Any], duplicate: Callable[[Any], Any]
) -> None:
    original = NgramProposer(CONFIG, "index", num_slots=9)
    first_copy = duplicate(original)
    assert first_copy.index is None
    batch = convert(make_batch())
    first_copy.step(**batch)
    second_copy = duplicate(first_copy)
    assert second_copy.index is None
    assert (second_copy.config, second_copy.engine) == (first_copy.config, first_copy.engine)
    result = second_copy.step(**convert(make_batch()))
    expected = original.step(**convert(make_batch()))
    assert np.array_equal(result.draft_token_ids, expected.draft_token_ids)
    assert second_copy.index is not first_copy.index
    assert second_copy.index.num_slots == 9
    assert first_copy.index.statistics.rows_indexed == second_copy.index.statistics.rows_indexed


@pytest.mark.parametrize("duplicate", COPY_FUNCTIONS)
def test_index_cannot_be_copied_or_pickled(duplicate: Callable[[Any], Any]) -> None:
    for index in (
        NgramIndex(2, 100, min_n=2, max_n=4),
        NgramIndex(2, 100, min_n=2, max_n=4, kind="torch"),
    ):
        with pytest.raises(TypeError, match=r"^NgramIndex: .* create a new one"):
            duplicate(index)


TYPED_CALLS = """
from typing import Any
import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type
from ngram_npu import Drafts, NgramProposer, StepResult

def call(proposer: NgramProposer, array: npt.NDArray[np.int32], tensor: torch.Tensor) -> None:
    assert_type(proposer.propose(array, array, num_sampled=array), Drafts[npt.NDArray[Any]])
    assert_type(proposer.step(tensor, tensor, tensor), StepResult[torch.Tensor])
    proposer.reset([1, 2])  # type: ignore[type-var]
    proposer.propose(array, tensor)  # type: ignore[type-var]
    proposer.step(tensor, tensor, array)  # type: ignore[type-var]
    proposer.append(tensor, tensor, slot_indices=array)  # type: ignore[type-var]
"""


@pytest.mark.slow
def test_mypy_rejects_mixed_calls(tmp_path: Path) -> None:
    """In strict mode, an unused "type: ignore" is an error, so every call with the comment must be
    an error. mypy runs in the root, which has the configuration and the cache of `make lint`."""
    pytest.importorskip("mypy")
    file = tmp_path / "calls.py"
    file.write_text(TYPED_CALLS)
    command = [sys.executable, "-m", "mypy", str(file)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
