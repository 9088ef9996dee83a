"""The speculator for vLLM-Ascend's V2 runner beside vLLM-Ascend's own, on CPU tensors.

Theirs is a stand-in: its interface, and its rules said row by row. With the environment's
VLLM_ASCEND_SOURCE, the folder of a checkout, it is their own file. Their kernel's rule is in Python
in either case, since Triton has no NPU here.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from configs import config
from ngram_npu import _library
from ngram_npu.engines.vllm import plugin, v2
from ops.reference.drafting import draft_for
from torch import Tensor
from v2_state import RandomState, RequestState, propose

R, S, K, VOCABULARY = 6, 96, 4, 3
CPU = torch.device("cpu")
SOURCE = os.environ.get("VLLM_ASCEND_SOURCE")
IMPORTS = {
    "vllm.config": "VllmConfig",
    "vllm.config.compilation": "CUDAGraphMode",
    "vllm.v1.worker.gpu.spec_decode.speculator": "BaseSpeculator",
}
LAUNCHER = "vllm_ascend.ops.triton.spec_decode.ngram"

# As of vLLM-Ascend's commit 0426276041be.
THEIRS = """
import torch
from vllm_ascend.ops.triton.spec_decode.ngram import triton_ngram_spec_decode
class AscendNgramSpeculator:
    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    def __init__(self, vllm_config, device, req_states):
        self.config, self.state = vllm_config, req_states
    def init_cudagraph_manager(self, cudagraph_mode): ...
    def capture(self): ...
    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
        num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
        dp_sync=None, dummy_run=False, skip_attn_for_dummy_run=False, mm_inputs=None,
        is_profile=False, num_speculative_tokens=None,
    ):
        spec, vocab_size = self.config.speculative_config, self.config.model_config.get_vocab_size()
        k = spec.num_speculative_tokens
        drafts = torch.full((input_batch.num_reqs, k), 0 if dummy_run else -1)
        for i, row in enumerate(() if dummy_run else input_batch.idx_mapping.tolist()):
            if row >= 0:
                tokens = self.state.all_token_ids.gpu[None, row].clone()
                end, count = self.state.total_len.gpu[None, row], num_sampled[i]
                before = end - count
                _, found, (valid,), _ = triton_ngram_spec_decode(
                    tokens, before, tokens[:, before:end], count[None] <= 0, vocab_size,
                    spec.prompt_lookup_min, spec.prompt_lookup_max, k,
                )
                drafts[i] = last_sampled[row]
                drafts[i, :valid] = found[0, :valid]
        return drafts
"""


def launch(
    token_ids: Tensor, num_tokens: Tensor, sampled: Tensor, discard: Tensor, *lookup: int
) -> tuple[None, Tensor, Tensor, None]:
    """What their kernel does: the longest suffix's earliest occurrence, and what follows it."""
    vocab_size, min_n, max_n, k = lookup
    drafts = torch.full((len(token_ids), k), -1, dtype=torch.int32)
    counts = torch.zeros(len(token_ids), dtype=torch.int32)
    for i, length in enumerate(num_tokens.tolist()):
        new = [t for t in sampled[i].tolist() if -1 < t < vocab_size and not discard[i]]
        row = (token_ids[i, :length].tolist() + new)[: token_ids.shape[1]]
        draft = draft_for(row, min_n, max_n, k, 0, False, 2 * S)[0] if new else []
        counts[i] = len(draft)
        drafts[i, : len(draft)] = torch.tensor(draft)
    return None, drafts, counts, None


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Their speculator's module, imported but not served."""
    for name, imported in {**IMPORTS, LAUNCHER: "triton_ngram_spec_decode"}.items():
        stand_in: Any = ModuleType(name)
        setattr(stand_in, imported, launch if name == LAUNCHER else type(imported, (), {}))
        monkeypatch.setitem(sys.modules, name, stand_in)
    base: Any = sys.modules["vllm.v1.worker.gpu.spec_decode.speculator"]
    base.BaseSpeculator.num_query_per_req = 1
    base.BaseSpeculator.num_extra_query_per_req = 0
    made = ModuleType(plugin.ASCEND_V2_MODULE)
    parts = plugin.ASCEND_V2_MODULE.split(".")
    exec(Path(SOURCE, *parts).with_suffix(".py").read_text() if SOURCE else THEIRS, made.__dict__)
    monkeypatch.setitem(sys.modules, plugin.ASCEND_V2_MODULE, made)
    finders = list(sys.meta_path)
    yield made
    sys.meta_path[:] = finders


