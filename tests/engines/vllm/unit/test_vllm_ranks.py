"""Tests that the ranks of an engine make equal drafts. Here, both ranks are threads and share the
key-value store of one process group. Engines with two processes are tested with vLLM itself."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_engine import (
    CPU,
    ROWS,
    STORE,
    Request,
    RequestState,
    V1Async,
    make_config,
    make_store_config,
)
from ngram_npu import NgramStore
from ngram_npu.engines.vllm import options, ranks, v1, v2
from ngram_npu.engines.vllm.drafter import ATTRIBUTE, Drafter
from ngram_npu.engines.vllm.options import read_options

RankOutput = list[str]
"""The log lines of a rank, followed by the rank's result or error."""


@pytest.fixture(autouse=True)
def _init_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_ranks(run: Callable[[int], object]) -> tuple[RankOutput, RankOutput]:
    """Calls ``run`` for both ranks concurrently."""

    def run_rank(rank: int) -> RankOutput:
        records: list[logging.LogRecord] = []
        handler, thread = logging.Handler(), threading.get_ident()
        handler.emit = records.append  # type: ignore[method-assign]
        handler.addFilter(lambda record: record.thread == thread)
        logger = logging.getLogger("vllm.ngram_npu")
        logger.addHandler(handler)
        try:
            result = str(run(rank))
        except (ValueError, SystemExit) as error:
            result = f"{type(error).__name__}: {error}"
        logger.removeHandler(handler)
        return [*(record.getMessage() for record in records), result]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run_rank, (0, 1))
    gc.collect()  # ends the engines, which save their stores
    return first, second


def start_v2_drafter(rank: int, **options: Any) -> Drafter:
    vllm_config = make_store_config(rank, ranks=2, **{"store": False, **options})
    speculator = v2.NgramSpeculator(vllm_config, CPU, RequestState(ROWS, 400))
    drafter: Drafter = getattr(speculator, ATTRIBUTE)
    return drafter


def report_attributes(start: Callable[[Any], Any]) -> Callable[[int], list[bool]]:
    """Returns a function that starts a rank, and reports attributes of its drafter."""

    def report(rank: int) -> list[bool]:
        vllm_config = make_store_config(rank, store=False, ranks=2, metrics=True, num_threads=rank)
        drafter: Drafter = getattr(start(vllm_config), ATTRIBUTE)
        return [drafter.has_other_ranks, drafter.is_logging_rank, drafter.stats is not None]

    return report


@pytest.mark.parametrize(
    "start",
    [
        lambda config: v1.AsyncNgramProposer(config, CPU, None),
        lambda config: v2.NgramSpeculator(config, CPU, RequestState(ROWS, 400)),
    ],
    ids=["V1", "V2"],
)
def test_ranks_with_equal_options_start_and_rank_0_logs(start: Callable[[Any], Any]) -> None:
    first, second = run_ranks(report_attributes(start))
    assert "drafts for this engine" in first[0]
    assert (first[-1], second) == ("[True, True, True]", ["[True, False, False]"])


DRAFT_OPTIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "lookup": ("auto", "ngram", {}),
    "min_draft_probability": (0.2, 0.3, {"method": "ngram"}),
    "store": (True, False, {"store_tokens": None, "scope": None}),
    "store_tokens": (20_000, 30_000, {}),
    "store_feed": ("", "tcp://10.0.0.1:5557", {}),
    "scope": ("shared", "private", {}),
}
"""For each option that changes drafts: two values, and other options that its effect requires."""

OTHER_OPTIONS: dict[str, tuple[Any, Any]] = {
    "num_threads": (1, 2),
    "metrics": (False, True),
    "store_file": ("", "a"),
    "store_seed": ("", "b"),
}
"""For each option that changes no draft: two values."""


def compare_ranks(name: str, values: Sequence[Any], **options: Any) -> str:
    """Starts ranks that differ in the option `name`. Returns the result or error, which must be
    equal for both ranks."""

    method: Any = options.pop("method", "v2")

    def compare(rank: int) -> bool:
        section = {**STORE, **options, name: values[rank]}
        section = {name: value for name, value in section.items() if value is not None}
        vllm_config = make_config(rank=rank, ranks=2, length=400, **section)
        return ranks.compare_ranks(vllm_config, read_options(vllm_config, method), "").has_others

    first, second = run_ranks(compare)
    assert first == second
    (line,) = first
    return line


