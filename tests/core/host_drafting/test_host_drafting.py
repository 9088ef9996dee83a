"""Tests HostDrafting: compares its drafts with the proposer's, and tests pending jobs, failed
devices, and invalid arguments."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ngram_npu
import ngram_npu._C as _C
import numpy as np
import pytest
import torch
from core.host_drafting.stand_in import LateStream, build_driver
from ngram_npu import Costs, NgramConfig, NgramProposer, NgramStore, _library, host_drafting
from ngram_npu.host_drafting import DeviceDrafts, HostDrafting, Stop
from ngram_npu.index import make_index

R, S, K = 4, 60, 3
CPU = torch.device("cpu")
CONFIG = NgramConfig(
    k=K, sizes="ladder", min_draft_probability=0.1, store="live", store_tokens=8192
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def stream(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    late_stream = LateStream(driver, monkeypatch)
    yield late_stream
    late_stream.hold(False)
    late_stream.wait()


def _make_store(visibility: str) -> NgramStore:
    return NgramStore(2 * R, 8192, visibility=visibility, kind="numpy")


def _make_drafting(
    stream: Any, store: NgramStore | None = None, lag: int = 0, **arguments: int
) -> HostDrafting:
    return HostDrafting(
        CONFIG,
        num_rows=R,
        capacity=S,
        max_sampled=K + 1,
        device=CPU,
        lag=lag,
        index=make_index(CONFIG, R, R * S, kind="numpy"),
        store=store,
        stream=stream,
        **arguments,
    )


def _make_sampled(tokens: list[list[int]]) -> torch.Tensor:
    rows = [[len(row), *row, *[-1] * (K + 1 - len(row))] for row in tokens]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), K + 2)


def _propose(drafting: HostDrafting, *tokens: list[int]) -> DeviceDrafts:
    """Proposes drafts for rows 0, 1, ... after these sampled tokens."""
    return drafting.propose(np.arange(len(tokens), dtype=np.int32), _make_sampled([*tokens]))


def _to_lists(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("is_fitted", [False, True])
def test_drafts_and_stored_text_equal_those_of_the_proposer(
    stream: LateStream, is_fitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``stream_drafter_test.cpp`` compares random steps with stops, prompt scopes and a lag."""
    rng = np.random.default_rng(0)
    if is_fitted:
        tables = (rng.integers(-50, 200, (16, columns)) for columns in (32, 56))
        costs = Costs(*tables, rng.integers(-99, 99, (4096, 2)))
        monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, costs=costs))
    stores = [_make_store("live") for _ in range(2)]
    drafting = _make_drafting(stream, stores[0], fill=False)
    proposer = NgramProposer(replace(CONFIG, store=None), store=stores[1], num_slots=R)
    phrases = rng.integers(0, 5, (4, 6), np.int32)
    tokens, lengths = np.zeros((R, S), np.int32), np.full(R, 12, np.int32)
    for row in range(R):
        tokens[row, :12] = phrases[rng.integers(4, size=2)].reshape(-1)
        drafting.begin(row, tokens[row, :12], scope=row % 2)
    steps = []
    for _ in range(10):
        rows = rng.permutation(R).astype(np.int32)
        sampled = [phrases[rng.integers(4)][: rng.integers(K + 2)].tolist() for _ in rows]
        counts = np.array([*map(len, sampled)], np.int32)
        for row, new in zip(rows, sampled, strict=True):
            tokens[row, lengths[row] : lengths[row] + len(new)] = new
        lengths[rows] += counts
        draft_costs = np.zeros((R, K), np.uint8)
        arguments = {"row_indices": rows, "slot_indices": rows, "num_sampled": counts}
        arguments |= {"draft_costs": draft_costs, "scopes": rows % 2}
        expected = proposer.propose(tokens, lengths, **arguments)
        steps.append((drafting.propose(rows, _make_sampled(sampled)), (*expected, draft_costs)))
    stream.wait()
    for drafts, arrays in steps:
        assert _to_lists(drafts) == _to_lists(arrays)
    texts = [[(scope, text.tolist()) for scope, text in store.texts()] for store in stores]
    assert texts[0] == texts[1]
    assert [store.statistics.drafts for store in stores] == [stores[1].statistics.drafts] * 2
    assert stores[1].statistics.drafts > 5
    stores[0].check_integrity()


