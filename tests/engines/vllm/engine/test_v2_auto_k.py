"""Tests the option ``k="auto"`` in an engine: the draft length does not change the text, and the
allowed lengths are those for which the runner captures graphs. The server of test_server.py has the
option, too, with a store and two ranks."""

from __future__ import annotations

from copy import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import vllm.config
from engines import STORE, Engine, Method, encode_corpus, make_params, start_engine
from ngram_npu.engines.vllm import auto_k, plugin
from ngram_npu.engines.vllm import scheduler as scheduler_module
from random_lengths import RandomLengths
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm_graphs import (
    count_full_graphs,
    find_largest_batches,
    has_full_graph,
    make_graph_manager,
)

METHODS = {
    "synchronous": Method("ngram_gpu", {"k": "auto"}),
    "store": Method("ngram_gpu", {"k": "auto", **STORE}, True),
    "draft model": Method("draft_model", {"k": "auto", "neural": True}, True),
}


@pytest.fixture(autouse=True, scope="module")
def _install_hooks() -> None:
    plugin._install_option_check(vllm.config.vllm)
    auto_k.install()
    scheduler_module.install()


NUM_REQUESTS, MAX_TOKENS = 8, 40
NUM_ABORTED, ABORT_STEPS = 4, 7
"""After every seventh step, a running request is aborted, until four requests are aborted."""


def _make_prompts(model: Path) -> list[Any]:
    """Makes prompts that need more KV blocks than there are, so that requests are preempted."""
    ids = encode_corpus(model, 5_000)
    starts = range(0, 100 * NUM_REQUESTS, 100)
    return [{"prompt_token_ids": ids[start : start + 40]} for start in starts]


def _generate_with_aborts(engine: Engine, model: Path) -> list[list[int]]:
    """Returns the texts of the requests. Some are aborted, so their texts end early."""
    llm_engine: Any = engine.llm.llm_engine
    for number, prompt in enumerate(_make_prompts(model)):
        llm_engine.add_request(str(number), prompt, make_params(MAX_TOKENS))
    texts: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    aborted: set[int] = set()
    step = 0
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            texts[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
        candidates = [
            number
            for number, text in enumerate(texts)
            if number not in aborted and 0 < len(text) < MAX_TOKENS - 5
        ]
        if step % ABORT_STEPS == 0 and len(aborted) < NUM_ABORTED and candidates:
            longest = max(candidates, key=lambda number: len(texts[number]))
            llm_engine.abort_request([str(longest)])
            aborted.add(longest)
    assert len(aborted) == NUM_ABORTED
    assert all(len(texts[number]) < MAX_TOKENS for number in aborted)
    return texts


@pytest.mark.prove
@pytest.mark.parametrize("name", METHODS)
def test_text_is_equal_when_draft_lengths_change(model: Path, name: str) -> None:
    with start_engine(model, Method()) as engine:
        expected = engine.generate(_make_prompts(model), make_params(MAX_TOKENS))
    with start_engine(model, METHODS[name]) as engine:
        scheduler = engine.find_scheduler()
        observer = getattr(scheduler, scheduler_module.ATTRIBUTE).observer
        controller = observer.controller = RandomLengths(observer.controller)
        assert controller.lengths == (0, 4)
        texts = _generate_with_aborts(engine, model)
        assert texts == [longer[: len(text)] for longer, text in zip(expected, texts, strict=True)]
        assert [len(text) for text in texts].count(MAX_TOKENS) == NUM_REQUESTS - NUM_ABORTED
        preemptions, num_accepted = engine.read_counters()
        assert getattr(scheduler, scheduler_module.ATTRIBUTE).observer is observer, (
            "expected no error in the observer"
        )
    assert controller.verified_lengths == {0, 4}
    assert preemptions > 0
    assert num_accepted > 50


def test_permanent_grammar_request_does_not_prevent_drafts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifying takes no time by the test's clock, so that drafts pay."""
    time = [0.0]
    with start_engine(model, METHODS["synchronous"], num_gpu_blocks_override=100) as engine:
        scheduler = engine.find_scheduler()
        observer = getattr(scheduler, scheduler_module.ATTRIBUTE).observer
        monkeypatch.setattr(observer, "_clock", lambda: time[0])
        changes: list[Any] = []
        monkeypatch.setattr(observer._metrics, "observe_change", lambda *c: changes.append(c))
        llm_engine: Any = engine.llm.llm_engine
        ids = encode_corpus(model, 5_000)
        grammar = StructuredOutputsParams(regex="[a-z ]{400}")
        free, constrained = (
            SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, structured_outputs=value)
            for value in (None, grammar)
        )
        numbers = iter(range(10_000))
        steps = num_grammar_steps = 0
        while steps < 600 and not changes:
            if llm_engine.get_num_unfinished_requests() < 3:
                number = next(numbers)
                prompt = {"prompt_token_ids": ids[100 * number % 4000 :][:40]}
                is_constrained = not any(r.use_structured_output for r in scheduler.running)
                llm_engine.add_request(str(number), prompt, constrained if is_constrained else free)
            time[0] += 0.01
            llm_engine.step()
            has_grammar = any(r.use_structured_output for r in scheduler.running)
            num_grammar_steps += has_grammar
            steps += bool(num_grammar_steps)  # the grammar is compiled in the first steps
    assert changes
    assert changes[0][1] > 0
    assert num_grammar_steps > 0.9 * steps


