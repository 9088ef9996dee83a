"""The custom class looks at how the runner would call it, on runners made up here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from ngram_npu.vllm import NgramProposer
from ngram_npu.vllm.runner_call import RUNNER
from vllm_config import vllm_config


class Known:
    """As vLLM 0.26 to 0.32 have it."""

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


class OneMore:
    def propose_draft_token_ids(self: Any, k: Any, sampled_token_ids: Any, batch: Any) -> Any:
        if self.speculative_config.method == "custom_class":
            return self.drafter.propose(
                k, sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu
            )
        return None


class OtherOrder:
    def propose_draft_token_ids(self: Any, sampled_token_ids: Any, batch: Any) -> Any:
        if self.speculative_config.method == "custom_class":
            return self.drafter.propose(
                sampled_token_ids, batch.token_ids_cpu, batch.num_tokens_no_spec
            )
        return None


class OtherKeyword:
    def propose_draft_token_ids(self: Any, sampled_token_ids: Any, batch: Any) -> Any:
        if self.speculative_config.method == "custom_class":
            return self.drafter.propose(
                sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu, metadata=None
            )
        return None


class OneLess:
    def propose_draft_token_ids(self: Any, sampled_token_ids: Any, batch: Any) -> Any:
        if self.speculative_config.method == "custom_class":
            return self.drafter.propose(sampled_token_ids, batch.num_tokens_no_spec)
        return None


class Elsewhere:
    def propose_draft_token_ids(self: Any) -> Any:
        return self.drafter.propose()


Made = Callable[[type], NgramProposer]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    def making(runner: type) -> NgramProposer:
        module = ModuleType(RUNNER)
        module.GPUModelRunner = runner  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, RUNNER, module)
        return NgramProposer(vllm_config())

    return making


def test_the_known_call_passes(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    made(Known)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("runner", "given"),
    [
        (OneMore, "k, sampled_token_ids, num_tokens_no_spec, token_ids_cpu"),
        (OtherOrder, "sampled_token_ids, token_ids_cpu, num_tokens_no_spec"),
        (OtherKeyword, "sampled_token_ids, num_tokens_no_spec, token_ids_cpu, metadata="),
        (OneLess, "sampled_token_ids, num_tokens_no_spec"),
    ],
)
def test_another_call_is_refused_in_one_line(made: Made, runner: type, given: str) -> None:
    with pytest.raises(ValueError) as caught:
        made(runner)
    assert str(caught.value).endswith(
        f"is not one it knows: its runner calls a custom class with ({given}), expected "
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