@pytest.mark.parametrize("name", DRAFT_OPTIONS | OTHER_OPTIONS)
def test_ranks_with_different_values_of_an_option_raise_if_it_changes_drafts(name: str) -> None:
    *values, options = DRAFT_OPTIONS.get(name, (*OTHER_OPTIONS.get(name, ()), {}))
    line = compare_ranks(name, values, **options)
    assert ("expected the same on all ranks of an engine" in line) == (name in DRAFT_OPTIONS)
    assert line == "True" or name in DRAFT_OPTIONS
    if name == "store_tokens":
        expected = "store_tokens: expected the same on all ranks of an engine, got 20000 on rank 0 "
        assert line == f"ValueError: ngram_npu: {expected}and 30000 on rank 1"


def test_tables_above_contain_every_option() -> None:
    others = {"neural", "k"}
    assert DRAFT_OPTIONS.keys() | OTHER_OPTIONS.keys() | others == options.OPTION_TYPES.keys()


def test_rank_without_an_answer_is_named_in_the_error() -> None:
    vllm_config = make_store_config(ranks=2, store=False)
    with pytest.raises(ValueError, match=r"^ngram_npu: no answer in 0\.2 s from rank 1, expected"):
        ranks.compare_ranks(vllm_config, read_options(vllm_config, "v2"), "", timeout=0.2)


# Stores.


@pytest.fixture
def store_folder(tmp_path: Path) -> Path:
    """A folder with store files of 100 or 200 tokens; "rank 0" and "rank 1" have equal text."""
    for name, length in ("one", 100), ("other", 200), ("rank 0", 100), ("rank 1", 100):
        store = NgramStore(100_000)
        store.warm([range(length)])
        store.save(tmp_path / name)
    return tmp_path


def load_stores(*paths: Path) -> tuple[RankOutput, RankOutput]:
    """Starts two ranks with these store files. Their results are the numbers of loaded tokens. The
    stores then grow, so that a save changes a file."""

    def load(rank: int) -> int:
        drafter = start_v2_drafter(rank, **STORE, store_file=str(paths[rank]))
        assert drafter.shared_store is not None
        store = drafter.shared_store.contents
        count: int = store.statistics.tokens_held
        store.warm([range(50, 60)])
        return count

    return run_ranks(load)


def count_saved_tokens(folder: Path, *names: str) -> list[int]:
    return [NgramStore.load(folder / name).statistics.tokens_held for name in names]


def test_equal_stores_of_ranks_are_loaded_and_rank_0_saves(store_folder: Path) -> None:
    first, second = load_stores(store_folder / "rank 0", store_folder / "rank 1")
    assert (first[-1], second[-1]) == ("100", "100")
    assert any(f"100 of them from {store_folder / 'rank 0'}" in line for line in first)
    assert count_saved_tokens(store_folder, "rank 0", "rank 1") == [110, 100]


@pytest.mark.parametrize("names", [("one", "other"), ("missing", "one")])
def test_ranks_with_different_stores_start_empty_and_save_nothing(
    store_folder: Path, names: tuple[str, str]
) -> None:
    first, second = load_stores(*(store_folder / name for name in names))
    (line,) = [line for line in first if "another store" in line]
    assert "rank 1 loaded another store than rank 0: all ranks begin with an empty" in line
    assert (first[-1], second[-1]) == ("0", "0")
    assert not any("another store" in line for line in second), "expected only rank 0 to log"
    assert count_saved_tokens(store_folder, "one", "other") == [100, 200]
    assert not (store_folder / "missing").exists()


def step_with_failing_store(rank: int, number: int = 2) -> Any:
    engine = V1Async(rank=rank, ranks=number, **STORE)
    engine.begin(Request("a", [0]))
    engine.step({"a": [1, 2, 3]})

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    engine.store.append = fail
    return engine.step({"a": [1, 2]})


def test_ranks_that_cannot_draft_end() -> None:
    for output in run_ranks(step_with_failing_store):
        assert output[-1] == "SystemExit: 1"
        assert "this rank cannot draft, so its worker ends" in output[-2]
    with pytest.raises(RuntimeError, match="no memory"):
        step_with_failing_store(0, number=1)


@pytest.mark.parametrize(("tp", "pcp", "pp"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 3, 2)])
def test_ranks_of_stage_follow_the_rank_order(tp: int, pcp: int, pp: int) -> None:
    """vLLM numbers ranks by pipeline stage, then by prefill context, then by tensor."""
    stages = torch.arange(pp * pcp * tp).reshape(pp, pcp * tp).tolist()
    for stage in stages:
        for rank in stage:
            parallel_config = SimpleNamespace(
                rank=rank, tensor_parallel_size=tp, prefill_context_parallel_size=pcp
            )
            assert list(ranks.ranks_of_stage(parallel_config)) == stage
            is_first = ranks.is_first_rank(parallel_config)
            assert is_first == (rank == stage[0]), "expected one that logs per stage"
