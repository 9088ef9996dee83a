"""The drafters as vLLM-Ascend's runner calls them, on CPU tensors; and how they are installed, with
a stand-in of a few lines for vLLM-Ascend."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from configs import config
from ngram_npu import _library
from ngram_npu.engines.vllm import plugin
from ngram_npu.engines.vllm import v1_device as ascend
from ops import reference

# As of vLLM-Ascend in August 2026.
THEIRS = """
class {name}:
    def __init__(self, {arguments}): ...
    def load_model(self, *args, **kwargs): ...
    def dummy_run(
        self, num_tokens, with_prefill=None, in_graph_capturing=None, num_reqs=None,
        num_tokens_across_dp=None, aclgraph_runtime_mode=None, batch_descriptor=None,
        dummy_compute_logits=lambda hidden_states: None, is_profile=False,
    ): ...
    def propose(
        self, num_speculative_tokens: int, sampled_token_ids: "list[list[int]]",
        num_tokens_no_spec=None, token_ids_cpu=None, slot_mappings=None,
    ): ...
"""
FACTORY = (
    THEIRS.format(name="AscendNgramProposer", arguments="vllm_config, runner")
    + THEIRS.format(name="AscendNgramProposerNPU", arguments="vllm_config, device, runner")
    + """
def get_spec_decode_method(method, vllm_config, device, runner):
    if method == "ngram":
        return AscendNgramProposer(vllm_config, runner)
    return AscendNgramProposerNPU(vllm_config, device, runner)
"""
)
LAUNCHER = """
def triton_ngram_spec_decode(
    token_ids, num_tokens_no_spec, sampled_token_ids, discard_request_mask, vocab_size, min_n,
    max_n, k,
): ...
"""
RUNNER = (
    """
from vllm_ascend.spec_decode import (
    AscendNgramProposer, AscendNgramProposerNPU, get_spec_decode_method
)
"""
    + LAUNCHER
)


_config = functools.partial(config, k=3)


def _drafter() -> ascend.AscendNgramProposerNPU:
    return ascend.AscendNgramProposerNPU(_config(), torch.device("cpu"), object())


def _batch(seed: int, batch: int = 9, capacity: int = 48, width: int = 4) -> dict[str, Any]:
    """Rows of few tokens, some full, some discarded, some without a sampled token."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, capacity + 1, batch)
    counts = draw.integers(0, width + 1, batch)
    sampled = draw.integers(0, 4, (batch, width))
    sampled[np.arange(width) >= counts[:, None]] = -1
    return {
        "token_ids": torch.from_numpy(draw.integers(0, 4, (batch, capacity)).astype(np.int32)),
        "num_tokens_no_spec": torch.from_numpy(lengths.astype(np.int32)),
        "sampled_token_ids": torch.from_numpy(sampled.astype(np.int32)),
        "discard_request_mask": torch.from_numpy(draw.random(batch) < 0.2),
    }


def _launched(given: dict[str, Any], vocab_size: int = 100) -> tuple[torch.Tensor, ...]:
    return ascend.triton_ngram_spec_decode(**given, vocab_size=vocab_size, min_n=2, max_n=4, k=3)


def _expected(given: dict[str, Any], vocab_size: int) -> tuple[list[Any], np.ndarray]:
    """The reference's results in the launcher's order, and the rows afterwards."""
    rows = given["token_ids"].numpy().copy()
    results = reference.ngram_step_(
        rows,
        given["num_tokens_no_spec"].numpy().copy(),
        given["sampled_token_ids"].numpy(),
        given["discard_request_mask"].numpy(),
        None, False, vocab_size, 2, 4, 3, 0, False, rows.shape[1], None,
    )  # fmt: skip
    following, sampled, drafts, counts, _ = results
    return [following.tolist(), drafts.tolist(), counts.tolist(), sampled.tolist()], rows


@pytest.mark.parametrize("seed", range(20))
def test_the_launcher_s_contract(seed: int) -> None:
    given = _batch(seed)
    expected, rows = _expected(given, 100)
    lengths = given["num_tokens_no_spec"].clone()
    got = _launched(given)
    assert [r.tolist() for r in got] == expected
    assert all(r.dtype == torch.int32 for r in got)
    assert np.array_equal(given["token_ids"].numpy(), rows)
    assert torch.equal(given["num_tokens_no_spec"], lengths)