_config = functools.partial(config, k=K, rows=R, length=S, vocabulary=VOCABULARY)


def _propose(speculator: Any, state: RequestState, *given: Any, **more: Any) -> Any:
    return propose(speculator, state, *given, num_speculative_tokens=K, **more).tolist()


def _unlike(module: Any, **options: Any) -> tuple[int, int]:
    """How many rows of random steps differ from theirs, and how many have a draft. A place of each
    batch has no request."""
    state = RandomState(R, S, K + 1, seed=3)
    theirs = module.AscendNgramSpeculator(_config(), CPU, state)
    plugin.install_ascend()
    ours = module.AscendNgramSpeculator(_config(**options), CPU, state)
    assert isinstance(ours, v2.NgramSpeculator)
    assert not isinstance(theirs, v2.NgramSpeculator)
    state.fill()
    differ = drafted = 0
    for rows, sampled in state.steps(R - 1):
        given = [*rows, -1], [*sampled, 1]
        expected, got = (_propose(speculator, state, *given) for speculator in (theirs, ours))
        assert expected[-1] == [-1] * K
        differ += sum(a != b for a, b in zip(expected, got, strict=True))
        drafted += sum(len(set(row)) > 1 for row in expected)
    return differ, drafted


@pytest.mark.parametrize("options", [{}, {"draft_on": "host", "engine": "index"}])
def test_drafts_are_theirs(module: ModuleType, options: dict[str, str]) -> None:
    differ, drafted = _unlike(module, **options)
    assert differ == 0
    assert drafted > 50


def test_other_drafts_are_noticed(module: ModuleType) -> None:
    assert _unlike(module, match_policy="latest")[0] > 20


@pytest.mark.parametrize("options", [{}, {"draft_on": "host"}])
def test_a_step_without_requests(module: Any, options: dict[str, str]) -> None:
    plugin.install_ascend()
    state = RequestState(R, S)
    speculator = module.AscendNgramSpeculator(_config(**options), CPU, state)
    assert _propose(speculator, state, [], []) == []
    assert _propose(speculator, state, [1, 0], [1, 1], dummy_run=True) == [[0] * K] * 2


@pytest.mark.usefixtures("info")
@pytest.mark.parametrize(
    ("has_kernel", "doubt"),
    [(False, "no kernels for npu: "), (True, "all_token_ids.gpu (rank, dtype, device, stride)")],
)
def test_theirs_is_made_where_ours_cannot_be(
    module: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_kernel: bool,
    doubt: str,
) -> None:
    stock = module.AscendNgramSpeculator
    monkeypatch.setattr(stock, "__init__", lambda self, vllm_config, device, req_states: None)
    plugin.install_ascend()
    plugin.install_ascend()
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: has_kernel)
    npu = SimpleNamespace(type="npu")
    made = module.AscendNgramSpeculator(_config(), npu, RequestState(R, S))
    assert type(made) is stock
    enabled, refused = caplog.messages
    assert enabled == "ngram_npu: enabled for n-gram methods of the V2 runner (NGRAM_NPU_VLLM=1)"
    assert "not enabled for the V2 runner, which is left as it is: " + doubt in refused


@pytest.mark.usefixtures("info")
def test_a_speculator_that_is_called_otherwise_is_left_as_it_is(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(module.AscendNgramSpeculator):  # type: ignore[misc, name-defined]
        def __init__(self, vllm_config: Any, device: Any) -> None: ...

    module.AscendNgramSpeculator = Other
    plugin.install_ascend()
    assert module.AscendNgramSpeculator is Other
    (line,) = caplog.messages
    assert "AscendNgramSpeculator.__init__ takes (self, vllm_config, device), expected" in line