def test_scan_with_costs_equals_operator() -> None:
    config = NgramConfig(min_n=1, max_n=4, k=K, min_draft_probability=0.4)
    drafting = HostDrafting(
        config, num_rows=R, capacity=S, max_sampled=K + 1, device=CPU, fill=False
    )
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.integers(0, 3, (R, S), np.int32))
    lengths = torch.full((R,), 20, dtype=torch.int32)
    for row in range(R):
        drafting.begin(row, rows[row, :20])
    ids = np.arange(R, dtype=np.int32)
    lookup = config.lookup_arguments
    lookup.pop("k")
    costs = {"match_costs": torch.from_numpy(config.match_cost_table.copy())}
    num_shortened = 0
    for _ in range(30):
        drafts = drafting.propose(ids, _make_sampled(rows[ids, lengths.long()][:, None].tolist()))
        lengths += 1
        expected = DeviceDrafts(
            torch.full((R, K), -1, dtype=torch.int64),
            *torch.zeros((2, R), dtype=torch.int32),
            torch.full((R, K), 255, dtype=torch.uint8),
        )
        ngram_npu.ops.ngram_propose_(rows, lengths, **lookup, **costs, **expected._asdict())
        assert _to_lists(drafts) == _to_lists(expected)
        without_costs = ngram_npu.ops.ngram_propose(rows, lengths, k=K, **lookup)[1]
        num_shortened += int((drafts.num_draft_tokens < without_costs).sum())
    assert num_shortened > 10


@pytest.mark.parametrize(
    ("sampled", "received"),
    [
        # Without the check, the copy would broadcast the single row to both requests.
        (_make_sampled([[5]]), rf"int32 \[1, {K + 2}\]"),
        (_make_sampled([[5], [6], [7]]), rf"int32 \[3, {K + 2}\]"),
        (torch.zeros((2, 1), dtype=torch.int32), r"int32 \[2, 1\]"),
        (_make_sampled([[5], [6]]).long(), rf"int64 \[2, {K + 2}\]"),
    ],
)
def test_propose_with_sampled_tokens_of_wrong_shape_raises(
    stream: LateStream, sampled: torch.Tensor, received: str
) -> None:
    store = _make_store("live")
    drafting = _make_drafting(stream, store)
    drafting.begin(0, [1, 2], scope=1)
    drafting.begin(1, [3, 4], scope=2)
    message = rf"HostDrafting: propose: sampled: expected int32 \[2, {K + 2}\], got {received}"
    with pytest.raises(ValueError, match=message):
        drafting.propose(np.array([0, 1], np.int32), sampled)
    _propose(drafting, [5], [6])
    stream.wait()
    assert [(scope, text.tolist()) for scope, text in store.texts()] == [(1, [5]), (2, [6])]


@pytest.fixture
def drafting(stream: LateStream) -> HostDrafting:
    """HostDrafting with a store, and a request in row 0."""
    drafting = _make_drafting(stream, _make_store("live"))
    drafting.begin(0, [1, 2, 3])
    return drafting


def test_propose_does_not_wait_for_the_stream(stream: LateStream, drafting: HostDrafting) -> None:
    stream.hold(True)
    steps = [_propose(drafting, [token]) for token in (1, 2, 3, 1)]
    assert not drafting.settle(0.05)
    stream.hold(False)
    assert drafting.settle(10)
    assert [drafts.draft_token_ids[0, 0].item() for drafts in steps] == [2, 3, 1, 2]


def test_settle_in_thread_without_cuda_context_stores_text(
    stream: LateStream, drafting: HostDrafting
) -> None:
    _propose(drafting, [1])
    drafting.end(0)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(drafting.settle(10)))
    thread.start()
    thread.join()
    assert results == [True]


@pytest.mark.parametrize("is_pending", [False, True])
def test_failed_device_does_not_block_the_host(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, is_pending: bool
) -> None:
    stream = LateStream(driver, monkeypatch)
    drafting = _make_drafting(stream, _make_store("live"))
    drafting.begin(0, [1, 2, 3])
    stream.hold(is_pending)
    _propose(drafting, [1])
    if not is_pending:
        stream.wait()
    stream.fail()
    with pytest.raises(RuntimeError, match="cuLaunchHostFunc returned status 719, expected 0"):
        _propose(drafting, [2])
    start = time.monotonic()
    assert not drafting.settle(10)
    del drafting
    gc.collect()
    assert time.monotonic() - start < 5


