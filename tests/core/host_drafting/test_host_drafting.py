"""Drafting in a stream's callbacks: random steps against references, and a device that fails."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ngram_npu
import ngram_npu._C as _C
import numpy as np
import pytest
import torch
from core.host_drafting.reference import Reference
from core.host_drafting.stand_in import LateStream, built
from core.index.words import slot_of
from ngram_npu import Costs, NgramConfig, NgramStore, host_drafting
from ngram_npu.host_drafting import CallingThread, HostDrafting, HostDrafts, Stop
from ngram_npu.index import make_index

R, S, K = 4, 60, 3
CPU = torch.device("cpu")
STOP = 9
CONFIG = NgramConfig(
    k=K, sizes="ladder", min_draft_probability=0.1, store="live", store_tokens=8192
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def stream(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    made = LateStream(driver, monkeypatch)
    yield made
    made.hold(False)
    made.wait()


def _store(visibility: str) -> NgramStore:
    return NgramStore(R, 8192, visibility=visibility, kind="numpy")


def _drafting(stream: Any, store: NgramStore | None = None, lag: int = 0) -> HostDrafting:
    return HostDrafting(
        CONFIG,
        num_rows=R,
        capacity=S,
        most_sampled=K + 1,
        device=CPU,
        lag=lag,
        index=make_index(CONFIG, R, R * S, kind="numpy"),
        store=store,
        stream=stream,
    )


def _sampled(tokens: list[list[int]]) -> torch.Tensor:
    rows = [[len(of), *of, *[-1] * (K + 1 - len(of))] for of in tokens]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), K + 2)


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize(("lag", "visibility"), [(0, "live"), (1, "live"), (2, "finish")])
def test_drafts_are_those_of_the_references(
    stream: LateStream, lag: int, visibility: str, fitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(lag)
    if fitted:
        cells = (rng.integers(-50, 200, (16, columns)) for columns in (32, 56))
        costs = Costs(*cells, rng.integers(-99, 99, (4096, 2)))
        monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, costs=costs))
    ours = _store(visibility)
    reference = Reference(CONFIG, _store(visibility), lag, (R, S))
    drafting = _drafting(stream, ours, lag)
    steps: list[tuple[HostDrafts, list[Any]]] = []
    words = [rng.integers(0, 5, 6).tolist() for _ in range(4)]
    reused = 0
    for _ in range(120):
        for row in range(R):
            has = row in reference.rows
            request = reference.rows.get(row)
            stopped = request is not None and request.cut is not None
            if has and (len(reference.rows[row].text) > S - 8 or rng.random() < stopped * 0.6):
                drafting.end(row)
                reference.end(row)
            elif not has and rng.random() < 0.5:
                text = [*words[rng.integers(4)], *words[rng.integers(4)]]
                stop = Stop((STOP,)) if rng.random() < 0.8 else None
                scope = int(rng.integers(2))
                drafting.begin(row, text, scope=scope, stop=stop)
                reference.begin(row, text, scope, stop)
                reused += 1
        if rng.random() < 0.3:  # the reference is not told of a wait, which is no step
            drafting._run(np.empty(0, np.int32))
        chosen = rng.random() < 0.8  # otherwise a dummy run
        rows = [r for r in rng.permutation(sorted(reference.rows)) if chosen and rng.random() < 0.8]
        said = [words[rng.integers(4)][: rng.integers(K + 2)] for _ in rows]
        said = [[*of[:-1], STOP] if of and rng.random() < 0.08 else of for of in said]
        found = drafting.propose(np.array(rows, np.int32), _sampled(said))
        steps.append((found, reference.step(rows, said)))
    stream.wait()
    for found, wanted in steps:
        assert [tensor.tolist() for tensor in found] == wanted
    assert reference.has_the_text_of(ours)
    ours.check_integrity()
    assert reused > 15
    assert ours.statistics.drafts > 10


def test_drafts_of_a_scan_that_weighs_costs_are_those_of_the_operator() -> None:
    config = NgramConfig(min_n=1, max_n=4, k=K, min_draft_probability=0.4)
    drafting = HostDrafting(
        config, num_rows=R, capacity=S, most_sampled=K + 1, device=CPU, fill=False
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
    found_fewer = 0
    for _ in range(30):
        drafts = drafting.propose(ids, _sampled(rows[ids, lengths.long()][:, None].tolist()))
        lengths += 1
        expected = [
            torch.full((R, K), -1, dtype=torch.int64),
            *torch.zeros((2, R), dtype=torch.int32),
            torch.full((R, K), 255, dtype=torch.uint8),
        ]
        into = dict(zip(HostDrafts._fields, expected, strict=True))
        ngram_npu.ops.ngram_propose_(rows, lengths, **lookup, **costs, **into)
        assert [tensor.tolist() for tensor in drafts] == [tensor.tolist() for tensor in expected]
        whole = ngram_npu.ops.ngram_propose(rows, lengths, k=K, **lookup)[1]
        found_fewer += int((drafts.num_draft_tokens < whole).sum())
    assert found_fewer > 10


def test_job_indexes_at_most_its_budget_in_total() -> None:
    """Also a job that drafts for rows whose prompts are not indexed yet."""
    rows, length, budget = 3, 5000, 8192
    index = make_index(CONFIG, rows, rows * 6000, kind="numpy")
    shape = {"num_rows": rows, "capacity": 6000, "most_sampled": K + 1}
    drafting = HostDrafting(CONFIG, **shape, device=CPU, index=index)
    for row in range(rows):
        drafting.begin(row, np.arange(length))
    for job in range(1, 4):
        drafting.propose(np.arange(rows, dtype=np.int32), _sampled([[1]] * rows))
        indexed = sum(int(slot_of(index.tensor, row)[1]) for row in range(rows))
        assert indexed == min(job * budget, rows * (length + job))


@pytest.mark.parametrize(
    ("sampled", "got"),
    [
        (_sampled([[5]]), rf"int32 \[1, {K + 2}\]"),  # would be copied to both rows
        (_sampled([[5], [6], [7]]), rf"int32 \[3, {K + 2}\]"),
        (torch.zeros((2, 1), dtype=torch.int32), r"int32 \[2, 1\]"),
        (_sampled([[5], [6]]).long(), rf"int64 \[2, {K + 2}\]"),
    ],
)
def test_host_drafting_with_sampled_tokens_of_another_shape_raises(
    stream: LateStream, sampled: torch.Tensor, got: str
) -> None:
    store = _store("live")
    drafting = _drafting(stream, store)
    drafting.begin(0, [1, 2], scope=1)
    drafting.begin(1, [3, 4], scope=2)
    message = rf"HostDrafting: propose: sampled: expected int32 \[2, {K + 2}\], got {got}"
    with pytest.raises(ValueError, match=message):
        drafting.propose(np.array([0, 1], np.int32), sampled)
    drafting.propose(np.array([0, 1], np.int32), _sampled([[5], [6]]))
    stream.wait()
    assert [(scope, text.tolist()) for scope, text in store._texts()] == [(1, [5]), (2, [6])]


def test_nothing_waits_for_the_stream(stream: LateStream) -> None:
    drafting = _drafting(stream)
    drafting.begin(0, [1, 2, 3])
    stream.hold(True)
    found = [
        drafting.propose(np.array([0], np.int32), _sampled([[token]])) for token in (1, 2, 3, 1)
    ]
    assert not drafting.settle(0.05)
    stream.hold(False)
    assert drafting.settle(10)
    assert [drafts.draft_token_ids[0, 0].item() for drafts in found] == [2, 3, 1, 2]


@pytest.mark.parametrize("pending", [False, True])
def test_a_device_that_fails_stops_nothing(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    stream = LateStream(driver, monkeypatch)
    drafting = _drafting(stream, _store("live"))
    drafting.begin(0, [1, 2, 3])
    stream.hold(pending)
    drafting.propose(np.array([0], np.int32), _sampled([[1]]))
    if not pending:
        stream.wait()
    stream.fail()
    with pytest.raises(RuntimeError, match="cuLaunchHostFunc returned status 719, expected 0"):
        drafting.propose(np.array([0], np.int32), _sampled([[2]]))
    began = time.monotonic()
    assert not drafting.settle(10)
    del drafting
    gc.collect()
    assert time.monotonic() - began < 5


def test_what_jobs_use_outlives_the_drafter(stream: LateStream) -> None:
    drafting = _drafting(stream, store := _store("live"))
    drafting.begin(0, [1, 2, 3])
    stream.hold(True)
    found = drafting.propose(np.array([0], np.int32), _sampled([[1]]))
    used = weakref.ref(np.asarray(store.tensor))
    del drafting, store
    gc.collect()
    assert used() is not None
    stream.hold(False)
    stream.wait()
    assert found.draft_token_ids.tolist() == [[2, 3, 1]]


def test_two_engines_in_a_process(stream: LateStream) -> None:
    """They share the driver's thread, and nothing else."""
    rng = np.random.default_rng(1)
    late = [_drafting(stream, _store("live"), lag=1) for _ in range(2)]
    at_once = [_drafting(CallingThread(), _store("live"), lag=1) for _ in range(2)]
    steps: list[tuple[HostDrafts, HostDrafts]] = []
    rows = np.arange(R, dtype=np.int32)
    for turn in range(60):
        for both in zip(late, at_once, strict=True):
            sampled = _sampled([rng.integers(0, 3, rng.integers(K + 2)).tolist() for _ in rows])
            text = rng.integers(0, 3, 9)
            for drafting in both:
                drafting.begin(turn % R, text)
            steps.append((both[0].propose(rows, sampled), both[1].propose(rows, sampled)))
    stream.wait()
    for found, wanted in steps:
        assert [tensor.tolist() for tensor in found] == [tensor.tolist() for tensor in wanted]


