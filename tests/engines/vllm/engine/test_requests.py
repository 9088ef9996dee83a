"""Tests prompts that are embeddings, and requests of several tenants in an engine with a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import RUNNER, StoreDraftCounter, encode_corpus, make_params, start_engine
from ngram_npu.engines.vllm.options import STORE_ARGUMENT
from ngram_npu.store import scope_of_request
from processes import METHODS
from transformers import AutoModelForCausalLM

EMBEDS_METHODS = {"v1": ["plugin", "custom_class"], "v2": ["async", "store"]}[RUNNER]
STORE_METHOD = METHODS[{"v1": "store_padded", "v2": "store"}[RUNNER]]


def _generate_with_embeds(model: Path, method: str) -> tuple[list[list[int]], int]:
    """Returns the outputs of prompts, half of them embedded, and the number of accepted drafts."""
    ids = encode_corpus(model, 5_000)
    table = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    prompts = [ids[start : start + 60] for start in range(0, 600, 150)]
    inputs = [
        {"prompt_embeds": table[prompt]} if number % 2 else {"prompt_token_ids": prompt}
        for number, prompt in enumerate(prompts)
    ]
    with start_engine(model, METHODS[method], enable_prompt_embeds=True) as engine:
        outputs = engine.generate(inputs, make_params(60))
        _, num_accepted = engine.read_counters()
    return outputs, num_accepted


def test_text_of_prompt_embeddings_equals_text_without_speculation(model: Path) -> None:
    expected, _ = _generate_with_embeds(model, "none")
    for method in EMBEDS_METHODS:
        outputs, num_accepted = _generate_with_embeds(model, method)
        assert outputs == expected
        assert num_accepted > {"v1": 50, "v2": 40}[RUNNER]


def test_requests_draft_only_from_text_of_the_same_salt(model: Path) -> None:
    """Requests without a salt, and those that keep their text out of the store, share with none."""
    keep_out = {STORE_ARGUMENT: False}
    tenants: list[tuple[dict[str, str], dict[str, Any]]] = [
        *(({"cache_salt": "a"}, {}), ({"cache_salt": "b"}, {})),
        *(({}, {}), ({"cache_salt": "a"}, keep_out), ({}, keep_out)),
    ]
    prompt = encode_corpus(model, 2_000)[:60]
    draft_counts: list[int] = []
    with start_engine(model, STORE_METHOD.with_options(scope="private")) as engine:
        store, counter = engine.store, StoreDraftCounter(engine)
        for salt, extra_args in [*tenants, *tenants]:
            old_count = counter.count
            engine.generate([{"prompt_token_ids": prompt, **salt}], make_params(40, extra_args))
            draft_counts.append(counter.count - old_count)
    assert draft_counts[: len(tenants)] == [0] * len(tenants)
    assert [count > 0 for count in draft_counts[len(tenants) :]] == [True] * 2 + [False] * 3
    assert store.scopes.keys() == {scope_of_request("a"), scope_of_request("b")}