def test_pending_job_keeps_its_memory_alive(stream: LateStream) -> None:
    store = _make_store("live")
    drafting = _make_drafting(stream, store)
    drafting.begin(0, [1, 2, 3])
    stream.hold(True)
    drafts = _propose(drafting, [1])
    array_reference = weakref.ref(np.asarray(store.tensor))
    del drafting, store
    gc.collect()
    assert array_reference() is not None
    stream.hold(False)
    stream.wait()
    assert drafts.draft_token_ids.tolist() == [[2, 3, 1]]


EXIT_WITH_PENDING_JOBS = """
import os, sys
from pathlib import Path
import pytest
from core.host_drafting.stand_in import LateStream, load_driver
from core.host_drafting.test_host_drafting import _make_drafting, _make_store, _propose
stream = LateStream(load_driver(Path(sys.argv[1])), pytest.MonkeyPatch())
drafting = _make_drafting(stream, _make_store("live"))
drafting.begin(0, [1, 2, 3])
stream.hold("held" in sys.argv)
for token in (1, 2, 3) * 20:
    _propose(drafting, [token])
child = os.fork() if "fork" in sys.argv else None
if child == 0:
    assert not drafting.settle(0.1), "the child process has no thread that runs jobs"
elif child:
    assert os.waitpid(child, 0)[1] == 0
    stream.hold(False)
    assert drafting.settle(10)
"""


@pytest.mark.parametrize("mode", ["held", "running", "held fork"])
def test_process_with_pending_jobs_exits_without_error(driver: ctypes.CDLL, mode: str) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", EXIT_WITH_PENDING_JOBS, driver._name, *mode.split()]
    environment = {**os.environ, "PYTHONPATH": paths}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")


def test_propose_during_graph_capture_raises_and_keeps_the_announced_request(
    stream: LateStream, drafting: HostDrafting
) -> None:
    stream.is_capturing = True
    with pytest.raises(RuntimeError, match="cannot be captured in a graph"):
        _propose(drafting, [1])
    stream.is_capturing = False
    drafts = _propose(drafting, [1])
    assert drafting.settle(10)
    assert drafts.draft_token_ids.tolist() == [[2, 3, 1]]


def test_npu_stream_during_graph_capture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    runtime = SimpleNamespace(is_current_stream_capturing=lambda: True, current_stream=lambda: 0)
    monkeypatch.setattr(_library, "open_npu", lambda: _library.Backend("npu"))
    monkeypatch.setattr(_library, "load_npu_launcher", lambda: lambda *job: launches.append(1))
    monkeypatch.setattr(torch, "get_device_module", lambda name: runtime)
    with pytest.raises(RuntimeError, match="cannot be captured in a graph"):
        host_drafting.NpuStream().run(1)
    assert not launches


def test_stop_limits_of_any_size_are_accepted(stream: LateStream) -> None:
    drafting = _make_drafting(stream)
    drafting.begin(0, [1], stop=Stop((), 1 << 70, 1, -5, 1 << 63, 1 << 64, 1 << 63))
    _propose(drafting, [1, 1])
    assert drafting.settle(10)


def test_cuda_stream_without_the_driver_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", raise_error)
    with pytest.raises(RuntimeError, match=r"drafting on the host: libcuda.so.1: cannot open"):
        host_drafting.CudaStream()