def test_what_else_the_runner_may_pass() -> None:
    """Rows of lists, int64, more rows than the batch, slices of its buffers."""
    given = _batch(1)
    expected, _ = _expected(given, 3)
    lists = [[t for t in row if t >= 0] for row in given["sampled_token_ids"].tolist()]
    more = torch.cat([given["sampled_token_ids"].long(), torch.zeros((2, 4), dtype=torch.int64)])
    for sampled in (lists, more):
        buffer = torch.full((12, 48), 7, dtype=torch.int32)
        buffer[:9] = _batch(1)["token_ids"]
        changed = {**given, "token_ids": buffer[:9], "sampled_token_ids": sampled}
        got = _launched(changed, 3)
        assert [r.tolist() for r in got] == expected
        assert buffer[9:].eq(7).all()


def test_the_launcher_keeps_drafting_where_layers_keep_a_state() -> None:
    """The drafter, created earlier, knows the model."""
    given = _batch(3)
    made = _config()
    for hybrid in (True, False):
        made.model_config.is_hybrid = hybrid
        ascend.AscendNgramProposerNPU(made, torch.device("cpu"), object())
        copied = {**given, "token_ids": given["token_ids"].clone()}
        got = _launched(copied)
        empty = (got[2] == 0) & (got[3] > 0)
        assert bool(empty.any()) is not hybrid


def test_an_empty_batch() -> None:
    given = _batch(1, batch=0)
    for sampled in (given["sampled_token_ids"], []):
        given["sampled_token_ids"] = sampled
        got = _launched(given)
        assert [tuple(r.shape) for r in got] == [(0,), (0, 3), (0,), (0,)]


