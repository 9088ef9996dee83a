"""V1's runner with asynchronous scheduling, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm
from engines import start_engine
from v1_runs import METHODS, Recorder, make_requests

if TYPE_CHECKING:
    from conftest import Runs

OURS = ["padded", "trimmed", "padded_scan"]


@pytest.mark.parametrize("method", OURS)
def test_text_equals_no_speculation(runs: Runs, method: str) -> None:
    """Sampled requests would consume other random numbers."""
    assert runs(method, "greedy").find_different(runs("none", "greedy")) == []


@pytest.mark.parametrize("method", ["padded", "padded_scan"])
def test_structured_text_with_padded_drafts_equals_no_speculation(runs: Runs, method: str) -> None:
    assert runs(method, "structured").find_different(runs("none", "structured")) == []


def test_structured_text_with_trimmed_drafts_equals_stock(runs: Runs) -> None:
    """vLLM's text was wrong before 0.33."""
    expected = runs("none", "structured")
    wrong = runs("async_stock", "structured").find_different(expected)
    assert len(wrong) >= 5 if vllm.__version__.startswith("0.32.") else wrong == []
    assert runs("trimmed", "structured").find_different(expected) == wrong


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("requests", ["greedy", "sampled", "structured"])
def test_drafts_equal_stock_class(runs: Runs, method: str, requests: str) -> None:
    run = runs(method, requests)
    assert run.mismatches == []
    assert sum(map(bool, run.drafts)) >= 20


@pytest.mark.parametrize("requests", ["greedy", "sampled"])
def test_trimmed_run_equals_stock_run(runs: Runs, requests: str) -> None:
    run, stock = runs("trimmed", requests), runs("async_stock", requests)
    assert run.find_different(stock) == []
    assert run.steps_of_requests == stock.steps_of_requests
    assert (run.accepted, run.steps) == (stock.accepted, stock.steps)


@pytest.mark.parametrize("method", OURS)
def test_greedy_requests_have_preemptions_and_rejections(runs: Runs, method: str) -> None:
    run = runs(method, "greedy")
    assert run.preemptions >= 5
    assert run.accepted >= 300
    assert run.prefilling_rows >= 40
    assert run.accepted < 0.95 * sum(map(len, run.drafts))


def test_padded_step_does_not_wait_for_number_of_drafts(runs: Runs) -> None:
    stock = runs("async_stock", "greedy")
    assert stock.waits >= stock.steps
    assert runs("trimmed", "greedy").waits == stock.waits
    assert [runs("padded", requests).waits for requests in ("greedy", "sampled")] == [0, 0]


@pytest.mark.parametrize("method", ["keep_drafting", "trimmed_keep_drafting"])
def test_keep_drafting_drafts_in_every_step(runs: Runs, method: str) -> None:
    """Needed by models with recurrent layers; this model has none."""
    run = runs(method, "greedy")
    assert run.find_different(runs("none", "greedy")) == []
    assert all(run.drafts)
    assert run.mismatches, "the stock class has empty drafts"


def test_random_drafts_do_not_change_text(model: Path, runs: Runs) -> None:
    """The comparison with the stock class detects the wrong drafts."""
    method = METHODS["padded"]
    with start_engine(model, method) as engine:
        propose = engine.drafter.propose

        def propose_random(*args: Any) -> Any:
            drafts, counts = propose(*args)
            generator = torch.Generator().manual_seed(int(drafts.sum()))
            return torch.randint(0, 1000, drafts.shape, generator=generator).int(), counts

        engine.drafter.propose = propose_random
        run = Recorder(engine, method).run(make_requests(model))
    assert run.find_different(runs("none", "greedy")) == []
    assert run.mismatches


@pytest.mark.parametrize("method", ["padded", "trimmed"])
def test_prompt_embeddings_with_ngram_gpu_raise(model: Path, method: str) -> None:
    message = "ngram_npu: enable_prompt_embeds: expected false, got true"
    with (
        pytest.raises(ValueError, match=message),
        start_engine(model, METHODS[method], enable_prompt_embeds=True),
    ):
        pass