def test_unsupported_device_raises() -> None:
    with pytest.raises(RuntimeError, match="expected cpu, cuda or npu, got xpu"):
        HostDrafting(CONFIG, num_rows=1, capacity=8, max_sampled=1, device=torch.device("xpu"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.begin(R, [1]), r"add_request: row: expected 0 to 3, got 4"),
        (lambda d: d.end(-1), r"remove_request: row: expected 0 to 3, got -1"),
        (lambda d: _append_text(d, row=2), r"append_text: row: expected 0 to 1, got 2"),
        (lambda d: _propose(d, *[[]] * (R + 1)), "propose: rows: expected at most 4, got 5"),
    ],
)
def test_row_out_of_range_raises(call: Any, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(_make_drafting(None, num_text_rows=2, text_capacity=8))


def _append_text(drafting: HostDrafting, row: int = 0, *tokens: int, begins: bool = True) -> None:
    drafting.append_text(row, np.array(tokens, np.int32), scope=0, begins_text=begins)


def test_appended_text_is_drafted_from_the_next_step_on(stream: LateStream) -> None:
    store = NgramStore(R + 2, 8192)
    drafting = _make_drafting(stream, store, num_text_rows=2, text_capacity=8)
    drafting.begin(0, [1])
    _append_text(drafting, 1, 5, 6)
    _append_text(drafting, 1, 7, 8, begins=False)
    steps = [_propose(drafting, [token]) for token in (5, 6)]
    stream.wait()
    assert [step.draft_token_ids.tolist() for step in steps] == [[[5] * K], [[7, 8, 6]]]
    _append_text(drafting, 1, 9, *range(20, 40), begins=False)
    assert drafting.settle(10)
    texts = [text.tolist() for scope, text in store.texts() if scope == 0 and 9 in text]
    assert texts == [[5, 6, 7, 8, 9, 20, 21, 22]]  # up to the row's capacity


def test_request_drafts_from_its_prompt_scope_and_stores_text_in_both(stream: LateStream) -> None:
    store = NgramStore(2 * R, 8192)
    store.warm([[5, 6, 7, 8]], scope=7)
    drafting = _make_drafting(stream, store)
    for row, prompt_scope in enumerate((None, 7, 8)):
        drafting.begin(row, [1], prompt_scope=prompt_scope)
    drafts = _propose(drafting, *[[5, 6]] * 3)
    stream.wait()
    assert drafts.match_len.tolist() == [0, 2, 0]
    assert drafts.draft_token_ids[1].tolist() == [7, 8, 6]
    assert drafting.settle(10)
    # Three rows in scope 0, and each prompt scope's own row.
    assert store.scopes == {0: 6, 7: 6, 8: 2}


def test_prompt_scope_with_too_few_slots_raises() -> None:
    drafting = _make_drafting(None, NgramStore(2 * R, 8192), num_text_rows=1, text_capacity=8)
    with pytest.raises(ValueError, match="prompt_scope: expected a store with at least 10 slots"):
        drafting.begin(0, [1], prompt_scope=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_text_rows": -1}, "num_text_rows: expected 0 to 2147483643, got -1"),
        ({"num_text_rows": 1}, "text_capacity: expected 1 to 2147483647, got 0"),
    ],
)
def test_invalid_text_rows_raise(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _make_drafting(None, **arguments)


def make_stream_drafter_arguments() -> dict[str, Any]:
    """Returns valid arguments of a StreamDrafter, with all optional buffers."""
    return {
        "num_rows": R,
        "capacity": S,
        "max_sampled": K + 1,
        "lag": 0,
        "min_n": 1,
        "max_n": 16,
        "k": K,
        "match_policy": 1,
        "ladder": True,
        "sampled": np.zeros((R, K + 2), np.int32),
        "drafts": np.zeros(_C.stream_results_bytes(R, K), np.uint8),
        "match_costs": np.zeros(16, np.uint8),
        "index": np.asarray(make_index(CONFIG, R, R * S, kind="numpy").tensor),
        "store": np.asarray(_make_store("live").tensor),
        "token_logits": np.zeros((4096, 2), np.int8),
        "costs": np.zeros((16, 32), np.int16),
        "store_costs": np.zeros((16, 56), np.int16),
    }


@pytest.mark.parametrize(
    "name", ["sampled", "drafts", "match_costs", "costs", "store_costs", "token_logits"]
)
def test_stream_drafter_with_too_small_buffer_raises(name: str) -> None:
    arguments = make_stream_drafter_arguments()
    _C.StreamDrafter(**arguments)
    for axis in range(arguments[name].ndim):
        buffer = np.ascontiguousarray(np.delete(arguments[name], -1, axis))
        with pytest.raises(ValueError, match=rf"^StreamDrafter: {name}: expected (size|shape) "):
            _C.StreamDrafter(**{**arguments, name: buffer})


def test_stream_drafter_with_unaligned_drafts_raises() -> None:
    arguments = make_stream_drafter_arguments()
    arguments["drafts"] = np.zeros(len(arguments["drafts"]) + 1, np.uint8)[1:]
    with pytest.raises(ValueError, match=r"^StreamDrafter: drafts: expected 8-byte alignment, got"):
        _C.StreamDrafter(**arguments)


def test_stop_with_negative_prompt_length_raises() -> None:
    """A negative length would make the search for repetitions read before the row."""
    drafter, tokens = _C.StreamDrafter(**make_stream_drafter_arguments()), np.zeros(0, np.int32)
    with pytest.raises(
        ValueError, match=r"^StreamDrafter.add_request: prompt_length: expected 0 to "
    ):
        drafter.add_request(0, tokens, 0, tokens, prompt_length=-1)
