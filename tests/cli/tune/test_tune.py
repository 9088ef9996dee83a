"""Tests tuning: counts equal a replay, speed-ups follow their definition, advice names gains."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import SETTINGS, copy_lines, write_cost_file
from ngram_npu import NgramConfig
from ngram_npu.engines.vllm.options import read_options
from ngram_npu.step_time import EXAMPLES, VerificationCost
from ngram_npu_cli.replay import (
    InputError,
    Progress,
    ReplayOptions,
    TokenRequest,
    TokenTurn,
    replay,
)
from ngram_npu_cli.replay.walks import Counts
from ngram_npu_cli.tune import (
    BASELINE,
    CANDIDATES,
    Candidate,
    format_report,
    load_cost,
    share_of_a_step,
)
from ngram_npu_cli.tune import measure as measure_module
from ngram_npu_cli.tune.candidates import RUNNERS, parse_candidate, vllm_options
from ngram_npu_cli.tune.measure import group_requests, measure_settings
from ngram_npu_cli.tune.ranking import (
    Measured,
    advise,
    choose_lengths,
    compute_interval,
    find_frontier,
    rank,
    search_stores,
)
from ngram_npu_cli.tune.traffic import read_traffic
from ngram_npu_cli.tune.tune_report import make_report
from vllm_config import make_vllm_config

PADDED = Candidate.of(min_n=1, max_n=16, k=3, match_policy="latest", drafts="padded")
METHODS = {"padded": "ngram_gpu", "trimmed": "custom_class"}

# Counts


@pytest.mark.parametrize("jobs", [1, 2])
def test_measured_counts_equal_a_replay(
    traffic_file: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(measure_module, "_MAX_ROWS", 7)
    requests = read_traffic([traffic_file]).requests
    assert len(group_requests(requests)) == 6
    candidates = (*SETTINGS, PADDED)
    progress: list[Progress] = []
    measured = measure_settings(candidates, requests, jobs=jobs, progress=progress.append)
    assert progress == [Progress("24 pieces", "replay", done, 24) for done in range(1, 25)]
    for candidate, counts in measured.items():
        for number in (0, 17, 39):
            options = ReplayOptions(drafts=candidate.drafts, **dict(candidate.options))
            line = copy_lines(traffic_file, slice(number, number + 1))
            figures = replay([line], options=options).total
            drafted = np.arange(candidate.config.k + 1)
            assert counts[number].sum() == figures.num_steps
            assert counts[number] @ drafted == figures.num_draft_tokens
            assert counts[number][0] == figures.num_steps - figures.num_drafts


def test_groups_contain_each_request_once_and_keep_the_buffer_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure_module, "_MAX_TOKENS", 1000)
    requests = [
        TokenRequest("", (TokenTurn(np.zeros(n, np.int32), np.zeros(n % 9 + 2, np.int32)),))
        for n in range(1, 2000, 37)
    ]
    groups = group_requests(requests)
    assert sorted(i for group in groups for i in group) == list(range(len(requests)))
    for group in groups:
        assert len(group) * max(requests[i].num_tokens for i in group) <= 1000 or len(group) == 1
    assert max(map(len, groups)) > 1


# Cost


def test_speedup_with_share_of_a_step_follows_the_formula() -> None:
    counts = np.array([[60, 20, 0, 20], [0, 0, 0, 0]])
    speedup = share_of_a_step(0.05).compute_speedup(1, [180, 0], counts)
    assert speedup == pytest.approx([1.8 / (1 + 0.05 * 0.8), 1.0])


def test_batch_cost_averages_over_independent_requests() -> None:
    """Compares with the mean over all pairs of requests. Steps of over 3 tokens take longer."""
    cost = VerificationCost("bent", {2: ((2, 3, 4, 8), (1.0, 1.0, 2.0, 6.0))})
    share = np.array([0.5, 0.2, 0.3])
    mean = sum(
        share[a] * share[b] * np.interp(2 + a + b, [2, 3, 4, 8], [1.0, 1.0, 2.0, 6.0])
        for a in range(3)
        for b in range(3)
    )
    (speedup,) = cost.compute_speedup(2, [150], [share * 100])
    assert speedup == pytest.approx(1.5 / mean)
    time_of_mean_step = np.interp(2 + 2 * 0.8, [2, 3, 4, 8], [1.0, 1.0, 2.0, 6.0])
    assert speedup != pytest.approx(1.5 / time_of_mean_step), "differs from the mean time"


def test_step_times_are_extrapolated() -> None:
    cost = VerificationCost("two", {4: ((4, 8), (1.0, 3.0))})
    assert cost.compute_times(4, np.array([4.0, 6.0, 10.0])) == pytest.approx([1.0, 2.0, 4.0])
    decreasing_cost = VerificationCost("noise", {4: ((4, 8), (1.0, 0.9))})
    assert decreasing_cost.compute_times(4, np.array([100.0])) == pytest.approx([0.9]), (
        "not below 0.9"
    )


def test_token_cost_is_that_of_the_largest_batch_up_to_the_maximum() -> None:
    times = {2: ((2, 4), (1.0, 1.02)), 8: ((8, 24), (2.0, 2.4)), 16: ((16, 32), (1.0, 3.0))}
    cost = VerificationCost("three", times)
    for max_batch, batch, share in ((1, 2, 0.02), (7, 2, 0.02), (8, 8, 0.1), (15, 8, 0.1)):
        assert cost.compute_token_cost(max_batch, 4) == (pytest.approx(share), batch)
    assert cost.compute_token_cost(100, 1) == (1.0, 16), "a token costs at most a step"
    decreasing_cost = VerificationCost("noise", {4: ((4, 8), (1.0, 0.9))})
    assert decreasing_cost.compute_token_cost(4, 2) == (0.0, 4)


def test_step_times_are_loaded_from_a_file(tmp_path: Path) -> None:
    steps = ((8, 40, 0.03), (8, 8, 0.02), (1, 1, 0.01), (1, 5, 0.011))
    file = write_cost_file(tmp_path / "c.json", *steps)
    cost = load_cost(file)
    assert cost.batch_sizes == (1, 8)
    assert not cost.is_example
    assert cost.compute_times(8, np.array([24.0])) == pytest.approx([0.025])
    assert cost.select_batch_sizes([8]).batch_sizes == (8,)
    with pytest.raises(InputError, match=r"batch size 4: .* has step times for 1, 8"):
        cost.select_batch_sizes([4])


@pytest.mark.parametrize(
    ("steps", "fields", "message"),
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
def test_invalid_file_of_step_times_is_an_error(
    tmp_path: Path, steps: list[tuple[int, float, float]], fields: dict[str, Any], message: str
) -> None:
    file = write_cost_file(tmp_path / "c.json", *steps, **fields)
    with pytest.raises(InputError, match=message) as caught:
        load_cost(file)
    assert str(caught.value).startswith(f"{tmp_path / 'c.json'}: ")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_marked_and_cost_more_with_more_tokens(name: str) -> None:
    cost = load_cost(name)
    assert cost.is_example
    assert "EXAMPLE" in cost.name
    for batch in cost.batch_sizes:
        times = cost.compute_times(batch, batch * np.arange(1.0, 40.0))
        assert (np.diff(times) > 0).all()


# Search


def make_measured(*histograms: list[list[int]], tokens: list[int]) -> Measured:
    counts = tuple(np.array(histogram, np.int32) for histogram in histograms)
    half = np.arange(len(tokens)) % 2 == 0
    return Measured(dict(zip(SETTINGS, counts, strict=False)), np.array(tokens), half)


def test_ranking_and_interval_use_different_halves() -> None:
    """The first setting is by far the best on even and the worst on odd conversations."""
    measured = make_measured(
        [[1, 9], [0, 40], [1, 9], [0, 40]],
        [[20, 0], [20, 0], [20, 0], [20, 0]],
        tokens=[40, 40, 40, 40],
    )
    cost = share_of_a_step(0.1)
    assert rank(measured, cost)[0] == SETTINGS[0]
    interval = compute_interval(measured, SETTINGS[0], cost, 1)
    assert interval.value == pytest.approx(1 / 1.1)
    ratio = compute_interval(measured, SETTINGS[0], cost, 1, against=SETTINGS[1])
    assert ratio.value == pytest.approx(1 / 1.1 / 2)


def test_ranking_ignores_batch_sizes_without_gain() -> None:
    """The first setting gains more at batch 1. At 64 both settings lose, the first far more."""
    measured = make_measured([[0, 10], [0, 10]], [[14, 1], [14, 1]], tokens=[20, 20])
    cost = VerificationCost("steep", {1: ((1, 2), (1.0, 1.1)), 64: ((64, 128), (1.0, 9.0))})
    assert rank(measured, cost)[0] == SETTINGS[0]


def test_ranking_uses_the_worst_batch_size() -> None:
    """The settings yield 1.88 and 1.66 tokens per step with 5 drafted tokens and with 1."""
    measured = make_measured([[0] * 5 + [100]] * 2, [[0, 113]] * 2, tokens=[188, 188])
    small_batches = {batch: ((batch, 6 * batch), (1.0, 1.001)) for batch in (1, 4, 16)}
    cost = VerificationCost("steep", {**small_batches, 256: ((256, 512, 1536), (1.0, 1.41, 2.19))})
    half = measured.selection_half
    assert measured.compute_speedup(SETTINGS[0], cost, 256, half) == pytest.approx(0.86, abs=0.01)
    assert measured.compute_speedup(SETTINGS[1], cost, 256, half) == pytest.approx(1.18, abs=0.01)
    assert rank(measured, cost)[0] == SETTINGS[1]
    assert rank(measured, cost.select_batch_sizes([1, 4, 16]))[0] == SETTINGS[0]


def test_draft_lengths_by_batch_size_are_the_fastest_of_one_lookup() -> None:
    """Steps yield 2 tokens with k = 1 and 3 with k = 4. Another lookup is faster than both."""
    k1, k4 = (Candidate.of(min_n=2, max_n=5, k=k, drafts="padded") for k in (1, 4))
    other_lookup = Candidate.of(min_n=1, max_n=5, k=4, drafts="padded")
    histograms = {k1: [0, 30], k4: [0] * 4 + [20], other_lookup: [0] * 4 + [10]}
    counts = {c: np.array([h, h], np.int32) for c, h in histograms.items()}
    measured = Measured(counts, np.array([60, 60]), np.array([True, False]))
    times = {1: 1.1, 4: 1.1, 16: 2.0, 64: 4.0, 256: 9.0}
    cost = VerificationCost(
        "steep",
        {
            batch: ((batch, 2 * batch, 5 * batch), (1.0, 1 + (time - 1) / 4, time))
            for batch, time in times.items()
        },
    )
    table = choose_lengths(measured, cost, k4)
    assert table == [(1, 4, 4), (5, 64, 1), (65, 256, 0)]
    assert choose_lengths(measured, cost, k1) == table


def test_interval_covers_resampled_conversations() -> None:
    rng = np.random.default_rng(1)
    steps = rng.integers(50, 100, 200)
    tokens = steps + rng.integers(0, 100, 200)
    counts = np.stack([steps, np.zeros(200, int)], axis=1)
    measured = make_measured(counts.tolist(), tokens=tokens.tolist())
    interval = compute_interval(measured, SETTINGS[0], share_of_a_step(0.1), 1)
    expected = tokens[1::2].sum() / steps[1::2].sum()
    assert interval.value == pytest.approx(expected)
    residuals = tokens[1::2] - expected * steps[1::2]
    error = residuals.std(ddof=1) / np.sqrt(100) / steps[1::2].mean()
    assert interval.low == pytest.approx(expected - 1.96 * error, abs=0.3 * error)
    assert interval.high == pytest.approx(expected + 1.96 * error, abs=0.3 * error)


@pytest.mark.parametrize(
    ("gains", "sentence", "off_above"),
    [
        ("111", "It pays at every measured batch size, up to 64.", None),
        ("110", "Do not speculate above batch 8: no gain is sure there.", 8),
        ("100", "Do not speculate above batch 1: no gain is sure there.", 1),
        ("101", "Do not speculate at batch 8: no gain is sure there.", None),
        ("010", "Do not speculate at batch 1 or above batch 8: no gain is sure there.", 8),
        ("000", "Do not speculate: no gain is sure on this traffic.", 0),
    ],
)
def test_advice_names_batch_sizes_without_gain(
    gains: str, sentence: str, off_above: int | None
) -> None:
    batches = [(batch, gain == "1") for batch, gain in zip((1, 8, 64), gains, strict=True)]
    assert advise(batches) == (sentence, off_above)


def make_host_report(
    traffic_file: Path, measured: Measured, cost: VerificationCost, against: int = 0
) -> Any:
    return make_report(
        measured,
        cost,
        read_traffic([traffic_file]),
        against=list(measured.counts)[against],
        runner=RUNNERS["host"],
        about={},
    )


def test_compared_setting_is_recommended_if_only_it_gains(traffic_file: Path) -> None:
    """The first setting is the best on the selection half, and loses on the held-out half."""
    measured = make_measured([[1, 9], [0, 40]] * 20, [[0, 20], [0, 20]] * 20, tokens=[30] * 40)
    report = make_host_report(traffic_file, measured, share_of_a_step(0.1), against=1)
    (row,) = report.batches
    assert (report.candidate, row.best, row.use) == (SETTINGS[1], SETTINGS[0], SETTINGS[1])
    assert row.best_speedup.high < 1 < row.against.low
    assert row.speedup == row.against
    text = format_report(report)
    assert "Do not speculate" not in text
    assert f"RECOMMENDED: {SETTINGS[1].label}\nIt pays at this verification cost.\n" in text


@pytest.mark.parametrize(
    ("steps", "is_recommended"),
    [((985, 985), True), ((985, 1005), False), ((985, 700, 1205), False), ((1005, 985), False)],
)
def test_store_is_recommended_only_with_a_gain_on_both_halves(
    traffic_file: Path, steps: tuple[int, ...], is_recommended: bool
) -> None:
    """A small gain is sufficient. With the store, even conversations take the first number of
    ``steps``, and odd conversations the others in turn. Without a store, each takes 1000."""
    selection, *held_out = steps
    histograms = [[0, held_out[n // 2 % len(held_out)] if n % 2 else selection] for n in range(40)]
    ladder = Candidate.of(sizes="ladder", k=8, min_draft_probability=0.1)
    ladder_with_store = Candidate.of(**dict(ladder.options), store="live")
    measured = make_measured([[0, 1000]] * 40, histograms, tokens=[2000] * 40)
    counts = dict(zip((ladder, ladder_with_store), measured.counts.values(), strict=True))
    report = make_host_report(traffic_file, replace(measured, counts=counts), share_of_a_step(0.05))
    assert report.candidate == (ladder_with_store if is_recommended else ladder)
    assert ("No store is recommended" in format_report(report)) != is_recommended
    assert report.to_dict()["store"]["is_recommended"] == is_recommended


def test_store_search_continues_with_the_best_length() -> None:
    """Without a store the shortest drafts are the best, with a store the longest."""
    ladders = [
        Candidate.of(sizes="ladder", k=k, min_draft_probability=p)
        for p in (0.25, 0.1)
        for k in (4, 8, 16, 32)
    ]
    replayed: list[Candidate] = []

    def replay(candidates: Sequence[Candidate]) -> dict[Candidate, Any]:
        replayed.extend(candidates)
        return {
            c: np.array([[0, 100 - c.config.k if c.has_store else 100 + c.config.k]] * 2)
            for c in candidates
        }

    cost = share_of_a_step(0.1)
    measured = Measured(replay(ladders), np.array([200, 200]), np.array([True, False]))
    assert rank(measured, cost)[0].config.k == 4
    replayed.clear()
    searched = search_stores(measured, cost, ladders, replay)
    assert len(replayed) == len(set(replayed)) < 2 * len(ladders)
    assert list(searched.counts) == [*ladders, *replayed]
    first = rank(searched, cost)[0].config
    assert (first.store, first.k) == ("live", 32)
    configs = [candidate.config for candidate in replayed]
    assert {c.store_tokens for c in configs if c.k == 32} == {100_000, 1_000_000}


def test_frontier_contains_undominated_settings() -> None:
    points = [(100, 50, 100), (100, 60, 30), (100, 60, 20), (100, 55, 200), (100, 100, 0)]
    settings = CANDIDATES[: len(points)]
    figures = {c: Counts(*point) for c, point in zip(settings, points, strict=True)}
    assert find_frontier(figures) == [settings[4], settings[2], settings[0]]


LADDER = dict(SETTINGS[2].options)
STORES = [Candidate.of(**LADDER, store="live", store_tokens=n) for n in (100_000, 1_000_000)]


def test_candidates_have_unique_labels() -> None:
    assert len(CANDIDATES) >= 60
    assert len({c.label for c in CANDIDATES}) == len(CANDIDATES)
    assert BASELINE in CANDIDATES
    assert parse_candidate('{"max_n": 4, "k": 3}').config == NgramConfig(max_n=4, k=3)
    assert [c.label.partition("live ")[2] for c in STORES] == ["store=100k", "store=1M"]
    small_store = json.dumps({**LADDER, "store": "live", "store_tokens": 9})
    for text in ("[]", "{", '{"k": 0}', '{"length": 3}', '{"k": "x"}', small_store):
        with pytest.raises(InputError, match="expected a setting such as"):
            parse_candidate(text)


@pytest.mark.parametrize("candidate", [*CANDIDATES, *STORES], ids=lambda c: c.label)
def test_vllm_options_give_the_setting_in_vllm(candidate: Candidate) -> None:
    words = shlex.split(" ".join(vllm_options(candidate, METHODS[candidate.drafts])))
    assert words[::2] == ["--speculative-config", "--additional-config"]
    speculative, section = json.loads(words[1]), json.loads(words[3])["ngram_npu"]
    if candidate.drafts == "padded":
        bounds = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        assert speculative.pop("method") == "ngram_gpu"
        served_config = make_vllm_config(
            k=speculative.pop("num_speculative_tokens"),
            additional_config={"ngram_npu": section},
            **bounds | speculative,
        )
        assert read_options(served_config, "v2").ngram == candidate.config
        return
    assert speculative["model"] == "ngram_npu.engines.vllm.NgramProposer"
    served_config = make_vllm_config(
        k=speculative["num_speculative_tokens"], additional_config={"ngram_npu": section}
    )
    config = read_options(served_config, "custom_class").ngram
    assert replace(config, max_len=None) == candidate.config
