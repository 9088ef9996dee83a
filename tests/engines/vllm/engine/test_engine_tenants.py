"""Requests of different tenants on one engine with a store: by salt, adapter or scope, each drafts
from its own text only; where the runner does not know these, such requests are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from engine_runs import LADDER, METHODS, Engine, asynchronous, engine
from ngram_npu.engines.vllm import admission
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT
from ngram_npu.engines.vllm.sharing import scope_of_request
from tiny_model import corpus
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

SALT, SCOPE = {"cache_salt": "a"}, {EXTRA_ARGUMENT: "a"}


@pytest.fixture(scope="module")
def prompt(model: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(model).encode(corpus()[1_000_000:1_002_000])
    return ids[:60]


def greedy(extra: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra)


def say(
    running: Engine,
    prompt: list[int],
    salt: dict[str, str],
    extra: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    asked = {"prompt_token_ids": prompt, **salt}
    running.llm.generate([asked], greedy(extra), use_tqdm=False, **more)


def test_salted_requests_draft_from_own_text_only(model: Path, prompt: list[int]) -> None:
    tenants: list[tuple[dict[str, str], dict[str, Any]]] = [
        (salt, scope)
        for salt in ({}, SALT, {"cache_salt": "b"})
        for scope in ({}, SCOPE)
    ]  # fmt: skip
    with engine(model, METHODS["store_padded"]) as running:
        held = running.drafter.shared_store.contents
        drafts: list[int] = []
        for salt, extra in [*tenants, ({}, {EXTRA_ARGUMENT: "end"}), *tenants]:
            before = held.statistics.drafts
            say(running, prompt, salt, extra)
            drafts.append(held.statistics.drafts - before)
        del running
    assert drafts[: len(tenants)] == [0] * len(tenants)
    assert min(drafts[-len(tenants) :]) > 0, "of its own text"
    scopes = {scope_of_request(None, greedy(e), s.get("cache_salt")) for s, e in tenants}
    assert len(scopes) == len(tenants)
    assert scopes <= set(held.scopes)


def test_misspelt_and_missing_scopes_raise(model: Path, prompt: list[int]) -> None:
    method = asynchronous("padded", "auto", **LADDER, store="finish", scope="required")
    with engine(model, method) as running:
        for salt, extra in ((SALT, {}), ({}, SCOPE), ({}, {EXTRA_ARGUMENT: 7})):
            say(running, prompt, salt, extra)
        for salt, extra, said in (
            ({}, {}, r"scope='required': expected a cache_salt, .* got none of them"),
            (SALT, {"ngram_npu_scop": "a"}, "unknown key 'ngram_npu_scop'"),
            (SALT, {EXTRA_ARGUMENT: ["a"]}, r"ngram_npu_scope in .*, got \['a'\]"),
        ):
            with pytest.raises(ValueError, match=f"ngram_npu: {said}"):
                say(running, prompt, salt, extra)
        say(running, prompt, SALT)
        del running


def test_owners_that_runner_does_not_know_raise(model: Path, prompt: list[int]) -> None:
    adapter = {"lora_request": LoRARequest("adapter", 1, "/none")}
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with engine(model, METHODS["store"], **lora) as running:
        say(running, prompt, {})
        for name, salt, extra, more in (
            ("cache_salt", SALT, {}, {}),
            ("LoRA adapter", {}, {}, adapter),
            (EXTRA_ARGUMENT, {}, SCOPE, {}),
        ):
            with pytest.raises(
                ValueError, match=f"ngram_npu: {name}: expected none, got one: this"
            ):
                say(running, prompt, salt, extra, **more)
        say(running, prompt, {})
        del running


def test_salt_of_scheduled_request_survives_pickling() -> None:
    admission.install()
    request = Request("r", [1, 2], greedy(), None, cache_salt="a")
    new = NewRequestData.from_request(request, ([],), prefill_token_ids=[1])
    assert pickle.loads(pickle.dumps(new)).cache_salt == "a"
