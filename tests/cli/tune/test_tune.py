"""Tuning: counts match a replay, speed-ups match their definition, and the advice follows."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import NgramConfig
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.step_time import VerificationCost
from ngram_npu_cli.replay import InputError, ReplayInput, ReplayOptions, load_inputs, replay
from ngram_npu_cli.replay.simulation import TokenRequest, TokenTurn
from ngram_npu_cli.replay.walks import Counts
from ngram_npu_cli.tune import (
    BASELINE,
    CANDIDATES,
    EXAMPLES,
    Candidate,
    format_report,
    load_cost,
    parse_candidate,
    share_of_a_step,
    vllm_options,
)
from ngram_npu_cli.tune import measure as measure_module
from ngram_npu_cli.tune.measure import Cache, chunks_of, measure
from ngram_npu_cli.tune.runners import RUNNERS
from ngram_npu_cli.tune.search import (
    Measured,
    advice,
    best,
    frontier,
    interval,
    ranked,
    with_stores,
)
from ngram_npu_cli.tune.traffic import read_traffic
from ngram_npu_cli.tune.tune_report import make_report
from tune_helpers import FEW, cost_file
from vllm_config import vllm_config

PADDED = Candidate.of(min_n=1, max_n=16, k=3, match_policy="latest", drafts="padded")

# Counts


@pytest.mark.parametrize("jobs", [1, 2])
def test_counts_are_those_of_a_replay(
    traffic: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(measure_module, "_ROWS", 7)
    requests = read_traffic([traffic]).requests
    assert len(chunks_of(requests)) == 6
    candidates = (*FEW, PADDED)
    measured = measure(candidates, requests, jobs=jobs)
    for candidate, counts in zip(candidates, measured, strict=True):
        (item,) = load_inputs([traffic])
        for number in (0, 17, 39):
            alone = ReplayInput("one", (item.conversations[number],))
            options = ReplayOptions(drafts=candidate.drafts, **dict(candidate.options))
            figures = replay(inputs=[alone], options=options).total
            drafted = np.arange(candidate.config.k + 1)
            assert counts[number].sum() == figures.num_steps
            assert counts[number] @ drafted == figures.num_draft_tokens
            assert counts[number][0] == figures.num_steps - figures.num_drafts


def test_chunks_hold_every_request_once_and_bound_their_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure_module, "_TOKENS", 1000)
    requests = [
        TokenRequest("", (TokenTurn(np.zeros(n, np.int32), np.zeros(n % 9 + 2, np.int32)),))
        for n in range(1, 2000, 37)
    ]
    chunks = chunks_of(requests)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(requests)))
    for chunk in chunks:
        assert len(chunk) * max(requests[i].num_tokens for i in chunk) <= 1000 or len(chunk) == 1
    assert max(map(len, chunks)) > 1


def test_finished_pieces_are_not_replayed_again(
    traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "_ROWS", 10)
    requests = read_traffic([traffic]).requests
    path = tmp_path / "pieces.jsonl"
    expected = measure(FEW, requests)
    replay_piece = measure_module._replay
    begun: list[int] = []

    def interrupted_once(*arguments: Any) -> Any:
        begun.append(1)
        if len(begun) == 6:
            raise KeyboardInterrupt
        return replay_piece(*arguments)

    monkeypatch.setattr(measure_module, "_replay", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        measure(FEW, requests, cache=Cache(path))
    # A partial write, as a power failure leaves it.
    with path.open("a") as file:
        file.write('{"key": "ab')
    found = measure(FEW, requests, cache=Cache(path))
    assert len(begun) == 1 + len(FEW) * 4, "each piece once, over both runs"
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_piece_is_of_its_setting_and_its_conversations(traffic: Path, tmp_path: Path) -> None:
    requests = read_traffic([traffic]).requests
    cache = Cache(tmp_path / "pieces.jsonl")
    measure(FEW[:1], requests, cache=cache)
    again = Cache(tmp_path / "pieces.jsonl")
    seen: list[tuple[int, int]] = []
    for setting, of in ((FEW[1:2], requests), (FEW[:1], requests[1:]), (FEW[:1], requests)):
        measure(setting, of, cache=again, progress=lambda *at: seen.append(at))
    assert seen == [(0, 1), (1, 1), (0, 1), (1, 1), (1, 1)]


def test_a_cache_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "pieces.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="not a cache of ngram-npu tune"):
        Cache(path)


# Cost


def test_a_share_of_a_step_is_the_formula() -> None:
    counts = np.array([[60, 20, 0, 20], [0, 0, 0, 0]])
    found = share_of_a_step(0.05).speedup(1, [180, 0], counts)
    assert found == pytest.approx([1.8 / (1 + 0.05 * 0.8), 1.0])


def test_a_batch_verifies_what_its_requests_draft_independently() -> None:
    """Compared with every combination of two requests; steps of 3 or more tokens take longer."""
    cost = VerificationCost("bent", {2: ((2, 3, 4, 8), (1.0, 1.0, 2.0, 6.0))})
    share = np.array([0.5, 0.2, 0.3])
    mean = sum(
        share[a] * share[b] * np.interp(2 + a + b, [2, 3, 4, 8], [1.0, 1.0, 2.0, 6.0])
        for a in range(3)
        for b in range(3)
    )
    (found,) = cost.speedup(2, [150], [share * 100])
    assert found == pytest.approx(1.5 / mean)
    of_the_mean = np.interp(2 + 2 * 0.8, [2, 3, 4, 8], [1.0, 1.0, 2.0, 6.0])
    assert found != pytest.approx(1.5 / of_the_mean), "a mean step is another one"


def test_times_go_on_beyond_what_was_measured() -> None:
    cost = VerificationCost("two", {4: ((4, 8), (1.0, 3.0))})
    assert cost.seconds(4, np.array([4.0, 6.0, 10.0])) == pytest.approx([1.0, 2.0, 4.0])
    falling = VerificationCost("noise", {4: ((4, 8), (1.0, 0.9))})
    assert falling.seconds(4, np.array([100.0])) == pytest.approx([0.9]), "more is never cheaper"


def test_a_file_of_step_times(tmp_path: Path) -> None:
    file = cost_file(tmp_path / "c.json", (8, 40, 0.03), (8, 8, 0.02), (1, 1, 0.01), (1, 5, 0.011))
    cost = load_cost(file)
    assert cost.batch_sizes == (1, 8)
    assert not cost.is_example
    assert cost.seconds(8, np.array([24.0])) == pytest.approx([0.025])
    assert cost.at([8]).batch_sizes == (8,)
    with pytest.raises(InputError, match=r"batch size 4: .* has step times for 1, 8"):
        cost.at([4])


@pytest.mark.parametrize(
    ("steps", "more", "message"),
    [
        ([], {}, "no steps"),
        ([(1, 1, 0.1)], {}, "batch size 1: expected a step without drafts .* got verified = 1"),
        ([(2, 3, 0.1), (2, 4, 0.1)], {}, r"expected a step without drafts \(verified = 2\)"),
        ([(2, 1, 0.1)], {}, "expected batch >= 1, verified >= batch"),
        ([(1, 1, 0.0)], {}, "seconds > 0"),
        ([(1, 1, 0.1)], {"format": "other"}, "expected format 'ngram_npu.cost/1', got 'other'"),
        ([(1, 1, 0.1)], {"steps": 3}, "not a file of step times"),
    ],
)
def test_what_is_no_file_of_step_times(
    tmp_path: Path, steps: list[tuple[int, float, float]], more: dict[str, Any], message: str
) -> None:
    file = cost_file(tmp_path / "c.json", *steps, **more)
    with pytest.raises(InputError, match=message) as caught:
        load_cost(file)
    assert str(caught.value).startswith(f"{tmp_path / 'c.json'}: ")


def test_no_file_names_the_examples() -> None:
    with pytest.raises(
        InputError, match=r"make one with `ngram-npu measure-cost`, .*example-8b-l4"
    ):
        load_cost("nowhere.json")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_called_examples_and_cost_more_the_more_they_verify(name: str) -> None:
    cost = load_cost(name)
    assert cost.is_example
    assert "EXAMPLE" in cost.name
    for batch in cost.batch_sizes:
        times = cost.seconds(batch, batch * np.arange(1.0, 40.0))
        assert (np.diff(times) > 0).all()
    shares = [
        float(cost.seconds(b, np.array([b * 9.0]))[0] / cost.seconds(b, np.array([b * 1.0]))[0])
        for b in cost.batch_sizes
    ]
    assert shares[-1] > shares[0], "drafts cost more in a large batch"


# Search


def made_up(*histograms: list[list[int]], tokens: list[int]) -> Measured:
    counts = tuple(np.array(of, np.int32) for of in histograms)
    half = np.arange(len(tokens)) % 2 == 0
    return Measured(FEW[: len(counts)], counts, np.array(tokens), half)


def test_settings_are_chosen_on_one_half_and_judged_on_the_other() -> None:
    """The first setting is by far the best on even conversations and the worst on odd ones."""
    measured = made_up(
        [[1, 9], [0, 40], [1, 9], [0, 40]],
        [[20, 0], [20, 0], [20, 0], [20, 0]],
        tokens=[40, 40, 40, 40],
    )
    cost = share_of_a_step(0.1)
    assert best(measured, cost) == 0
    found = interval(measured, 0, cost, 1)
    assert found.value == pytest.approx(1 / 1.1)
    ratio = interval(measured, 0, cost, 1, against=1)
    assert ratio.value == pytest.approx(1 / 1.1 / 2)


def test_batch_size_where_no_setting_gains_does_not_count() -> None:
    """The first gains more at batch 1. At 64 both lose, the first far more."""
    measured = made_up([[0, 10], [0, 10]], [[14, 1], [14, 1]], tokens=[20, 20])
    cost = VerificationCost("steep", {1: ((1, 2), (1.0, 1.1)), 64: ((64, 128), (1.0, 9.0))})
    assert best(measured, cost) == 0


def test_setting_that_loses_where_another_gains_is_not_the_best() -> None:
    """The first yields 1.88 tokens per step of 5 drafted tokens, the second 1.66 of one."""
    measured = made_up([[0] * 5 + [100]] * 2, [[0, 113]] * 2, tokens=[188, 188])
    small = {batch: ((batch, 6 * batch), (1.0, 1.001)) for batch in (1, 4, 16)}
    cost = VerificationCost("steep", {**small, 256: ((256, 512, 1536), (1.0, 1.41, 2.19))})
    half = measured.chosen_half
    assert measured.speedup(0, cost, 256, half) == pytest.approx(0.86, abs=0.01)
    assert measured.speedup(1, cost, 256, half) == pytest.approx(1.18, abs=0.01)
    assert best(measured, cost) == 1
    assert best(measured, cost.at([1, 4, 16])) == 0


def test_an_interval_covers_resampled_conversations() -> None:
    rng = np.random.default_rng(1)
    steps = rng.integers(50, 100, 200)
    tokens = steps + rng.integers(0, 100, 200)
    counts = np.stack([steps, np.zeros(200, int)], axis=1)
    measured = made_up(counts.tolist(), tokens=tokens.tolist())
    found = interval(measured, 0, share_of_a_step(0.1), 1)
    odd = tokens[1::2].sum() / steps[1::2].sum()
    assert found.value == pytest.approx(odd)
    ratios = tokens[1::2] - odd * steps[1::2]
    error = ratios.std(ddof=1) / np.sqrt(100) / steps[1::2].mean()
    assert found.low == pytest.approx(odd - 1.96 * error, abs=0.3 * error)
    assert found.high == pytest.approx(odd + 1.96 * error, abs=0.3 * error)


@pytest.mark.parametrize(
    ("gains", "sentence", "off_above"),
    [
        ("111", "It pays at every batch size looked at, up to 64.", None),
        ("110", "Do not speculate above batch 8: no gain is sure there.", 8),
        ("100", "Do not speculate above batch 1: no gain is sure there.", 1),
        ("101", "Do not speculate at batch 8: no gain is sure there.", None),
        ("010", "Do not speculate at batch 1 or above batch 8: no gain is sure there.", 8),
        ("000", "Do not speculate: no gain is sure on this traffic.", 0),
    ],
)
def test_advice(gains: str, sentence: str, off_above: int | None) -> None:
    batches = [(batch, gain == "1") for batch, gain in zip((1, 8, 64), gains, strict=True)]
    assert advice(batches, VerificationCost("x", {})) == (sentence, off_above)


def report_of(traffic: Path, measured: Measured, cost: VerificationCost, against: int = 0) -> Any:
    return make_report(
        measured,
        cost,
        read_traffic([traffic]),
        against=measured.candidates[against],
        runner=RUNNERS["host"],
        about={},
    )


def test_compared_setting_that_alone_gains_is_recommended(traffic: Path) -> None:
    """The first is the best on the half for choosing, and loses on the other."""
    measured = made_up([[1, 9], [0, 40]] * 20, [[0, 20], [0, 20]] * 20, tokens=[30] * 40)
    report = report_of(traffic, measured, share_of_a_step(0.1), against=1)
    (row,) = report.batches
    assert (report.recommended, row.best, row.use) == (1, 0, 1)
    assert row.best_speedup.high < 1 < row.against.low
    assert row.speedup == row.against
    said = format_report(report)
    assert "Do not speculate" not in said
    assert f"RECOMMENDED: {report.label(1)}\nIt pays at this verification cost.\n" in said


@pytest.mark.parametrize(
    ("steps", "is_recommended"),
    [((985, 985), True), ((985, 1005), False), ((985, 700, 1205), False), ((1005, 985), False)],
)
def test_store_is_recommended_if_its_gain_is_sure_on_both_halves(
    traffic: Path, steps: tuple[int, ...], is_recommended: bool
) -> None:
    """However small the gain is. Steps of conversations 0, 2, 4, ..., and of the others."""
    chosen, *held_out = steps
    stored = [[0, held_out[n // 2 % len(held_out)] if n % 2 else chosen] for n in range(40)]
    alone = Candidate.of(sizes="ladder", k=8, min_draft_probability=0.1)
    shared = Candidate.of(**dict(alone.options), store="live")
    made = made_up([[0, 1000]] * 40, stored, tokens=[2000] * 40)
    report = report_of(traffic, replace(made, candidates=(alone, shared)), share_of_a_step(0.05))
    assert report.candidate == (shared if is_recommended else alone)
    assert ("No store is recommended" in format_report(report)) != is_recommended
    assert report.to_dict()["store"]["is_recommended"] == is_recommended


def test_search_of_stores_follows_the_best_ladder_to_another_length() -> None:
    """Without a store short drafts are the best, with one the longest."""
    ladders = [
        Candidate.of(sizes="ladder", k=k, min_draft_probability=p)
        for p in (0.25, 0.1)
        for k in (4, 8, 16, 32)
    ]
    tried: list[Candidate] = []

    def replay(candidates: tuple[Candidate, ...]) -> Measured:
        tried.extend(candidates)
        steps = [
            [[0, 100 + of.config.k if not of.has_store else 100 - of.config.k]] * 2
            for of in candidates
        ]
        made = made_up(*steps, tokens=[200, 200])
        return replace(made, candidates=candidates)

    cost = share_of_a_step(0.1)
    measured = replay(tuple(ladders))
    assert measured.candidates[best(measured, cost)].config.k == 4
    tried.clear()
    found = with_stores(measured, cost, ladders, replay)
    assert len(tried) == len(set(tried)) < 2 * len(ladders)
    assert found.candidates == (*ladders, *tried)
    first = found.candidates[ranked(found, cost)[0]].config
    assert (first.store, first.k) == ("live", 32)
    assert {of.config.store_tokens for of in tried if of.config.k == 32} == {100_000, 1_000_000}


def test_the_frontier_is_what_nothing_outdoes() -> None:
    points = [(100, 50, 100), (100, 60, 30), (100, 60, 20), (100, 55, 200), (100, 100, 0)]
    assert frontier([Counts(*point) for point in points]) == [4, 2, 0]


def test_candidates_are_different_and_say_how_they_are() -> None:
    assert len(CANDIDATES) >= 60
    assert len({c.label for c in CANDIDATES}) == len(CANDIDATES)
    assert BASELINE in CANDIDATES
    assert parse_candidate('{"prompt_lookup_max": 4, "num_speculative_tokens": 3}').config == (
        NgramConfig(min_n=4, max_n=4, k=3)
    )
    for wrong in ("[]", "{", '{"k": 0}', '{"length": 3}', '{"k": "x"}'):
        with pytest.raises(InputError, match="expected a setting such as"):
            parse_candidate(wrong)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.label)
def test_vllm_options_are_those_that_the_proposer_reads(candidate: Candidate) -> None:
    words = shlex.split(" ".join(vllm_options(candidate)))
    assert words[::2] == ["--speculative-config", "--additional-config"]
    speculative, own = json.loads(words[1]), json.loads(words[3])["ngram_npu"]
    if candidate.drafts == "padded":
        bounds = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        assert speculative.pop("method") == "ngram_gpu"
        served = vllm_config(
            k=speculative.pop("num_speculative_tokens"),
            additional_config={"ngram_npu": own},
            **bounds | speculative,
        )
        assert read_options(served, "v2").ngram == candidate.config
        return
    assert speculative["model"] == "ngram_npu.engines.vllm.NgramProposer"
    # The options of the section are fields of NgramConfig, with vLLM's names for the bounds.
    config = NgramConfig(num_speculative_tokens=speculative["num_speculative_tokens"], **own)
    assert config == candidate.config
