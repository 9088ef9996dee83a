"""The custom class checks how the runner would call it, on made-up runners."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ngram_npu.engines.vllm import NgramProposer
from ngram_npu.engines.vllm.patching import ASCEND_RUNNER, CLASSES, RUNNER
from vllm_config import vllm_config


class Known:
    """As in vLLM 0.26 to 0.32."""

    def propose_draft_token_ids(self: Any, sampled_token_ids: Any, slot_mappings: Any) -> Any:
        method = self.speculative_config.method
        if method == "ngram":
            return self.drafter.propose(4, sampled_token_ids, slot_mappings=slot_mappings)
        elif method == "custom_class":  # noqa: RET505
            return self.drafter.propose(
                sampled_token_ids,
                self.input_batch.num_tokens_no_spec,
                self.input_batch.token_ids_cpu,
                slot_mappings=slot_mappings,
            )
        else:
            return self.drafter.propose()


class Ascend:
    """As in vLLM-Ascend's pull request 15710, September 2026."""

    def propose_draft_token_ids(
        self: Any, valid_sampled_token_ids: Any, attention_metadata: Any = None
    ) -> Any:
        if self.speculative_config.method == "custom_class":
            return self.drafter.propose(
                valid_sampled_token_ids,
                self.input_batch.num_tokens_no_spec,
                self.input_batch.token_ids_cpu,
                slot_mappings=getattr(attention_metadata, "slot_mapping", None),
            )
        return None


class Elsewhere:
    def propose_draft_token_ids(self: Any) -> Any:
        return self.drafter.propose()


Made = Callable[..., NgramProposer]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    def making(runner: type, name: str = RUNNER) -> NgramProposer:
        module = ModuleType(name)
        setattr(module, CLASSES[name], runner)
        monkeypatch.setitem(sys.modules, name, module)
        return NgramProposer(vllm_config())

    return making


def test_the_known_call_passes(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    made(Known)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_vllm_ascend_s_call_passes(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    runner = Ascend()
    runner.drafter = made(Ascend, ASCEND_RUNNER)  # type: ignore[attr-defined]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    runner.speculative_config = SimpleNamespace(method="custom_class")  # type: ignore[attr-defined]
    runner.input_batch = SimpleNamespace(  # type: ignore[attr-defined]
        num_tokens_no_spec=np.array([5, 2], np.int32),
        token_ids_cpu=np.array([[1, 2, 3, 1, 2, 0], [4, 5, 0, 0, 0, 0]], np.int32),
    )
    assert runner.propose_draft_token_ids([[2], []]) == [[3, 1, 2], []]


OTHER = """
class Runner:
    def propose_draft_token_ids(self, k, sampled_token_ids, batch):
        if self.speculative_config.method == "custom_class":
            return self.drafter.propose({})
"""


def _calling(folder: Path, arguments: str) -> type:
    """A runner that calls with these arguments; its source can be read."""
    (folder / "other.py").write_text(OTHER.format(arguments))
    runner: type = runpy.run_path(str(folder / "other.py"))["Runner"]
    return runner


def test_of_two_runners_vllm_ascend_s_makes_the_call(made: Made, tmp_path: Path) -> None:
    """It is based on vLLM's, which is loaded too."""
    made(Known)
    with pytest.raises(ValueError, match=r"with \(k, sampled_token_ids"):
        made(_calling(tmp_path, "k, sampled_token_ids"), ASCEND_RUNNER)


@pytest.mark.parametrize(
    "arguments",
    [
        "k, sampled_token_ids, num_tokens_no_spec, token_ids_cpu",
        "sampled_token_ids, token_ids_cpu, num_tokens_no_spec",
        "sampled_token_ids, num_tokens_no_spec, token_ids_cpu, metadata=None",
        "sampled_token_ids, num_tokens_no_spec",
    ],
)
def test_another_call_is_refused_in_one_line(made: Made, tmp_path: Path, arguments: str) -> None:
    with pytest.raises(ValueError) as caught:
        made(_calling(tmp_path, arguments))
    given = arguments.replace("=None", "=")
    assert str(caught.value).endswith(
        f"is not supported: its runner calls a custom class with ({given}), expected "
        "(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)"
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("runner", [Elsewhere, object])
def test_a_call_that_is_not_found_is_said_to_be_unchecked(
    made: Made, caplog: pytest.LogCaptureFixture, runner: type
) -> None:
    logging.getLogger("vllm").propagate = True
    made(runner)
    assert "the runner's call is not checked" in caplog.text
