"""vLLM's GPU code from its files: it loads without vLLM, and where it can run on the CPU it drafts
what ours drafts. Its Triton kernels need a GPU: there the harness compares before it times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tools.bench.data import make_workload
from tools.bench.gpu import vllm_files
from tools.bench.gpu.measure import STEPS
from tools.bench.gpu.ops import drafting
from tools.bench.gpu.ours import Step
from tools.bench.gpu.vllm_peers import V1, V2, V1Kernel, VllmCorrection
from tools.bench.options import Options, Size, UnavailableError

STUB = """
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
def vllm() -> None:
    try:
        vllm_files.load(None)
    except UnavailableError as error:
        pytest.skip(str(error))


def unpacked(folder: Path, text: str) -> Path:
    file = folder / "vllm/v1/spec_decode/ngram_proposer_gpu.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return folder


def test_a_file_with_stand_ins(tmp_path: Path) -> None:
    from types import SimpleNamespace

    before = {name for name in sys.modules if name.partition(".")[0] == "vllm"}
    files = vllm_files.load(unpacked(tmp_path, STUB))
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=7))
    proposer = files.proposer(config, torch.device("cpu"))
    assert proposer.seen.tolist() == [7, 7]
    assert {name for name in sys.modules if name.partition(".")[0] == "vllm"} == before


def test_what_does_not_load_is_said(tmp_path: Path) -> None:
    files = vllm_files.load(unpacked(tmp_path, "from nowhere_at_all import x\n"))
    with pytest.raises(UnavailableError, match=r"ngram_proposer_gpu\.py does not load"):
        _ = files.proposer
    with pytest.raises(UnavailableError, match=r"no .*speculator\.py"):
        _ = files.speculator


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_files.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(vllm_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="not installed"):
        vllm_files.load(None)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("config", [(1, 1), (2, 4), (3, 5)])
def test_v1_drafts_what_ours_drafts(config: tuple[int, int]) -> None:
    options = Options(min_n=config[0], max_n=config[1], data_kind="random")
    workload = drafting(make_workload(Size(7, 400), options))
    contestants = [kind(workload, options, "cpu") for kind in (Step, V1, V1Kernel)]
    assert contestants[1]._proposer is contestants[2]._proposer
    drafts = []
    for contestant in contestants:
        contestant.load(workload)
        contestant.restore()
        assert contestant.semantics == contestants[0].semantics
        drafts.append([contestant.drafts(contestant.step(n)) for n in range(STEPS)])
    assert drafts[1] == drafts[0]
    assert drafts[2] == drafts[0]
    assert any(draft for step in drafts[0] for draft in step)


@pytest.mark.usefixtures("vllm")
def test_all_files_load() -> None:
    files = vllm_files.load(None)
    assert files.version != "unknown"
    assert callable(files.speculator)
    assert files.slot_mapping_kernel.triton_block_size == 1024
    assert files.slot_mapping_kernel.kernel is not None


@pytest.mark.usefixtures("vllm")
def test_the_correction_corrects() -> None:
    """Uncompiled, the function gives what our operator gives."""
    from tools.bench.gpu.ours import Fused

    options = Options(data_kind="random")
    workload = make_workload(Size(9, 100), options)
    ours = Fused(workload, options, "cpu")
    ours.restore()
    ours.step(0)
    theirs = Fused(workload, options, "cpu").tensors
    names = ("num_computed_tokens", "num_accepted_tokens", "prev_positions", "num_sampled_prev",
             "num_draft_prev", "host_num_computed_tokens")  # fmt: skip
    correct = vllm_files.load(None).correct
    correct._torchdynamo_orig_callable(*(theirs[name] for name in names))
    for name in names[:2]:
        assert torch.equal(ours.tensors[name], theirs[name])


@pytest.mark.usefixtures("vllm")
def test_policies_they_do_not_know() -> None:
    options = Options(data_kind="random")
    workload = make_workload(Size(2, 40), options)
    with pytest.raises(UnavailableError, match="latest match only"):
        V2(workload, options, "cpu")
    with pytest.raises(UnavailableError, match="earliest match only"):
        V1(workload, Options(match="latest", data_kind="random"), "cpu")


@pytest.mark.skipif(vllm_files.has_triton(), reason="Triton is installed")
def test_without_triton_its_users_are_left_out() -> None:
    latest = Options(match="latest", data_kind="random")
    workload = make_workload(Size(2, 40), latest)
    for kind in (V2, VllmCorrection):
        with pytest.raises(UnavailableError, match="Triton is not installed"):
            kind(workload, latest, "cpu")
