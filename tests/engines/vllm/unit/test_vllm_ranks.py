"""Ranks that must draft alike: two processes with a process group, as vLLM's workers have."""

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
from fake_engine import RequestState, StandaloneARSpeculator, config
from ngram_npu import Costs, NgramStore, draft_costs
from ngram_npu.engines.vllm import options, sharing, v1_device, v2
from ngram_npu.engines.vllm import v2 as beside
from ngram_npu.engines.vllm.options import read_beside_option, read_options
from test_vllm_store import CPU, Async, R, S, config_of, request

Config = Callable[..., Any]
"""Makes a configuration of this rank from options."""

Said = list[str]
"""The log lines of a rank, and the result or the error at last."""


def alike(config: Config, rank: int, folder: Path) -> list[bool]:
    given = config(num_threads=rank, metrics=True)
    speculator: Any = v2.NgramSpeculator(given, CPU, RequestState(R, S))
    return [speculator.has_other_ranks, speculator.is_logging_rank, speculator._stats is not None]


def alike_in_v1(config: Config, rank: int, folder: Path) -> list[bool]:
    drafter = v1_device.AsyncNgramProposer(config(metrics=True), CPU, None)
    return [drafter.has_other_ranks, drafter._stats is not None]


def alike_beside(config: Config, rank: int, folder: Path) -> str:
    given = config(beside=True)
    given.speculative_config.method = "draft_model"
    options = read_options(given, "beside")
    return beside.attach_ngram_drafts(given, options, CPU, RequestState(), StandaloneARSpeculator())


def other_options(config: Config, rank: int, folder: Path) -> object:
    return v2.NgramSpeculator(config(overlap=rank == 1), CPU, RequestState(R, S))


def silent(config: Config, rank: int, folder: Path) -> object:
    options = read_options(config(), "v2")
    return rank == 1 or sharing.compare_ranks(config(), options, None, timeout=0.2)


def _tokens_found(config: Config, path: Path) -> int:
    """What a rank begins with. Its store then grows, so that a file would differ once saved."""
    speculator = v2.NgramSpeculator(
        config(store="live", store_file=str(path)), CPU, RequestState(R, S)
    )
    held: Any = speculator.shared_store.contents  # type: ignore[union-attr]
    found = held.statistics.tokens_held
    held.warm([range(50, 60)])
    return found


def same_stores(config: Config, rank: int, folder: Path) -> int:
    own = folder / f"of rank {rank}"
    own.write_bytes((folder / "one").read_bytes())
    return _tokens_found(config, own)


def other_stores(config: Config, rank: int, folder: Path) -> int:
    return _tokens_found(config, folder / ["one", "other"][rank])


def one_has_no_store(config: Config, rank: int, folder: Path) -> int:
    return _tokens_found(config, folder / ["none", "one"][rank])


def a_busy_store(config: Config, rank: int, folder: Path) -> object:
    runner = Async("live", config, a=request())
    runner.step({"a": [1, 2, 3]})
    with runner.held._locked():
        return runner.step({"a": [1, 2]})


