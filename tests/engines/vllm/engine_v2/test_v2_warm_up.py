"""The requests with which vLLM's worker warms its kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import beside_runs
import pytest
import v2_runs
from ngram_npu.engines.vllm import plugin
from ngram_npu.engines.vllm.v2 import LOOKUP_ATTRIBUTE
from vllm import SamplingParams
from vllm.v1.worker.gpu import model_runner, warmup

STORE = {**v2_runs.LADDER, "store": "live"}
BESIDE_NEURAL = beside_runs.Method("draft_model", ours=STORE)


@pytest.mark.parametrize("beside", [False, True])
def test_they_leave_no_trace(model: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    monkeypatch.setattr(model_runner, "init_speculator", model_runner.init_speculator)
    plugin.install_v2()
    plugin.install_beside()
    arguments = BESIDE_NEURAL.arguments(model) if beside else v2_runs.Method(ours=STORE).arguments
    result = v2_runs.Run()
    with v2_runs.engine(model, arguments, result) as (llm, runner):
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        lookup = getattr(runner.speculator, LOOKUP_ATTRIBUTE, runner.speculator)
        calls = _count(runner.speculator)
        steps = runner, worker.execute_model, worker.sample_tokens
        monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)  # a GPU's
        # Triton's interpreter cannot run the kernel for top_k and top_p.
        greedy = SamplingParams(temperature=0)
        monkeypatch.setattr(SamplingParams, "for_sampler_warmup", lambda: greedy)
        warmup.warmup_kernels(*steps)
        assert warmup.run_mixed_prefill_decode_warmup(*steps, 8)
        assert len(calls) > 5
        held, tally = lookup.shared_store.contents, lookup._stats
        found = held.statistics
        assert (found.lookups, found.tokens_entered, found.open_slots) == (0, 0, 0)
        assert set(tally._sums.values()) == {0}
        assert lookup.index.statistics.rows_indexed == 0
        v2_runs.serve(llm, v2_runs.requests(llm.get_tokenizer())[:4], result)
        assert held.statistics.tokens_entered > 50
        assert tally._sums["rows"] > 30
        del llm, runner, worker, lookup, calls, steps, held, tally


def _count(speculator: Any) -> list[bool]:
    """Notes of each call from now on, unless the runner calls it a dummy's."""
    propose, calls = speculator.propose, []

    def counted(*args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        if not dummy_run:
            calls.append(True)
        return propose(*args, dummy_run=dummy_run, **kwargs)

    speculator.propose = counted
    return calls