@pytest.mark.parametrize("k", [1, 5, 16])
@pytest.mark.parametrize("max_num_seqs", [1, 4, 15, 16, 256, 1024])
def test_at_most_twice_as_many_graphs_are_captured_as_without_auto(
    k: int, max_num_seqs: int
) -> None:
    table = auto_k.make_table(auto_k.choose_lengths(k, max_num_seqs), max_num_seqs)
    manager = make_graph_manager(k, max_num_seqs, table=table, options={"k": "auto"})
    counts = count_full_graphs(manager)
    stock_counts = count_full_graphs(make_graph_manager(k, max_num_seqs))
    assert sum(counts.values()) <= 2 * sum(stock_counts.values())
    sizes = manager.compilation_config.cudagraph_capture_sizes
    for length, count in counts.items():
        assert count == len(auto_k.choose_graph_sizes(length, max_num_seqs, sizes))


@pytest.mark.parametrize("k", [1, 5, 8])
@pytest.mark.parametrize("max_num_seqs", [4, 100, 256])
@pytest.mark.parametrize("sizes", [None, [1, 2, 4, 8], [*range(8, 513, 8)], [1, 7, 100, 1024]])
def test_allowed_batches_and_lengths_are_those_with_a_graph(
    k: int, max_num_seqs: int, sizes: list[int] | None
) -> None:
    lengths = auto_k.choose_lengths(k, max_num_seqs)
    table = auto_k.make_table(lengths, max_num_seqs)
    lengths_by_batch = build_dynamic_sd_schedule_lookup(
        table, vllm_max_batch_size=max_num_seqs, vllm_num_speculative_tokens=k
    )
    assert {*lengths_by_batch[1:]} == {*lengths}
    manager = make_graph_manager(k, max_num_seqs, table=table, sizes=sizes, options={"k": "auto"})
    sizes = manager.compilation_config.cudagraph_capture_sizes
    widest = find_largest_batches(manager)
    for length in lengths:
        chosen = auto_k.choose_graph_sizes(length, max_num_seqs, sizes)
        assert max(chosen, default=0) == widest.get(length, 0)
    for length, batch in product(lengths, range(1, max_num_seqs + 1)):
        assert has_full_graph(manager, batch, length) == (batch <= widest.get(length, 0))


def test_graphs_of_tables_without_auto_are_those_of_vllm() -> None:
    table = auto_k.make_table((0, 3, 5), 64)
    manager = make_graph_manager(5, 64, table=table)
    stock_manager: Any = copy(manager)
    stock_manager._candidates, stock_manager._capture_descs = {}, {}
    CudaGraphManager._init_candidates.__wrapped__(stock_manager)
    assert manager._candidates == stock_manager._candidates
    assert manager._capture_descs == stock_manager._capture_descs