LEAVES = """
import os, sys, time
from pathlib import Path
import numpy as np, pytest
from core.host_drafting.stand_in import LateStream, loaded
from core.host_drafting.test_host_drafting import _drafting, _sampled, _store
stream = LateStream(loaded(Path(sys.argv[1])), pytest.MonkeyPatch())
drafting = _drafting(stream, _store("live"))
drafting.begin(0, [1, 2, 3])
stream.hold("held" in sys.argv)
for token in (1, 2, 3) * 20:
    drafting.propose(np.array([0], np.int32), _sampled([[token]] if token else []))
child = os.fork() if "fork" in sys.argv else None
if child == 0:
    assert not drafting.settle(0.1), "the thread that runs jobs is the parent's"
elif child:
    assert os.waitpid(child, 0)[1] == 0
    stream.hold(False)
    assert drafting.settle(10)
"""


@pytest.mark.parametrize("how", ["held", "running", "held fork"])
def test_a_process_ends_with_jobs_pending(driver: ctypes.CDLL, how: str) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", LEAVES, driver._name, *how.split()]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_job_is_captured(stream: LateStream) -> None:
    stream.capturing = True
    drafting = _drafting(stream)
    drafting.begin(0, [1, 2, 3])
    rows = np.array([0], np.int32)
    with pytest.raises(RuntimeError, match="not while a graph is captured"):
        drafting.propose(rows, _sampled([[1]]))
    stream.capturing = False
    found = drafting.propose(rows, _sampled([[1]]))
    assert drafting.settle(10)
    assert found.draft_token_ids.tolist() == [[2, 3, 1]], "what began is not lost with the step"


