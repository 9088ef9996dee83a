"""Tests that the example runner generates the same text as transformers in all modes, and that its
host never waits for the device in a padded step."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ngram_npu import NgramConfig, NgramStore
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from store_integrity import check_integrity
from tiny_model import STOP_TOKEN, get_model_folder, make_prompts, pad_left
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers_models import make_causal_model

from examples.runner import Request, Runner, RunnerConfig, Scheduler, load
from examples.runner.paged_model import ATTENTION_NAME

NEW_TOKENS = 32
SMALL_BATCH = 8
"""Number of requests in tests that run many times."""
NGRAM = NgramConfig(min_n=2, max_n=4, k=4)
NGRAM_BY_COST = NgramConfig(k=4, min_draft_probability=0.12)
MODES: dict[str, dict[str, Any]] = {
    "none": {"ngram": None},
    "n-grams": {},
    "by cost": {"ngram": NGRAM_BY_COST},
    "store": {"ngram": NGRAM_BY_COST, "store": True},
}
COMBINATIONS = (
    *itertools.product(("n-grams", "store"), ("sync", "async"), ("padded", "unpadded")),
    ("none", "sync", "padded"),
    ("by cost", "async", "unpadded"),
)


@dataclass(frozen=True)
class Reference:
    """Texts without speculation, which end at a stop token."""

    texts: list[list[int]]
    stops: tuple[int, ...]


def make_runner(
    model: PreTrainedModel, *, store: NgramStore | bool = False, **changes: Any
) -> Runner:
    """Makes a runner with six rows. Long prompts need several steps. The blocks suffice only for
    three long requests, so requests are preempted whatever the model generates. With
    ``store=True``, the runner has a new store."""
    options: dict[str, Any] = {
        "ngram": NGRAM,
        "max_rows": 6,
        "row_capacity": 160,
        "block_size": 4,
        "num_blocks": 64,
        "max_step_tokens": 48,
    }
    shared_store = NgramStore(1 << 14) if store is True else store or None
    return Runner(model, RunnerConfig(**options | changes), store=shared_store)


@pytest.fixture(scope="module", autouse=True)
def _use_one_thread() -> Iterator[None]:
    """The model is too small for several threads, and other tests run in parallel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_folder() -> str:
    """The folder of the tiny model."""
    return str(get_model_folder(name="log"))