def test_no_call_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step uses no CUDA call and nothing that waits."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("called")

    for name in ("current_stream", "Stream", "Event", "synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    for name in ("item", "tolist", "cpu", "pin_memory", "nonzero", "cuda"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    given = _batch(2)
    _launched(given)


def test_as_the_runner_makes_and_warms_it() -> None:
    drafter = _drafter()
    assert (drafter.min_n, drafter.max_n, drafter.k) == (2, 4, 3)
    drafter.load_model(object())
    drafter.dummy_run(num_tokens=8, with_prefill=True, is_profile=False)
    wrong = _config()
    wrong.speculative_config.prompt_lookup_max = 65
    with pytest.raises(ValueError, match="max_n"):
        ascend.AscendNgramProposerNPU(wrong, torch.device("cpu"), object())
    for option in ({"sizes": "ladder"}, {"engine": "index"}):
        wrong = _config(**option)
        with pytest.raises(ValueError, match=rf"^ngram_npu: {next(iter(option))}: expected .* npu"):
            ascend.AscendNgramProposerNPU(wrong, torch.device("cpu"), object())


def test_the_host_s_drafter() -> None:
    drafter = ascend.AscendNgramProposer(_config(), object())
    token_ids = np.zeros((8, 64), np.int32)
    token_ids[0, :5] = [1, 2, 3, 1, 2]
    lengths = np.array([5] + [0] * 7, np.int32)
    assert drafter.propose(2, [[2]], lengths, token_ids) == [[3, 1]]
    assert drafter.load_model(object()) is None
    assert drafter.dummy_run(1) is None


Package = Callable[..., None]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Makes a vLLM-Ascend with these sources; pretends that the device's kernels are present."""
    finders = list(sys.meta_path)
    for folder in ("spec_decode", "worker"):
        (tmp_path / "vllm_ascend" / folder).mkdir(parents=True)
    for init in ("__init__.py", "worker/__init__.py"):
        (tmp_path / "vllm_ascend" / init).touch()
    monkeypatch.syspath_prepend(tmp_path)
    has_kernel = _library.has_kernel
    monkeypatch.setattr(
        _library, "has_kernel", lambda op, device: device == "npu" or has_kernel(op, device)
    )

    def make(factory: str = FACTORY, runner: str = RUNNER) -> None:
        (tmp_path / "vllm_ascend/spec_decode/__init__.py").write_text(factory)
        (tmp_path / "vllm_ascend/worker/model_runner_v1.py").write_text(runner)

    yield make
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


def _runner() -> ModuleType:
    return importlib.import_module(plugin.ASCEND_RUNNER)


def test_both_methods_are_served(package: Package) -> None:
    package()
    plugin.install()
    plugin.install()
    assert "vllm_ascend" not in sys.modules
    runner = _runner()
    for method, ours in (
        ("ngram", ascend.AscendNgramProposer),
        ("ngram_gpu", ascend.AscendNgramProposerNPU),
    ):
        drafter = runner.get_spec_decode_method(method, _config(), torch.device("cpu"), object())
        assert isinstance(drafter, ours)
        assert isinstance(drafter, getattr(runner, ours.__name__))
    assert runner.triton_ngram_spec_decode is ascend.triton_ngram_spec_decode


# The part that the plugin reads, per release of the guide's table: only names and parameters.
BEFORE = """
class NgramProposer:
    def __init__(self, vllm_config, device, runner): ...
    def load_model(self, *args, **kwargs): ...
    def dummy_run(
        self, num_tokens, with_prefill=None, skip_attn=None, num_reqs=None,
        num_tokens_across_dp=None, aclgraph_runtime_mode=None, batch_descriptor=None,
    ): ...
def get_spec_decode_method(method, vllm_config, device, runner):
    return NgramProposer(vllm_config, device, runner)
"""
RELEASES = {
    "before v0.24.0rc": (BEFORE, "from vllm_ascend.spec_decode import get_spec_decode_method"),
    "v0.24.0rc to v0.25.1": (FACTORY, RUNNER.replace(LAUNCHER, "")),
    "v0.26.0rc, main of August 2026": (FACTORY, RUNNER),
}
V2 = "these, with the V2 runner"  # raises by itself
NEXT_V2 = "commit 0426276041be of autumn 2026, V2 runner"  # test_vllm_ascend_v2.py


def _table() -> dict[str, list[str]]:
    guide = Path(__file__).parents[4] / "docs/guides/ascend.md"
    _, _, table = guide.read_text(encoding="utf-8").partition("| vLLM-Ascend | `ngram` |")
    rows = [line.strip("|").split("|") for line in table.split("\n\n")[0].splitlines()[2:]]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_guide_has_these_releases() -> None:
    assert list(_table()) == [*RELEASES, V2, NEXT_V2]


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_guide_says_of_a_release(package: Package, release: str) -> None:
    package(*RELEASES[release])
    plugin.install()
    runner = _runner()
    of_both = ((plugin.ASCEND_HOST,), (plugin.ASCEND_DEVICE, plugin.ASCEND_LAUNCHER))
    for names, says in zip(of_both, _table()[release], strict=True):
        served = [getattr(runner, name, None) is getattr(ascend, name) for name in names]
        assert served == [says == "served"] * len(names), says


@pytest.mark.parametrize(
    ("change", "method", "doubt"),
    [
        pytest.param(
            ("token_ids_cpu=None", "tokens=None"), "ngram", "AscendNgramProposer.propose takes"
        ),
        pytest.param(
            ("max_n, k,\n", "max_n, k, stride\n"), "ngram_gpu", "triton_ngram_spec_decode takes"
        ),
        pytest.param(
            (LAUNCHER, LAUNCHER + "class AscendNgramProposer(AscendNgramProposer): ...\n"),
            "ngram",
            "makes another AscendNgramProposer than",
        ),
    ],
)
def test_what_is_unlike_is_left_as_it_is(
    package: Package,
    caplog: pytest.LogCaptureFixture,
    change: tuple[str, str],
    method: str,
    doubt: str,
) -> None:
    package(FACTORY.replace(*change), RUNNER.replace(*change))
    plugin.install()
    runner = _runner()
    said = [m for m in caplog.messages if f"not enabled for method {method!r}" in m]
    assert len(said) == 1
    assert doubt in said[0]
    assert "\n" not in said[0]
    name = plugin.ASCEND_HOST if method == "ngram" else plugin.ASCEND_DEVICE
    assert getattr(runner, name) is not getattr(ascend, name)
    if method == "ngram_gpu":
        launcher = getattr(runner, plugin.ASCEND_LAUNCHER, None)
        assert launcher is not ascend.triton_ngram_spec_decode


def test_without_kernels_only_the_host_s_is_served(
    package: Package, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    package()
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: False)
    plugin.install()
    runner = _runner()
    assert runner.AscendNgramProposer is ascend.AscendNgramProposer
    assert runner.AscendNgramProposerNPU is not ascend.AscendNgramProposerNPU
    reason = _library.backends()["npu"].reason
    assert reason
    assert f"no NPU kernels: {reason}" in caplog.text