def test_limits_of_any_size_are_taken(stream: LateStream) -> None:
    """They come from a client."""
    drafting = _drafting(stream)
    drafting.begin(0, [1], stop=Stop((), 1 << 70, 1, -5, 1 << 63, 1 << 64, 1 << 63))
    drafting.propose(np.array([0], np.int32), _sampled([[1, 1]]))
    assert drafting.settle(10)


def test_a_machine_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match=r"drafting on the host: libcuda.so.1: cannot open"):
        host_drafting.CudaStream()


def test_other_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="drafting on the host: not for xpu"):
        HostDrafting(CONFIG, num_rows=1, capacity=8, most_sampled=1, device=torch.device("xpu"))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: d.begin(R, [1]), r"begin: row: expected 0 to 3, got 4"),
        (lambda d: d.end(-1), r"end: row: expected 0 to 3, got -1"),
        (
            lambda d: d.propose(np.arange(R + 1, dtype=np.int32), _sampled([[]] * (R + 1))),
            "propose: rows: expected at most 4, got 5",
        ),
    ],
)
def test_bad_arguments(call: Any, says: str) -> None:
    drafting = _drafting(None)
    with pytest.raises((ValueError, RuntimeError), match=says):
        call(drafting)


def _arguments() -> dict[str, Any]:
    """Those of a drafter that is given every buffer."""
    costs = {"costs": np.zeros((16, 32), np.int16), "store_costs": np.zeros((16, 56), np.int16)}
    return {
        "num_rows": R,
        "capacity": S,
        "most_sampled": K + 1,
        "lag": 0,
        "min_n": 1,
        "max_n": 16,
        "k": K,
        "match_policy": 1,
        "sampled": np.zeros((R, K + 2), np.int32),
        "drafts": np.zeros(_C.stream_results_bytes(R, K), np.uint8),
        "match_costs": np.zeros(16, np.uint8),
        "ladder": True,
        "index": np.asarray(make_index(CONFIG, R, R * S, kind="numpy").tensor),
        "store": np.asarray(_store("live").tensor),
        "token_logits": np.zeros((4096, 2), np.int8),
        **costs,
    }


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "name", ["sampled", "drafts", "match_costs", "costs", "store_costs", "token_logits"]
)
def test_drafter_with_a_buffer_that_is_too_small_is_rejected(name: str, axis: int) -> None:
    given = _arguments()
    _C.StreamDrafter(**given)
    axis = min(axis, given[name].ndim - 1)
    smaller = np.delete(given[name], -1, axis)
    with pytest.raises(ValueError, match=rf"^StreamDrafter: {name}: expected (size|shape) "):
        _C.StreamDrafter(**{**given, name: np.ascontiguousarray(smaller)})


def test_drafter_with_unaligned_drafts_is_rejected() -> None:
    given = _arguments()
    given["drafts"] = np.zeros(len(given["drafts"]) + 1, np.uint8)[1:]
    with pytest.raises(ValueError, match=r"^StreamDrafter: drafts: expected 8-byte alignment, got"):
        _C.StreamDrafter(**given)


def test_stop_with_a_negative_prompt_is_rejected() -> None:
    """Repetition would be looked for in front of the row."""
    drafter, none = _C.StreamDrafter(**_arguments()), np.zeros(0, np.int32)
    with pytest.raises(ValueError, match=r"^StreamDrafter.begin: prompt_length: expected 0 to "):
        drafter.begin(0, none, 0, none, prompt_length=-1)