CASES: list[Callable[[Config, int, Path], object]] = [
    alike,
    alike_in_v1,
    alike_beside,
    other_options,
    silent,
    same_stores,
    other_stores,
    one_has_no_store,
    a_busy_store,
]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: Said = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _worker(rank: int, port: int, folder: Path, test: Connection) -> None:
    """Runs all cases, each with a process group of its own."""
    shared = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=100))
    logger = logging.getLogger("vllm.ngram_npu")
    logger.setLevel("INFO")
    v2.RowLookup.has_request_data = True  # as the plugin leaves the runner
    said = {}

    def config(store: str | None = None, **options: Any) -> Any:
        return config_of(rank, store, 2, **options)

    for case in CASES:
        of_case = dist.PrefixStore(case.__name__, shared)
        dist.init_process_group("gloo", store=of_case, rank=rank, world_size=2)
        lines = _Lines()
        logger.handlers = [lines]
        try:
            result = str(case(config, rank, folder))
        except (ValueError, SystemExit) as error:
            result = f"{type(error).__name__}: {error}"
        gc.collect()  # the drafter ends, and with it the engine: a store is saved
        said[case.__name__] = [*lines.said, result]
        dist.barrier()
        dist.destroy_process_group()
    test.send(said)
    test.recv()  # the first process holds what both of them share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for name, text in ("one", range(100)), ("other", range(200)):
        store = NgramStore(R, 1_000_000, kind="torch")
        store.warm([text])
        store.save(folder / name)
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> dict[str, tuple[Said, Said]]:
    """What both ranks say in each case."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    (first, of_first), (second, of_second) = context.Pipe(), context.Pipe()
    workers = [
        context.Process(target=_worker, args=(rank, port, folder, end), daemon=True)
        for rank, end in enumerate((of_first, of_second))
    ]
    for worker in workers:
        worker.start()
    said = []
    for here in first, second:
        assert here.poll(300)
        said.append(here.recv())
    for here, worker in zip((first, second), workers, strict=True):
        here.send(None)
        worker.join(60)
    return {case: (said[0][case], said[1][case]) for case in said[0]}


Both = dict[str, tuple[Said, Said]]


def test_ranks_that_are_alike_go_on_and_the_first_speaks(both: Both) -> None:
    for name, results in {
        "alike": ("[True, True, True]", "[True, False, False]"),
        "alike_in_v1": ("[True, True]", "[True, False]"),
        "alike_beside": ("", ""),
    }.items():
        first, second = both[name]
        assert "drafts for this engine" in first[0], name
        assert (first[-1], second) == (results[0], [results[1]]), name


def test_other_options_stop_both_with_the_option_and_the_rank(both: Both) -> None:
    (first,), (second,) = both["other_options"]
    assert first == second
    assert first == (
        "ValueError: ngram_npu: overlap: expected the same on all ranks of an engine, got False on "
        "rank 0 and True on rank 1"
    )


CHANGES: dict[str, tuple[Any, Any]] = {
    "match_policy": ("earliest", "latest"),
    "overlap": (False, True),
    "sizes": ("ladder", "consecutive"),
    "lookup": ("1-16", "ladder"),
    "min_draft_probability": (0.2, 0.3),
    "store": ("live", "finish"),
    "store_tokens": (20_000, 30_000),
    "scope": ("shared", "required"),
    "engine": ("auto", "index"),
    "draft_on": ("auto", "host"),
    "drafts": ("padded", "trimmed"),
    "keep_drafting": (False, True),
    "beside_threshold": (0.0, 1.0),
    "dense_rows": (False, True),
}
"""Of each option that changes drafts, two values."""
NO_CHANGES: dict[str, tuple[Any, Any]] = {
    "num_threads": (1, 2),
    "metrics": (False, True),
    "store_save_minutes": (1.0, 2.0),
    "store_file": ("", "a"),
    "store_seed": ("", "b"),
}


def _compared(monkeypatch: pytest.MonkeyPatch, configs: Sequence[Any]) -> list[str]:
    """What two ranks with these configurations raise, in threads that share a key-value store."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared)

    def compare(given: Any) -> str:
        method: Any = "beside" if read_beside_option(given) else "v2"
        try:
            sharing.compare_ranks(given, read_options(given, method), None)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compare, configs))


def _configs(name: str, values: Sequence[Any]) -> list[Any]:
    """Of two ranks that differ in an option, which applies with these others."""
    if name == "lookup":  # contradicts the options of a ladder
        return [config(rank=rank, ranks=2, lookup=value) for rank, value in enumerate(values)]
    base: dict[str, Any] = {"store": "live"}
    if name == "sizes":
        base = {"store": None}
    elif name == "match_policy":
        base = {"store": None, "sizes": "consecutive"}
    elif name == "beside_threshold":
        base |= {"beside": True}
    return [config_of(rank, ranks=2, **base | {name: value}) for rank, value in enumerate(values)]


