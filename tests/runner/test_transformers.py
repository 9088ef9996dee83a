"""Our drafts in `model.generate`, and a batched generate with speculation: the text is the same."""

from __future__ import annotations

import functools
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
from ngram_npu import NgramConfig, NgramStore

pytest.importorskip("transformers")

import ngram_npu.transformers as ours
from transformers import (
    AutoTokenizer,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from runner import worlds

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


@pytest.mark.parametrize("ngram", [NgramConfig(k=4), worlds.LADDER], ids=["ngram", "ladder"])
def test_a_batch(
    plain_model: Any, prompts: list[list[int]], plain: torch.Tensor, ngram: NgramConfig
) -> None:
    found = ours.generate(
        plain_model,
        **worlds.padded(prompts),
        max_new_tokens=NEW_TOKENS,
        ngram=ngram,
        eos_token_id=STOP,
    )
    assert found.equal(plain)
    assert plain_model.config._attn_implementation == "sdpa"


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
    """Calls within a block share it, and so do calls that are given one. The text is the same."""

    def passes_of(generate: Any, **options: Any) -> int:
        before = len(passes)
        found = generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_id=STOP, **options)
        assert found.equal(plain)
        return len(passes) - before

    prompt = torch.tensor([worlds.prompts(1)[0]])
    plain = plain_model.generate(
        prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=STOP
    )
    ngram = replace(worlds.LADDER, store=visibility, store_tokens=8192)
    for _ in range(2):  # a block does not see the text of the previous one
        with ours.drafting(plain_model, ngram):
            first, second = (passes_of(plain_model.generate, do_sample=False) for _ in range(2))
        assert second < first

    store = NgramStore(1, 8192, visibility=visibility, kind="torch")
    by_itself = functools.partial(ours.generate, plain_model, ngram=ngram)
    alone = [passes_of(by_itself) for _ in range(2)]
    shared = [passes_of(by_itself, store=store) for _ in range(2)]
    assert alone[0] == alone[1] == shared[0] > shared[1]


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


def test_without_a_padding_token(plain_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_model.generation_config, "pad_token_id", None)
    monkeypatch.setattr(plain_model.generation_config, "eos_token_id", None)
    asked = worlds.padded(worlds.prompts(2))
    assert ours.generate(plain_model, **asked, max_new_tokens=3).shape[1] == (
        asked["input_ids"].shape[1] + 3
    )
    with pytest.raises(ValueError, match="attention_mask: expected the shape of input_ids"):
        ours.generate(plain_model, asked["input_ids"], torch.ones(2), max_new_tokens=3)


def test_a_generation_config_and_sampling(plain_model: Any, prompts: list[list[int]]) -> None:
    asked, new = worlds.padded(prompts[:6]), 12
    greedy = plain_model.generate(**asked, max_new_tokens=new, do_sample=False)
    settings = GenerationConfig(max_new_tokens=new, do_sample=True, top_k=1)
    assert ours.generate(plain_model, **asked, generation_config=settings).equal(greedy)
    found = [
        ours.generate(plain_model, **asked, generation_config=settings, top_k=20, **more)
        for more in ({}, {"ngram": NgramConfig(k=1)}, {"seed": 1}, {"top_p": 1e-6})
    ]
    assert found[0].equal(found[1])  # whatever is drafted
    assert not found[0].equal(found[2])
    assert found[3].equal(greedy)
    assert settings.top_k == 1


def test_settings_that_are_not_supported(plain_model: Any) -> None:
    asked = worlds.padded(worlds.prompts(2))
    for given, message in (
        ({"num_beams": 2}, "not supported: num_beams=2; supported"),
        ({"repetition_penalty": 1.1}, "not supported: repetition_penalty=1.1"),
        ({"max_length": 30}, "not supported: max_length=30"),
        ({"return_dict_in_generate": True}, "not supported: return_dict_in_generate=True"),
        ({"token_type_ids": 0}, "not supported: token_type_ids=0"),
        ({"streamer": 1}, "streamer: expected 1 request, got 2"),
        ({"generation_config": GenerationConfig(min_p=0.1)}, "not supported: min_p=0.1"),
        ({"max_new_tokens": None}, "max_new_tokens: expected a number, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.generate(plain_model, **asked, **{"max_new_tokens": 3, **given})  # type: ignore[arg-type]


def test_a_streamer(plain_model: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = torch.tensor([worlds.prompts(1)[0]])
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    found = ours.generate(plain_model, prompt, max_new_tokens=NEW_TOKENS, streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(found[0, prompt.shape[1] :]) + "\n"


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
    message = "ngram_npu.transformers: expected transformers 4.57 or later, got 4.9.2"
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
    code += "; assert ngram_npu.transformers.drafting"  # but it is reachable
    subprocess.run([sys.executable, "-c", code], check=True)