@pytest.fixture(scope="module")
def model(model_folder: str) -> PreTrainedModel:
    """The tiny model with paged attention, in float64 so that rounding does not change a token."""
    return load(model_folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def greedy_run(model_folder: str) -> Reference:
    """Greedy texts of transformers, generated in one left-padded batch.

    The stop token is the rarest token that one of the first `SMALL_BATCH` requests generates before
    its last token. So it ends at least one request early, but only few, whatever the model learned.
    """
    prompts = make_prompts()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    output = model.generate(
        **pad_left(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=STOP_TOKEN
    )
    rows = output[:, max(map(len, prompts)) :].tolist()
    counts = Counter(token for row in rows[:SMALL_BATCH] for token in row[:-1])
    del counts[STOP_TOKEN]
    stops = (STOP_TOKEN, min(counts, key=lambda token: counts[token]))
    texts = []
    for row in rows:
        length = next((i + 1 for i, token in enumerate(row) if token in stops), NEW_TOKENS)
        texts.append(row[:length])
    return Reference(texts, stops)


@pytest.mark.parametrize(("drafts", "scheduling", "layout"), COMBINATIONS)
def test_greedy_text_equals_transformers(
    model: Any, greedy_run: Reference, drafts: str, scheduling: str, layout: str
) -> None:
    runner = make_runner(
        model,
        asynchronous=scheduling == "async",
        padded=layout == "padded",
        **MODES[drafts],
    )
    texts = runner.generate(make_prompts(), NEW_TOKENS, stop_token_ids=greedy_run.stops)
    assert texts == greedy_run.texts
    figures = runner.figures
    assert runner.scheduler.num_preemptions > 5
    assert figures.tokens == sum(map(len, greedy_run.texts))
    if drafts == "none":
        assert figures.drafts == 0
    else:  # the comparison needs both accepted and rejected drafts
        assert 100 < figures.accepted < figures.drafts - 100
    if (store := runner.state.store) is not None:
        assert store.statistics.tokens_held > 100
        check_integrity(store)


def test_store_contains_generated_tokens_only(model: Any, greedy_run: Reference) -> None:
    """Also checks that a runner can generate again after its first call."""
    runner = make_runner(model, store=True, num_blocks=400)
    stops = greedy_run.stops
    for selection in (slice(0, 8), slice(8, 24)):
        texts = runner.generate(make_prompts()[selection], NEW_TOKENS, stop_token_ids=stops)
        assert texts == greedy_run.texts[selection]
        assert runner.scheduler.num_preemptions == 0
    assert runner.state.store is not None
    generated = [bytes(text) for text in greedy_run.texts]
    for _, text in runner.state.store.texts():
        # A text may continue after its stop, because the device learns of it one step late.
        assert any(text.tolist()[: len(tokens)] == list(tokens) for tokens in generated) or any(
            list(tokens)[: len(text)] == text.tolist() for tokens in generated
        )


def test_store_drafts_only_within_scope(model: Any) -> None:
    """The runner runs one request at a time, so that a store can draft earlier requests' text."""
    runner = make_runner(model, store=True, max_rows=1)
    [prompt] = make_prompts(1)
    step_counts = []
    for scope in ("a", "b", "a"):
        old_steps = runner.figures.steps
        runner.generate([prompt], NEW_TOKENS, scopes=[scope])
        step_counts.append(runner.figures.steps - old_steps)
    assert step_counts[1] == step_counts[0] > step_counts[2]
    store = runner.state.store
    assert store is not None
    with_new_store = make_runner(model, store=True, max_rows=1)
    with_same_store = make_runner(model, store=store, max_rows=1)
    for other_runner in (with_new_store, with_same_store):
        other_runner.generate([prompt], NEW_TOKENS, scopes=["b"])
    assert with_same_store.figures.steps < with_new_store.figures.steps


def test_request_that_preempts_itself_is_admitted_again(model: Any) -> None:
    """The first request may have ended, which the host does not know yet, so it is not scheduled.
    The second one finds no free block. As the last one in the batch, it is preempted."""
    runner = make_runner(model, ngram=None, num_blocks=4, max_step_tokens=16)
    first, second = Request(0, [65] * 7, 8), Request(1, [66] * 8, 12)
    runner.scheduler.add(first, second)
    while runner.scheduler.has_work:
        runner.step()
    assert runner.scheduler.num_preemptions == 1
    assert (len(first.output), len(second.output)) == (1, 4)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], [2, 5.0]], r"prompts\[1\]: expected integers from 0 to \d+, got 5.0 at position 1"),
        ([[1], [-1]], r"prompts\[1\]: .* got -1 at position 0"),
        ([[1, 2, 10**9]], r"prompts\[0\]: .* got 1000000000 at position 2"),
        ([[1], []], "request 1: expected a prompt of 1 token or more"),
    ],
    ids=["float", "negative", "beyond vocabulary", "empty"],
)
def test_generate_after_invalid_prompt_equals_transformers(
    model: Any, greedy_run: Reference, prompts: list[list[int]], message: str
) -> None:
    runner = make_runner(model)
    with pytest.raises(ValueError, match=message):
        runner.generate(prompts, NEW_TOKENS)
    for options in ({"stop_token_ids": [1.5]}, {"max_new_tokens": 2.0}):
        with pytest.raises(ValueError, match=f"generate: {next(iter(options))}: expected"):
            runner.generate([[1]], **({"max_new_tokens": NEW_TOKENS} | options))
    texts = runner.generate(make_prompts(SMALL_BATCH), NEW_TOKENS, stop_token_ids=greedy_run.stops)
    assert texts == greedy_run.texts[:SMALL_BATCH]


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("scheduler", "schedule"),
        ("model", "forward"),
        ("state", "end_step"),
        ("state", "reconcile"),
    ],
)
def test_generate_after_interrupt_equals_transformers(
    model: Any, greedy_run: Reference, part: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model, **MODES["store"])
    original, calls = getattr(getattr(runner, part), method), []

    def interrupt(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(getattr(runner, part), method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.generate(make_prompts(SMALL_BATCH), NEW_TOKENS, stop_token_ids=greedy_run.stops)
    assert not runner.scheduler.has_work
    texts = runner.generate(make_prompts(SMALL_BATCH), NEW_TOKENS, stop_token_ids=greedy_run.stops)
    assert texts == greedy_run.texts[:SMALL_BATCH]


def test_scheduler_rejects_request_that_never_fits() -> None:
    scheduler = Scheduler(
        max_rows=2, row_capacity=64, num_blocks=4, block_size=8, max_step_tokens=16, k=2
    )
    with pytest.raises(ValueError, match=r"request 3: .* at most 32 tokens .* got 20 and 33"):
        scheduler.add(Request(3, [1] * 20, 33))
    with pytest.raises(ValueError, match="request 4: expected a prompt of 1 token or more"):
        scheduler.add(Request(5, [1], 8), Request(4, [], 8))
    assert not scheduler.has_work
    scheduler.add(Request(5, [1] * 20, 32))
    assert scheduler.has_work


def test_model_without_paged_attention_raises(model_folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(ValueError, match="model: expected attention 'ngram_npu_paged', got 'sdpa'"):
        Runner(model, RunnerConfig(ngram=NgramConfig()))


SUPPORTED_FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Mistral": {"sliding_window": 9},
    "Gemma3": {"sliding_window": 8},
}
UNSUPPORTED_FAMILIES = {
    "Gemma2": ({}, "softcap"),
    "GptOss": ({"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
}


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_text_of_model_family_equals_transformers(family: str) -> None:
    model = make_causal_model(f"{family}ForCausalLM", SUPPORTED_FAMILIES[family])
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 40) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    config = RunnerConfig(
        ngram=NgramConfig(min_n=1, k=3), max_rows=4, row_capacity=64, block_size=4
    )
    model.set_attn_implementation(ATTENTION_NAME)
    assert Runner(model, config).generate(prompts, 24) == expected


@pytest.mark.parametrize("family", UNSUPPORTED_FAMILIES)
def test_unsupported_attention_option_raises(family: str) -> None:
    settings, option = UNSUPPORTED_FAMILIES[family]
    model = make_causal_model(f"{family}ForCausalLM", settings)
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(NotImplementedError, match=option):
        Runner(model, RunnerConfig(row_capacity=64)).generate([[3]], 2)


class SynchronizationCheck(TorchDispatchMode):
    """Fails on operators that would make the host wait for a GPU."""

    OPERATORS = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        uses_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert name not in self.OPERATORS, f"{name} waits for the device"
        assert not uses_mask, f"{name} with a mask waits for the device"
        return op(*args, **kwargs or {})


def test_padded_step_does_not_wait_for_device(model: Any) -> None:
    runner = make_runner(model)
    with SynchronizationCheck():
        texts = runner.generate(make_prompts(8), NEW_TOKENS)
    assert all(len(text) == NEW_TOKENS for text in texts)


@pytest.mark.parametrize(("asynchronous", "max_steps_ahead"), [(False, 0), (True, 1)])
def test_host_is_one_step_ahead_of_results_if_asynchronous(
    model: Any, asynchronous: bool, max_steps_ahead: int
) -> None:
    runner = make_runner(model, asynchronous=asynchronous)
    reconcile, steps_ahead = runner.state.reconcile, []

    def reconcile_and_record() -> Any:
        result = reconcile()
        steps_ahead.append(runner.figures.steps - 1 - result.step)
        return result

    runner.state.reconcile = reconcile_and_record
    runner.generate(make_prompts(3), NEW_TOKENS)
    assert max(steps_ahead) == max_steps_ahead