@pytest.mark.parametrize("name", CHANGES)
def test_option_that_changes_drafts_stops_ranks_that_differ(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first, second = _compared(monkeypatch, _configs(name, CHANGES[name]))
    assert first == second
    assert "expected the same on all ranks of an engine" in first


def test_costs_that_differ_stop_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row, store, tokens = (np.zeros(shape, int) for shape in draft_costs.SHAPES.values())
    for path in ("a", "b"):
        tokens[2000, 1] += 1  # where the text of a table would be abridged
        Costs(row, store, tokens).save(tmp_path / path)
    paths = [str(tmp_path / path) for path in ("a", "b")]
    monkeypatch.setattr("ngram_npu.engines.vllm.options.vocabulary_digest", lambda config: None)
    first, second = _compared(monkeypatch, _configs("costs_file", paths))
    assert first == second
    assert first.startswith("ngram_npu: costs: expected the same on all ranks")


@pytest.mark.parametrize("name", NO_CHANGES)
def test_option_that_changes_no_draft_may_differ_between_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert _compared(monkeypatch, _configs(name, NO_CHANGES[name])) == ["", ""]


def test_every_option_is_compared_or_known_to_change_no_draft() -> None:
    bounds = {"prompt_lookup_min", "prompt_lookup_max"}  # of speculative_config
    known = CHANGES.keys() | NO_CHANGES.keys() | {"beside", "costs_file"} | bounds
    assert known == options.OPTION_TYPES.keys()


def test_a_rank_that_does_not_answer_is_named(both: Both) -> None:
    (first,), _ = both["silent"]
    assert first.startswith("ValueError: ngram_npu: no answer in 0.2 s from rank 1, expected")


def test_equal_stores_are_loaded_and_the_first_rank_saves(both: Both, folder: Path) -> None:
    assert [said[-1] for said in both["same_stores"]] == ["100", "100"]
    saved = [NgramStore.load(folder / f"of rank {rank}").statistics for rank in (0, 1)]
    assert [found.tokens_held for found in saved] == [110, 100]


@pytest.mark.parametrize("case", ["other_stores", "one_has_no_store"])
def test_with_other_stores_all_begin_empty_and_save_nothing(
    both: Both, folder: Path, case: str
) -> None:
    first, second = both[case]
    (line,) = [line for line in first if "another store" in line]
    assert "rank 1 loaded another store than rank 0: all ranks begin with an empty" in line
    assert first[-1] == "0"
    assert second[-1] == "0"
    assert not any("another store" in line for line in second), "one rank says it"
    held = [NgramStore.load(folder / name).statistics.tokens_held for name in ("one", "other")]
    assert held == [100, 200]
    assert not (folder / "none").exists()


def test_a_rank_that_cannot_draft_ends(both: Both) -> None:
    for said in both["a_busy_store"]:
        assert said[-1] == "SystemExit: 1"
        assert "this rank cannot draft, so its worker ends" in said[-2]


def test_one_rank_alone_skips_a_busy_store() -> None:
    found: Any = a_busy_store(lambda **options: config_of(**options), 0, Path())
    assert list(found) == ["a"]


@pytest.mark.parametrize(("tp", "pcp", "pp"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 3, 2)])
def test_the_ranks_of_a_stage_draft_alike(tp: int, pcp: int, pp: int) -> None:
    """vLLM numbers the ranks by stage, then by prefill context, then by tensor."""
    stages = torch.arange(pp * pcp * tp).reshape(pp, pcp * tp).tolist()
    for stage in stages:
        for rank in stage:
            parallel = SimpleNamespace(
                rank=rank, tensor_parallel_size=tp, prefill_context_parallel_size=pcp
            )
            assert list(sharing.ranks_of_stage(parallel)) == stage
