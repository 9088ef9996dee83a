"""All modes write the text of transformers' own greedy generate; a runner that uses the state
wrongly writes another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ngram_npu import NgramConfig

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from examples.runner import Request, Runner, RunnerConfig, Sampling, Scheduler
from runner import worlds
from runner.mutants import MUTANTS

MODES = {
    "none": {"ngram": None},
    "scan": {"engine": "scan"},
    "index": {"engine": "index"},
    "ladder": {"engine": "index", "ngram": worlds.LADDER},
    "live": {"engine": "index", "ngram": worlds.LIVE},
    "finish": {"engine": "index", "ngram": worlds.FINISH},
    "live, host": {"engine": "index", "ngram": worlds.LIVE, "draft_on": "host"},
}


QUICK = (
    *itertools.product(("scan",), ("sync", "async"), ("padded", "unpadded")),
    ("none", "sync", "padded"),
    ("index", "sync", "unpadded"),
    ("index", "async", "padded"),
    ("ladder", "async", "unpadded"),
    ("live", "async", "padded"),
    ("finish", "sync", "unpadded"),
    ("live, host", "async", "padded"),
    ("live, host", "sync", "unpadded"),
)
ALL = [
    pytest.param(*mode, marks=[] if mode in QUICK else pytest.mark.slow)
    for mode in itertools.product(MODES, ("sync", "async"), ("padded", "unpadded"))
]


@pytest.mark.parametrize(("drafts", "scheduling", "layout"), ALL)
def test_greedy_text(
    model: Any, plain: worlds.Plain, drafts: str, scheduling: str, layout: str
) -> None:
    runner = worlds.runner(
        model,
        asynchronous=scheduling == "async",
        padded=layout == "padded",
        **MODES[drafts],
    )
    found = runner.generate(worlds.prompts(), worlds.NEW_TOKENS, stop_token_ids=plain.stops)
    assert found == plain.texts
    figures = runner.figures
    assert figures.preemptions > 5
    assert figures.tokens == sum(map(len, plain.texts))
    if drafts == "none":
        assert figures.drafts == 0
    else:  # both must happen, or the comparison would show little
        assert 100 < figures.accepted < figures.drafts - 100
    if (store := runner.state.store) is not None:
        assert store.statistics.drafts > 100
        store.check_integrity()


@pytest.mark.parametrize("mode", ["sync unpadded", "async padded", "async ladder", "async live"])
def test_sampled_text(model: Any, sampled: worlds.Plain, mode: str) -> None:
    changes: dict[str, Any] = {
        "sync unpadded": {"asynchronous": False, "padded": False},
        "async padded": {},
        "async ladder": MODES["ladder"],
        "async live": MODES["live"],
    }[mode]
    sampling = Sampling(0.8, seed=7)
    assert worlds.texts(model, sampled.stops, sampling=sampling, **changes) == sampled.texts


def test_sampled_text_belongs_to_the_request_not_to_the_batch(
    model: Any, sampled: worlds.Plain
) -> None:
    some = [7, 2, 5]
    runner = worlds.runner(model, sampling=Sampling(0.8, seed=7))
    asked = worlds.prompts()
    found = runner.generate(
        [asked[i] for i in some],
        worlds.NEW_TOKENS,
        stop_token_ids=sampled.stops,
        request_ids=some,
    )
    assert found == [sampled.texts[i] for i in some]


def test_another_seed_and_another_request_have_another_text(
    model: Any, sampled: worlds.Plain
) -> None:
    asked = worlds.prompts(4)
    assert worlds.texts(model, sampled.stops, sampling=Sampling(0.8, seed=8)) != sampled.texts
    runner = worlds.runner(model, sampling=Sampling(0.8, seed=7))
    twice = runner.generate([asked[0]] * 2, worlds.NEW_TOKENS)
    assert twice[0] != twice[1]


def test_a_runner_is_used_again(model: Any, plain: worlds.Plain) -> None:
    runner = worlds.runner(model)
    asked = worlds.prompts()
    for some in (slice(0, 3), slice(3, 8)):
        found = runner.generate(asked[some], worlds.NEW_TOKENS, stop_token_ids=plain.stops)
        assert found == plain.texts[some]


def test_a_store_on_the_host_has_what_was_said_and_nothing_behind_it(
    model: Any, plain: worlds.Plain
) -> None:
    runner = worlds.runner(model, **MODES["live, host"], num_blocks=400)
    for some in (slice(0, 8), slice(8, 24)):
        runner.generate(worlds.prompts()[some], worlds.NEW_TOKENS, stop_token_ids=plain.stops)
        assert runner.figures.preemptions == 0
        assert runner.state.store is not None
        assert runner.state.store.statistics.tokens_entered == runner.figures.tokens


@pytest.mark.parametrize("draft_on", ["device", "host"])
@pytest.mark.parametrize("ngram", [worlds.LIVE, worlds.FINISH], ids=["live", "finish"])
def test_a_store_goes_by_scope_and_is_told_of_ends(
    model: Any, ngram: NgramConfig, draft_on: str
) -> None:
    """One request at a time, so that the store drafts an earlier request's text."""
    runner = worlds.runner(model, ngram=ngram, engine="index", max_rows=1, draft_on=draft_on)
    [prompt] = worlds.prompts(1)
    store, found = runner.state.store, []
    assert store is not None
    for scope in ("a", "b", "a"):
        before = runner.figures.steps
        runner.generate([prompt], worlds.NEW_TOKENS, scopes=[scope])
        assert store.statistics.open_slots == 0
        found.append(runner.figures.steps - before)
    assert found[1] == found[0] > found[2]
    later = worlds.runner(model, ngram=ngram, engine="index", max_rows=1)
    given = worlds.runner(model, ngram=ngram, engine="index", max_rows=1, store=store)
    for one in (later, given):
        one.generate([prompt], worlds.NEW_TOKENS, scopes=["b"])
    assert given.figures.steps < later.figures.steps


def test_a_request_preempted_for_lack_of_others_is_admitted_again(model: Any) -> None:
    """While the first request may be done, the second finds no block and preempts itself."""
    runner = worlds.runner(model, ngram=None, num_blocks=4, max_step_tokens=16)
    first, second = Request(0, [65] * 7, 8), Request(1, [66] * 8, 12)
    runner.scheduler.add(first, second)
    while runner.scheduler.has_work:
        runner.step()
    assert runner.figures.preemptions == 1
    assert (len(first.output), len(second.output)) == (1, 4)


def test_a_request_that_never_fits_is_refused() -> None:
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


def test_a_model_whose_attention_is_another_is_refused(folder: str) -> None:
    other = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="model: expected attention 'ngram_npu_paged', got 'sdpa'"):
        Runner(other, RunnerConfig(ngram=NgramConfig()))


def test_no_fault_changes_nothing(model: Any, plain: worlds.Plain) -> None:
    assert worlds.texts(model, plain.stops) == plain.texts[: worlds.FEW]


@pytest.mark.parametrize("name", MUTANTS)
def test_noticed(model: Any, plain: worlds.Plain, name: str) -> None:
    with MUTANTS[name]():
        assert worlds.texts(model, plain.stops) != plain.texts[: worlds.FEW]
