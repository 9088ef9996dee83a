"""Our drafts in `model.generate`: the text is the same."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ngram_npu
import pytest
import torch
from ngram_npu import NgramConfig

pytest.importorskip("transformers")

import ngram_npu.engines.transformers as ours
from runner import worlds
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

README = Path(__file__).resolve().parents[2] / "README.md"
REQUESTS = 100
NEW_TOKENS = 24
STOP = ord("8")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """No prompt ends with the stop token: older versions stop speculating after it."""
    found = [p for p in worlds.prompts(REQUESTS + 20, seed=2) if p[-1] != STOP]
    return found[:REQUESTS]


@pytest.fixture
def passes(plain_model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an item for each forward pass."""
    counted: list[int] = []
    forward = plain_model.forward

    def counting(*arguments: Any, **keywords: Any) -> Any:
        counted.append(1)
        return forward(*arguments, **keywords)

    monkeypatch.setattr(plain_model, "forward", counting)
    return counted


@pytest.fixture(scope="module")
def plain(plain_model: Any, prompts: list[list[int]]) -> torch.Tensor:
    return plain_model.generate(
        **worlds.padded(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=STOP
    )


def test_assisted(
    plain_model: Any,
    passes: list[int],
    prompts: list[list[int]],
    plain: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request at a time. Every text is that of the batch without speculation."""
    drafted, candidates = [], ours.NgramCandidates.get_candidates

    def recorded(self: Any, input_ids: torch.Tensor, *more: Any, **keywords: Any) -> Any:
        found = candidates(self, input_ids, *more, **keywords)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(ours.NgramCandidates, "get_candidates", recorded)
    generated = 0
    with ours.drafting(plain_model, NgramConfig(k=4)):
        for prompt, row in zip(prompts, plain, strict=True):
            found = plain_model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=STOP,
            )[0, len(prompt) :]
            text = row[plain.shape[1] - NEW_TOKENS :]
            assert text[: len(found)].equal(found)
            assert not text[len(found) :].any()
            generated += len(found)
    assert max(drafted) == 4
    assert len(passes) < 0.75 * generated
    assert not {"_get_candidate_generator", "generate"} & {*vars(plain_model)}


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_a_store_is_shared(
    plain_model: Any, passes: list[int], visibility: Literal["live", "finish"]
) -> None:
    """Calls within a block share it. The text is the same."""

    def passes_of_call() -> int:
        before = len(passes)
        found = plain_model.generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=STOP)
        assert found.equal(plain)
        return len(passes) - before

    prompt = torch.tensor([worlds.prompts(1)[0]])
    plain = plain_model.generate(
        prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=STOP
    )
    ngram = replace(worlds.LADDER, store=visibility, store_tokens=8192)
    for _ in range(2):  # a block does not see the text of the previous one
        with ours.drafting(plain_model, ngram):
            first, second = passes_of_call(), passes_of_call()
        assert second < first


def test_a_wrong_draft_is_not_believed(plain_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(self: Any, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.cat([input_ids, torch.full((1, 1), 33)], 1), None

    prompt = torch.tensor([worlds.prompts(1)[0]])
    plain = plain_model.generate(prompt, max_new_tokens=8, do_sample=False)
    monkeypatch.setattr(ours.NgramCandidates, "get_candidates", nonsense)
    with ours.drafting(plain_model):
        assert plain_model.generate(prompt, max_new_tokens=8, do_sample=False).equal(plain)


def test_candidates_end_before_the_token_that_ends_the_output() -> None:
    seen = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
    for longest, stops, expected in ((20, [], [7, 8, 9]), (20, [9], [7, 8]), (9, [], [7])):
        criteria = StoppingCriteriaList([MaxLengthCriteria(longest), EosTokenCriteria(stops)])
        candidates = ours.NgramCandidates(NgramConfig(k=3), longest, criteria)
        found, logits = candidates.get_candidates(seen[:, :-1])
        assert found.equal(seen[:, :-1])  # nothing is drafted for the prompt
        found, logits = candidates.get_candidates(seen)
        assert found.tolist() == [seen[0].tolist() + expected]
        assert logits is None


def test_the_lines_of_the_readme(plain_model: Any) -> None:
    (lines,) = re.findall(r"^with ngram_npu\.transformers.*\n(?: .*\n)+", README.read_text(), re.M)
    inputs = worlds.padded(worlds.prompts(1))
    exec(lines, {"ngram_npu": ngram_npu, "model": plain_model, "inputs": inputs})


def test_drafting_twice_is_refused(plain_model: Any) -> None:
    with (
        ours.drafting(plain_model),
        pytest.raises(RuntimeError, match="already active for this model"),
        ours.drafting(plain_model),
    ):
        pass


def test_an_old_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.9.2")
    message = "ngram_npu.engines.transformers: expected transformers 4.57 or later, got 4.9.2"
    with pytest.raises(ImportError, match=f"^{message}$"):
        runpy.run_path(ours.__file__)


@pytest.mark.parametrize("version", ["5.25.0", "6.0.0"])
def test_a_newer_version_is_checked_by_its_interface(
    version: str, monkeypatch: pytest.MonkeyPatch, plain_model: Any
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.warns(UserWarning, match=f"transformers {version} is newer than 5"):
        newer = runpy.run_path(ours.__file__)
    with newer["drafting"](plain_model):
        pass

    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda self, settings: None)
    with (
        pytest.raises(RuntimeError, match=f"which transformers {version} lacks"),
        newer["drafting"](plain_model),
    ):
        pass


def test_the_package_does_not_import_transformers() -> None:
    code = "import sys, ngram_npu, ngram_npu.async_state; assert 'transformers' not in sys.modules"
    code += "; assert ngram_npu.engines.transformers.drafting"  # but it is reachable
    subprocess.run([sys.executable, "-c", code], check=True)
