"""Ranks must produce equal drafts: two processes with a process group, like vLLM's workers."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_engine import (
    CPU,
    LADDER,
    ROWS,
    STORE,
    Request,
    RequestState,
    StandaloneARSpeculator,
    V1Async,
    config,
    store_config,
)
from ngram_npu import Costs, NgramStore, draft_costs
from ngram_npu.engines.vllm import options, sharing, v1_device, v2
from ngram_npu.engines.vllm.options import read_beside_option, read_options

Config = Callable[..., Any]
"""Creates a configuration of this rank from options."""

Lines = list[str]
"""The log lines of a rank, followed by its result or its error."""

RankLines = dict[str, tuple[Lines, Lines]]
"""The lines of both ranks, by case."""


def equal_options_v2(config: Config, rank: int, folder: Path) -> list[bool]:
    vllm_config = config(num_threads=rank, metrics=True)
    speculator: Any = v2.NgramSpeculator(vllm_config, CPU, RequestState(ROWS, 400))
    return [speculator.has_other_ranks, speculator.is_logging_rank, speculator._stats is not None]


def equal_options_v1(config: Config, rank: int, folder: Path) -> list[bool]:
    drafter = v1_device.AsyncNgramProposer(config(metrics=True), CPU, None)
    return [drafter.has_other_ranks, drafter._stats is not None]


def equal_options_neural(config: Config, rank: int, folder: Path) -> str:
    vllm_config = config(beside=True)
    vllm_config.speculative_config.method = "draft_model"
    options = read_options(vllm_config, "beside")
    arguments = vllm_config, options, CPU, RequestState(), StandaloneARSpeculator()
    return v2.attach_ngram_drafts(*arguments)


def different_options(config: Config, rank: int, folder: Path) -> object:
    return v2.NgramSpeculator(config(overlap=rank == 1), CPU, RequestState(ROWS, 400))


def no_answer(config: Config, rank: int, folder: Path) -> object:
    options = read_options(config(), "v2")
    return rank == 1 or sharing.compare_ranks(config(), options, None, timeout=0.2)


def _load_count(config: Config, path: Path) -> int:
    """Returns the number of tokens that a rank loads. Its store then grows, so that a save would
    change the file."""
    vllm_config = config(store="live", store_file=str(path))
    speculator: Any = v2.NgramSpeculator(vllm_config, CPU, RequestState(ROWS, 400))
    store = speculator.shared_store.contents
    count: int = store.statistics.tokens_held
    store.warm([range(50, 60)])
    return count


def equal_stores(config: Config, rank: int, folder: Path) -> int:
    path = folder / f"rank {rank}"
    path.write_bytes((folder / "one").read_bytes())
    return _load_count(config, path)


def different_stores(config: Config, rank: int, folder: Path) -> int:
    return _load_count(config, folder / ["one", "other"][rank])


def missing_store(config: Config, rank: int, folder: Path) -> int:
    return _load_count(config, folder / ["missing", "one"][rank])


def locked_store(config: Config, rank: int, folder: Path, ranks: int = 2) -> object:
    engine = V1Async(rank=rank, ranks=ranks, **STORE)
    engine.begin(Request("a", [0]))
    engine.step({"a": [1, 2, 3]})
    with engine.store._locked():
        return engine.step({"a": [1, 2]})


CASES: list[Callable[[Config, int, Path], object]] = [
    *(equal_options_v2, equal_options_v1, equal_options_neural, different_options, no_answer),
    *(equal_stores, different_stores, missing_store, locked_store),
]


def _worker(rank: int, port: int, folder: Path, connection: Connection) -> None:
    """Runs all cases, each with a new process group."""
    key_value_store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=100))
    logger = logging.getLogger("vllm.ngram_npu")
    logger.setLevel("INFO")
    v2.RowLookup.has_request_data = True  # set by the plugin when it wraps the runner
    lines = {}

    def create_config(store: str | None = None, **options: Any) -> Any:
        return store_config(rank, store=store, ranks=2, **options)

    for case in CASES:
        prefix_store = dist.PrefixStore(case.__name__, key_value_store)
        dist.init_process_group("gloo", store=prefix_store, rank=rank, world_size=2)
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logger.handlers = [handler]
        try:
            result = str(case(create_config, rank, folder))
        except (ValueError, SystemExit) as error:
            result = f"{type(error).__name__}: {error}"
        gc.collect()  # ends the drafter and its engine, which saves the store
        lines[case.__name__] = [*(record.getMessage() for record in records), result]
        dist.barrier()
        dist.destroy_process_group()
    connection.send(lines)
    connection.recv()  # the process of rank 0 runs the key-value store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for name, text in ("one", range(100)), ("other", range(200)):
        store = NgramStore(ROWS, 1_000_000, kind="torch")
        store.warm([text])
        store.save(folder / name)
    return folder


@pytest.fixture(scope="module")
def rank_lines(folder: Path) -> RankLines:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    workers = [
        context.Process(target=_worker, args=(rank, port, folder, worker_end), daemon=True)
        for rank, (_, worker_end) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    results = []
    for connection, _ in pipes:
        assert connection.poll(300)
        results.append(connection.recv())
    for (connection, _), worker in zip(pipes, workers, strict=True):
        connection.send(None)
        worker.join(60)
    return {case: (results[0][case], results[1][case]) for case in results[0]}


@pytest.mark.parametrize(
    ("case", "first_result", "second_result"),
    [
        ("equal_options_v2", "[True, True, True]", "[True, False, False]"),
        ("equal_options_v1", "[True, True]", "[True, False]"),
        ("equal_options_neural", "", ""),
    ],
)
def test_ranks_with_equal_options_start_and_rank_0_logs(
    rank_lines: RankLines, case: str, first_result: str, second_result: str
) -> None:
    first, second = rank_lines[case]
    assert "drafts for this engine" in first[0]
    assert (first[-1], second) == (first_result, [second_result])


def test_ranks_with_different_options_raise_the_same_error(rank_lines: RankLines) -> None:
    (first,), (second,) = rank_lines["different_options"]
    assert first == second
    assert first == (
        "ValueError: ngram_npu: overlap: expected the same on all ranks of an engine, got False on "
        "rank 0 and True on rank 1"
    )


PLAIN: dict[str, Any] = {"store": None}
"""A ladder without a store."""
CHANGES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "match_policy": ("earliest", "latest", {**PLAIN, "sizes": "consecutive"}),
    "overlap": (False, True, {}),
    "sizes": ("ladder", "consecutive", PLAIN),
    "lookup": ("ladder", "1-16", {**PLAIN, "sizes": None}),
    "min_draft_probability": (0.2, 0.3, {}),
    "token_cost": (0.02, 0.05, {"min_draft_probability": None}),
    "store": ("live", "finish", {}),
    "store_tokens": (20_000, 30_000, {}),
    "scope": ("shared", "required", {}),
    "engine": ("auto", "index", {}),
    "draft_on": ("auto", "host", {}),
    "drafts": ("padded", "trimmed", {}),
    "keep_drafting": (False, True, {}),
    "beside_threshold": (0.0, 1.0, {"beside": True}),
    "dense_rows": (False, True, {}),
}
"""Two values of each option that changes drafts, and options with which it has an effect."""

NO_CHANGES: dict[str, tuple[Any, Any]] = {
    "num_threads": (1, 2),
    "metrics": (False, True),
    "store_save_minutes": (1.0, 2.0),
    "store_file": ("", "a"),
    "store_seed": ("", "b"),
}
"""Two values of each option that changes no draft."""


def _compare_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str, values: Sequence[Any], **options: Any
) -> list[str]:
    """Returns the errors of two ranks that differ in one option. They are threads that share a
    key-value store."""
    key_value_store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: key_value_store)

    def compare(rank: int) -> str:
        section = {"store": "live", **LADDER, **options, name: values[rank]}
        section = {name: value for name, value in section.items() if value is not None}
        vllm_config = config(rank=rank, ranks=2, length=400, **section)
        method: Any = "beside" if read_beside_option(vllm_config) else "v2"
        try:
            sharing.compare_ranks(vllm_config, read_options(vllm_config, method), None)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compare, (0, 1)))


@pytest.mark.parametrize("name", CHANGES | NO_CHANGES)
def test_ranks_that_differ_in_an_option_raise_if_it_changes_drafts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    *values, options = CHANGES.get(name, (*NO_CHANGES.get(name, ()), {}))
    first, second = _compare_ranks(monkeypatch, name, values, **options)
    assert first == second
    assert ("expected the same on all ranks of an engine" in first) == (name in CHANGES)


def test_ranks_with_different_costs_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row, store, tokens = (np.zeros(shape, int) for shape in draft_costs.SHAPES.values())
    for path in ("a", "b"):
        tokens[2000, 1] += 1  # a cell that the table's repr abbreviates
        Costs(row, store, tokens).save(tmp_path / path)
    paths = [str(tmp_path / path) for path in ("a", "b")]
    monkeypatch.setattr("ngram_npu.engines.vllm.options.vocabulary_digest", lambda config: None)
    first, second = _compare_ranks(monkeypatch, "costs_file", paths)
    assert first == second
    assert first.startswith("ngram_npu: costs: expected the same on all ranks")


def test_every_option_is_compared_or_known_to_change_no_draft() -> None:
    bounds = {"prompt_lookup_min", "prompt_lookup_max"}  # of speculative_config
    known = (
        CHANGES.keys()
        | NO_CHANGES.keys()
        | {"beside", "costs_file", "k", "step_times_file"}
        | bounds
    )
    assert known == options.OPTION_TYPES.keys()


def test_rank_without_an_answer_is_named_in_the_error(rank_lines: RankLines) -> None:
    (first,), _ = rank_lines["no_answer"]
    assert first.startswith("ValueError: ngram_npu: no answer in 0.2 s from rank 1, expected")


def test_equal_stores_are_loaded_and_rank_0_saves(rank_lines: RankLines, folder: Path) -> None:
    assert [lines[-1] for lines in rank_lines["equal_stores"]] == ["100", "100"]
    files = [NgramStore.load(folder / f"rank {rank}") for rank in (0, 1)]
    assert [file.statistics.tokens_held for file in files] == [110, 100]


@pytest.mark.parametrize("case", ["different_stores", "missing_store"])
def test_ranks_with_different_stores_start_empty_and_save_nothing(
    rank_lines: RankLines, folder: Path, case: str
) -> None:
    first, second = rank_lines[case]
    (line,) = [line for line in first if "another store" in line]
    assert "rank 1 loaded another store than rank 0: all ranks begin with an empty" in line
    assert (first[-1], second[-1]) == ("0", "0")
    assert not any("another store" in line for line in second), "only rank 0 logs"
    files = [NgramStore.load(folder / name) for name in ("one", "other")]
    assert [file.statistics.tokens_held for file in files] == [100, 200]
    assert not (folder / "missing").exists()


def test_rank_with_a_locked_store_ends(rank_lines: RankLines) -> None:
    for lines in rank_lines["locked_store"]:
        assert lines[-1] == "SystemExit: 1"
        assert "this rank cannot draft, so its worker ends" in lines[-2]


def test_single_rank_skips_a_locked_store() -> None:
    drafts: Any = locked_store(store_config, 0, Path(), ranks=1)
    assert list(drafts) == ["a"]


@pytest.mark.parametrize(("tp", "pcp", "pp"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 3, 2)])
def test_ranks_of_stage_follow_the_rank_order(tp: int, pcp: int, pp: int) -> None:
    """vLLM numbers ranks by pipeline stage, then by prefill context, then by tensor."""
    stages = torch.arange(pp * pcp * tp).reshape(pp, pcp * tp).tolist()
    for stage in stages:
        for rank in stage:
            parallel_config = SimpleNamespace(
                rank=rank, tensor_parallel_size=tp, prefill_context_parallel_size=pcp
            )
            assert list(sharing.ranks_of_stage(parallel_config)) == stage
