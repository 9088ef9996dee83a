"""Tests NgramProposer: numpy arrays and torch tensors, a store, compiled steps, memory."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import Drafts, NgramConfig, NgramProposer, NgramStore, ops
from ngram_npu.draft_costs import DraftCosts
from ops import reference

Convert = Callable[[np.ndarray], Any]
CONVERSIONS = {"numpy": np.asarray, "torch": torch.from_numpy}
EACH_KIND = pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
LOOKUP: dict[str, Any] = {"min_n": 1, "max_n": 4, "k": 3, "match_policy": 1, "overlap": True}
LOOKUP |= {"max_len": 81, "vocab_size": 3}
CONFIG = NgramConfig(max_n=4, k=3, max_len=81, vocab_size=3)
NUM_ROWS = 6


def make_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rows, lengths and sampled tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (NUM_ROWS, 80), dtype=np.int32)
    lengths = np.array([40, 0, 81, 79, 2, 33], np.int32)  # 81: more than a row can contain
    sampled = rng.integers(-1, 3, (NUM_ROWS, 4), dtype=np.int32)
    return tokens, lengths, sampled


@EACH_KIND
@pytest.mark.parametrize("advance", [True, False])
def test_step_equals_reference(convert: Convert, advance: bool) -> None:
    tokens, lengths, sampled = make_rows()
    arguments = {
        "row_indices": np.array([5, -1, 0, 3, 1, -7], np.int32),
        "discard": np.arange(NUM_ROWS) == 1,
    }
    expected_rows = tokens.copy(), lengths.copy()
    expected = reference.ngram_step_(
        *expected_rows, sampled, **arguments, **LOOKUP, advance=advance
    )
    rows = convert(tokens), convert(lengths)
    keywords = {argument: convert(array) for argument, array in arguments.items()}
    result = NgramProposer(CONFIG).step(*rows, convert(sampled), advance=advance, **keywords)
    for array, reference_array in zip(
        (*result[:5], *rows), (*expected, *expected_rows), strict=True
    ):
        assert isinstance(array, type(convert(tokens)))
        assert np.array_equal(np.asarray(array), reference_array)
    assert result.agreement is None


@EACH_KIND
@pytest.mark.parametrize("has_workspace", [True, False])
def test_propose_equals_reference(convert: Convert, has_workspace: bool) -> None:
    tokens, lengths, _ = make_rows()
    options = {
        "row_indices": np.array([5, 0, -1, 3], np.int64),
        "num_sampled": np.array([1, 0, 1, 3], np.int32),
    }
    expected = reference.ngram_propose(tokens, lengths, **options, **LOOKUP)
    keywords = {name: convert(array) for name, array in options.items()}
    if has_workspace:
        keywords["workspace"] = convert(np.zeros(ops.workspace_size("ngram_propose_", 4), np.int32))
    drafts = NgramProposer(CONFIG).propose(convert(tokens), convert(lengths), **keywords)
    for array, reference_array in zip(drafts[:3], expected, strict=True):
        assert np.array_equal(np.asarray(array), reference_array)


@EACH_KIND
@pytest.mark.parametrize("has_store", [True, False])
def test_drafts_end_by_cost(convert: Convert, has_store: bool) -> None:
    """Compares with the drafts of a proposer that does not end them."""
    text = np.random.default_rng(2).integers(0, 40, 3000).astype(np.int32)
    num_ended = 0
    configs = NgramConfig(k=8), NgramConfig(k=8, min_draft_probability=0.3)
    stores = [NgramStore(8192) if has_store else None for _ in configs]
    for store in filter(None, stores):
        store.warm([text])
    proposers = [NgramProposer(c, store=s) for c, s in zip(configs, stores, strict=True)]
    for begin in range(0, 2400, 50):
        rows = text[begin : begin + 600].reshape(12, 50).copy()
        full, ended = (
            proposer.propose(
                convert(rows),
                convert(np.full(12, 50, np.int32)),
                num_sampled=convert(np.ones(12, np.int32)),
            )
            for proposer in proposers
        )
        counts = full.num_draft_tokens.tolist()
        DraftCosts(configs[1]).end_drafts(*full)
        for expected, got in zip(full, ended, strict=True):
            assert (expected is None and got is None) or np.array_equal(expected, got)
        assert (ended.agreement is not None) == has_store
        num_ended += sum(
            n > m for n, m in zip(counts, ended.num_draft_tokens.tolist(), strict=True)
        )
    assert num_ended > 0


@EACH_KIND
def test_step_with_a_store_drafts_other_requests_text(convert: Convert) -> None:
    """The text of the first request is stored when it is sampled; without ``advance``, too."""
    for advance in (True, False):
        proposer = NgramProposer(NgramConfig(k=4), store=NgramStore(8192, num_slots=1))
        tokens = convert(np.zeros((3, 64), np.int32))
        lengths = convert(np.zeros(3, np.int32))
        scopes = convert(np.array([5, 5, 6], np.int64))
        text = [*range(100, 110)]
        for tokens_of_rows in ([text, [], []], [[], [1, 2, 100, 101], [1, 2, 100, 101]]):
            sampled = np.full((3, 10), -1, np.int32)
            for row, new_tokens in enumerate(tokens_of_rows):
                sampled[row, : len(new_tokens)] = new_tokens
            result = proposer.step(
                tokens, lengths, convert(sampled), advance=advance, scopes=scopes
            )
            if not advance:
                lengths += result.num_sampled
        assert result.draft_token_ids.tolist() == [[-1] * 4, [102, 103, 104, 105], [-1] * 4]
        assert result.num_draft_tokens.tolist() == [0, 4, 0]
        assert result.match_len.tolist() == [0, 2, 0]
        assert result.agreement is not None
        assert result.agreement.tolist() == [-2, -1, -2]
        assert proposer.store is not None
        assert proposer.store.num_slots == 3


@pytest.mark.parametrize("source", ["row", "store"])
def test_ids_outside_of_the_vocabulary_are_not_drafted(source: str) -> None:
    store = NgramStore(8192)
    store.warm([[1, 2, 3, 2_000_000_000, 4], [5, 6, 100, 7]])
    proposer = NgramProposer(NgramConfig(vocab_size=100), store=store)
    for begin, valid in (([1, 2], [3]), ([5, 6], [])):
        row = [*begin, *valid, 900_000, *begin] if source == "row" else [8, *begin]
        rows = np.array([row], np.int32), np.array([len(row)], np.int32)
        drafts = proposer.propose(*rows, num_sampled=np.zeros(1, np.int32) + (source == "store"))
        if source == "row":
            drafts = NgramProposer(proposer.config).propose(*rows)
        assert drafts.draft_token_ids[0, : drafts.num_draft_tokens[0]].tolist() == valid


# Invalid calls, copies.


@pytest.mark.parametrize("config", [None, {"min_n": 2}])
def test_config_of_wrong_type_is_rejected(config: Any) -> None:
    with pytest.raises(TypeError, match="NgramProposer: config: expected NgramConfig, got"):
        NgramProposer(config)


@pytest.mark.parametrize("name", ["token_ids", "num_tokens", "sampled_token_ids", "discard"])
def test_step_rejects_mixed_arrays_and_tensors(name: str) -> None:
    arguments: dict[str, Any] = dict(
        zip(("token_ids", "num_tokens", "sampled_token_ids"), make_rows(), strict=True)
    )
    arguments["discard"] = np.zeros(NUM_ROWS, np.bool_)
    arguments[name] = torch.from_numpy(arguments[name])
    with pytest.raises(ValueError, match=r"^ngram_step_: \w+: expected a .*, got \w+$"):
        NgramProposer(CONFIG).step(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.zeros((NUM_ROWS, 80), np.int64)}, "token_ids: expected int32, got int64"),
        ({"token_ids": [[1]]}, "token_ids: .* got list"),
        ({"num_tokens": np.zeros(3, np.int32)}, "num_tokens: expected size 6, got size 3"),
        ({"num_tokens": [1]}, "num_tokens: .* got"),
        ({"num_sampled": None}, "num_sampled: expected an array with a store, got None"),
    ],
)
def test_invalid_call_stores_nothing(change: dict[str, Any], message: str) -> None:
    proposer = NgramProposer(CONFIG, store=NgramStore(8192))
    tokens, lengths, _ = make_rows()
    arguments: dict[str, Any] = {"token_ids": tokens, "num_tokens": lengths}
    arguments["num_sampled"] = np.ones(NUM_ROWS, np.int32)
    with pytest.raises(ValueError, match=message):
        proposer.propose(**{**arguments, **change})
    assert proposer.store is not None
    assert proposer.store.statistics.tokens_held == 0
    if "num_sampled" not in change:
        del arguments["num_sampled"]
        arguments["sampled_token_ids"] = np.ones((NUM_ROWS, 1), np.int32)
        for advance in (True, False):
            with pytest.raises(ValueError, match=message):
                proposer.step(**{**arguments, **change}, advance=advance)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda proposer: pickle.loads(pickle.dumps(proposer))]
)
def test_copy_drafts_the_same(duplicate: Callable[[NgramProposer], NgramProposer]) -> None:
    proposer = NgramProposer(NgramConfig(min_draft_probability=0.12))
    tokens, lengths, _ = make_rows()
    expected, drafts = (p.propose(tokens, lengths) for p in (proposer, duplicate(proposer)))
    assert np.array_equal(drafts.draft_token_ids, expected.draft_token_ids)
    assert isinstance(drafts, Drafts)


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
    proposer.propose(array, tensor)  # type: ignore[type-var]
    proposer.step(tensor, tensor, array)  # type: ignore[type-var]
    proposer.step(tensor, tensor, tensor, slot_indices=array)  # type: ignore[type-var]
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


# Compiled steps and memory.


@pytest.mark.parametrize("probability", [None, 0.12])
def test_compiled_step_has_one_graph(probability: float | None) -> None:
    proposer = NgramProposer(NgramConfig(min_draft_probability=probability))
    batch, eager_batch = ([torch.from_numpy(a) for a in make_rows()] for _ in range(2))
    proposer.step(*eager_batch)  # copies the tables of costs
    expected = proposer.step(*eager_batch)
    torch._dynamo.reset()
    step: Any = torch.compile(lambda *args: proposer.step(*args), fullgraph=True, backend="eager")
    step(*batch)
    for result, array in zip(step(*batch), expected, strict=True):
        assert (result is None and array is None) or torch.equal(result, array)


View = Callable[[torch.Tensor], torch.Tensor]


def _slice_rows(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[2:7, 10:510]


@pytest.mark.parametrize(
    ("outer_view", "inner_view", "dynamic"),
    [
        pytest.param(_slice_rows, torch.detach, True, id="slice-as-input"),
        pytest.param(torch.detach, _slice_rows, False, id="slice-in-graph-static"),
        pytest.param(
            torch.detach,
            _slice_rows,
            True,
            id="slice-in-graph-dynamic",
            # torch 2.13 loses the symbolic offset of a view created in the graph, for any
            # operator that writes (docs/ops/ngram_step.md). A fixed torch must fail this test.
            marks=[pytest.mark.slow, pytest.mark.xfail(strict=True, raises=AssertionError)],
        ),
    ],
)
def test_compiled_step_copies_nothing(outer_view: View, inner_view: View, dynamic: bool) -> None:
    """Inductor must write to the caller's buffer, for a view created outside of or in the graph."""
    from torch._inductor.utils import run_and_get_code

    def step(tokens: torch.Tensor, lengths: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        result = ops.ngram_step_(inner_view(tokens), lengths, sampled, min_n=2, max_n=4, k=3)
        return result.draft_token_ids + 1

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randint(0, 3, (9, 700), dtype=torch.int32, generator=generator)
    lengths = torch.full((5,), 300, dtype=torch.int32)
    sampled = torch.randint(0, 3, (5, 2), dtype=torch.int32, generator=generator)
    eager_buffer, eager_lengths = buffer.clone(), lengths.clone()
    expected = step(outer_view(eager_buffer), eager_lengths, sampled)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    result, (code, *_) = run_and_get_code(compiled, outer_view(buffer), lengths, sampled)
    assert torch.equal(result, expected)
    assert torch.equal(buffer, eager_buffer)
    assert torch.equal(lengths, eager_lengths)
    # If Inductor copied the tokens, the code would contain a clone, or a copy back to the buffer.
    assert "ngram_npu.ngram_step_" in code
    assert "clone" not in code
    assert "copy_" not in code


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["numpy", "torch", "copying"])
def test_steps_allocate_no_copy_of_the_tokens(front_end: str) -> None:
    """The token buffer has 32 MiB. With "copying", the test copies it, which must be detected."""
    rows, capacity = 256, 32768
    # The rows are slices of a larger buffer. They match at their start, so lookups are short.
    tokens: Any = np.zeros((rows + 1, capacity + 64), np.int32)[1:, 64:]
    lengths: Any = np.full(rows, capacity - 2, np.int32)
    sampled: Any = np.zeros((rows, 1), np.int32)
    config = NgramConfig(min_n=2, max_n=3, k=4, max_len=capacity)
    proposer = NgramProposer(config)
    if front_end != "numpy":
        tokens, lengths, sampled = map(torch.from_numpy, (tokens, lengths, sampled))

    def run_steps(count: int) -> None:
        for _ in range(count):
            rows = tokens.clone() if front_end == "copying" else tokens
            proposer.step(rows, lengths, sampled, advance=False)

    def get_high_water_mark_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)

    run_steps(50 if front_end != "copying" else 0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the mark to the resident memory
    kib_before = get_high_water_mark_kib()
    run_steps(200)
    assert (get_high_water_mark_kib() - kib_before > 8 * 1024) == (front_end == "copying")
