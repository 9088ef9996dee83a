"""Tuning: counts are those of a replay, speed-ups those of a definition, and the advice follows."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ngram_npu import NgramConfig, cli
from ngram_npu.replay import ReplayError, ReplayInput, ReplayOptions, load_inputs, replay
from ngram_npu.replay.simulation import TokenRequest, TokenTurn
from ngram_npu.tune import (
    BASELINE,
    CANDIDATES,
    EXAMPLES,
    Candidate,
    TuneOptions,
    load_cost,
    parse_candidate,
    share_of_a_step,
    tune,
)
from ngram_npu.tune import measure as measure_module
from ngram_npu.tune.costs import VerificationCost
from ngram_npu.tune.measure import Cache, chunks_of, measure
from ngram_npu.tune.search import Figures, Interval, Measured, advice, best, frontier, interval
from ngram_npu.tune.traffic import read_traffic

FEW = (
    BASELINE,
    Candidate.of(min_n=2, max_n=3, k=2, match_policy="latest"),
    Candidate.of(sizes="ladder", k=16, min_draft_probability=0.1),
)


def talk(count: int, seed: int = 0, name: str = "") -> list[dict[str, Any]]:
    """Conversations that repeat themselves, some more than others."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        phrase = rng.integers(0, 40, int(rng.integers(20, 60))).tolist()
        noise = rng.integers(0, 40, 30).tolist()
        turn = {
            "prompt_token_ids": phrase + noise[: number % 20],
            "completion_token_ids": phrase[5:] + noise[number % 7 :],
        }
        lines.append({"id": f"{name}{number}", "turns": [turn, turn]})
    return lines


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in talk(40)))
    return path


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def as_measured(path: Path, candidates: tuple[Candidate, ...] = FEW) -> Measured:
    read = read_traffic([path])
    return Measured(
        candidates, tuple(measure(candidates, read.requests)), read.tokens, read.chosen_half
    )


# Counts


@pytest.mark.parametrize("jobs", [1, 2])
def test_counts_are_those_of_a_replay(
    traffic: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(measure_module, "_ROWS", 7)
    requests = read_traffic([traffic]).requests
    assert len(chunks_of(requests)) == 6
    for candidate, counts in zip(FEW, measure(FEW, requests, jobs=jobs), strict=True):
        (item,) = load_inputs([traffic])
        for number in (0, 17, 39):
            alone = ReplayInput("one", (item.conversations[number],))
            figures = replay(inputs=[alone], options=ReplayOptions(**dict(candidate.options))).total
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
    replay_piece = measure_module._replay
    done: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(1)
        return replay_piece(*arguments)

    monkeypatch.setattr(measure_module, "_replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(FEW, requests, cache=Cache(path))
    # What was being written when the power went.
    with path.open("a") as file:
        file.write('{"key": "ab')
    monkeypatch.setattr(measure_module, "_replay", replay_piece)
    expected = measure(FEW, requests)

    def counting(*arguments: Any) -> Any:
        done.append(1)
        return replay_piece(*arguments)

    monkeypatch.setattr(measure_module, "_replay", counting)
    found = measure(FEW, requests, cache=Cache(path))
    assert len(done) == len(FEW) * 4, "each piece once, over both runs"
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_piece_is_of_its_setting_and_its_conversations(traffic: Path, tmp_path: Path) -> None:
    requests = read_traffic([traffic]).requests
    cache = Cache(tmp_path / "pieces.jsonl")
    measure(FEW[:1], requests, cache=cache)
    again = Cache(tmp_path / "pieces.jsonl")
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    measure(FEW[1:2], requests, cache=again, progress=note)
    measure(FEW[:1], requests[1:], cache=again, progress=note)
    measure(FEW[:1], requests, cache=again, progress=note)
    assert seen == [(0, 1), (1, 1), (0, 1), (1, 1), (1, 1)]


def test_a_cache_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "pieces.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(ReplayError, match="no cache of ngram-npu tune"):
        Cache(path)


# Cost


def test_a_share_of_a_step_is_the_formula() -> None:
    counts = np.array([[60, 20, 0, 20], [0, 0, 0, 0]])
    found = share_of_a_step(0.05).speedup(1, [180, 0], counts)
    assert found == pytest.approx([1.8 / (1 + 0.05 * 0.8), 1.0])


def test_a_batch_verifies_what_its_requests_draft_independently() -> None:
    """Against every combination of two requests; a step of 3 or more tokens takes longer."""
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


def cost_file(path: Path, *steps: tuple[int, float, float], **more: Any) -> str:
    entries = [{"batch": b, "verified": v, "seconds": s} for b, v, s in steps]
    path.write_text(json.dumps({"format": "ngram_npu.cost/1", "steps": entries, **more}))
    return str(path)


def test_a_file_of_step_times(tmp_path: Path) -> None:
    file = cost_file(tmp_path / "c.json", (8, 40, 0.03), (8, 8, 0.02), (1, 1, 0.01), (1, 5, 0.011))
    cost = load_cost(file)
    assert cost.batch_sizes == (1, 8)
    assert not cost.is_example
    assert cost.seconds(8, np.array([24.0])) == pytest.approx([0.025])
    assert cost.at([8]).batch_sizes == (8,)
    with pytest.raises(ReplayError, match=r"batch size 4: .* has step times for 1, 8"):
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
        ([(1, 1, 0.1)], {"steps": 3}, "no file of step times"),
    ],
)
def test_what_is_no_file_of_step_times(
    tmp_path: Path, steps: list[tuple[int, float, float]], more: dict[str, Any], message: str
) -> None:
    file = cost_file(tmp_path / "c.json", *steps, **more)
    with pytest.raises(ReplayError, match=message) as caught:
        load_cost(file)
    assert str(caught.value).startswith(f"{tmp_path / 'c.json'}: ")


def test_no_file_names_the_examples() -> None:
    with pytest.raises(ReplayError, match=r"`ngram-npu measure-cost` makes one, .*example-8b-l4"):
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
    """The first is best on the even ones by far, and worst on the odd ones."""
    measured = made_up(
        [[1, 9], [0, 40], [1, 9], [0, 40]],
        [[20, 0], [20, 0], [20, 0], [20, 0]],
        tokens=[40, 40, 40, 40],
    )
    cost = share_of_a_step(0.1)
    assert best(measured, cost) == 0
    found = interval(measured, 0, cost, 1)
    assert found.value == pytest.approx(1 / 1.1)
    assert advice([(1, found)], cost) == ("Do not speculate: no gain is sure on this traffic.", 0)
    ratio = interval(measured, 0, cost, 1, against=1)
    assert ratio.value == pytest.approx(1 / 1.1 / 2)


def test_where_it_does_not_pay_it_counts_as_switched_off() -> None:
    """The first gains more at batch 1 and loses much at 64, where it would be off."""
    measured = made_up([[0, 10], [0, 10]], [[14, 1], [14, 1]], tokens=[20, 20])
    cost = VerificationCost("steep", {1: ((1, 2), (1.0, 1.1)), 64: ((64, 128), (1.0, 9.0))})
    assert best(measured, cost) == 0


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
    ("lows", "sentence", "off_above"),
    [
        ([1.2, 1.1, 1.01], "It pays at every batch size looked at, up to 64.", None),
        ([1.2, 1.1, 1.0], "Do not speculate above batch 8: no gain is sure there.", 8),
        ([1.2, 0.9, 1.1], "Do not speculate above batch 1: no gain is sure there.", 1),
        ([0.9, 1.1, 1.1], "Do not speculate: no gain is sure on this traffic.", 0),
    ],
)
def test_advice(lows: list[float], sentence: str, off_above: int | None) -> None:
    batches = [(b, Interval(2, low, 3)) for b, low in zip((1, 8, 64), lows, strict=True)]
    cost = VerificationCost("x", {})
    assert advice(batches, cost) == (sentence, off_above)


def test_the_frontier_is_what_nothing_outdoes() -> None:
    points = [(100, 50, 100), (100, 60, 30), (100, 60, 20), (100, 55, 200), (100, 100, 0)]
    assert frontier([Figures(*point) for point in points]) == [4, 2, 0]


def test_candidates_are_different_and_say_how_they_are() -> None:
    assert len(CANDIDATES) >= 60
    assert len({c.label for c in CANDIDATES}) == len(CANDIDATES)
    assert BASELINE in CANDIDATES
    assert parse_candidate('{"prompt_lookup_max": 4, "num_speculative_tokens": 3}').config == (
        NgramConfig(min_n=4, max_n=4, k=3)
    )
    for wrong in ("[]", "{", '{"k": 0}', '{"length": 3}', '{"k": "x"}'):
        with pytest.raises(ReplayError, match="expected a setting such as"):
            parse_candidate(wrong)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.label)
def test_vllm_options_are_those_that_the_proposer_reads(candidate: Candidate) -> None:
    import shlex

    from ngram_npu.tune import vllm_options

    words = shlex.split(" ".join(vllm_options(candidate)))
    assert words[::2] == ["--speculative-config", "--additional-config"]
    speculative, own = json.loads(words[1]), json.loads(words[3])["ngram_npu"]
    assert speculative["model"] == "ngram_npu.vllm.NgramProposer"
    # The options of the section are fields of NgramConfig, with vLLM's names for the bounds.
    config = NgramConfig(num_speculative_tokens=speculative["num_speculative_tokens"], **own)
    assert config == candidate.config


# Traffic


def test_a_sample_is_stated_and_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    lines = [{"prompt": f"{n} " * 40, "completion": "a b c " * (n % 30)} for n in range(400)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_traffic([path], sample=8000, tokenizer="bytes")
    assert found.is_sample
    assert 6000 < found.characters <= 8000
    assert (found.found, found.found_characters) == (
        400,
        sum(len(str(line["prompt"])) + len(str(line["completion"])) for line in lines),
    )
    assert found.names == read_traffic([path], sample=8000, tokenizer="bytes").names
    numbers = [int(name) for name in found.names]
    assert numbers == sorted(numbers)
    assert max(numbers) > 200, "from everywhere"
    whole = read_traffic([path], tokenizer="bytes")
    assert not whole.is_sample
    assert whole.left_out == sum(n % 30 == 0 for n in range(400))


def test_halves_are_of_each_input(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 4)):
        lines = [json.dumps(line) + "\n" for line in talk(count, name=name)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    found = read_traffic([tmp_path])
    assert found.names == ("a0", "a1", "a2", "b0", "b1", "b2", "b3")
    assert found.chosen_half.tolist() == [True, False, True, True, False, True, False]


def test_too_little_traffic(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps(talk(1)[0]))
    with pytest.raises(ReplayError, match=r"expected 2 or more conversations .* got 1"):
        read_traffic([path])
    path.write_text("\n")
    with pytest.raises(ReplayError, match="talk: empty"):
        read_traffic([path])


# The whole


def test_the_prediction_is_what_replay_counts_on_the_held_out_half(traffic: Path) -> None:
    report = tune([traffic], share_of_a_step(0.05), TuneOptions(jobs=1), candidates=FEW)
    (item,) = load_inputs([traffic])
    odd = ReplayInput("odd", item.conversations[1::2])
    options = ReplayOptions(**dict(report.candidate.options))
    figures = replay(inputs=[odd], options=options).total
    held_out = report.settings[report.recommended].held_out
    assert held_out.tokens_per_step == figures.tokens_per_step
    assert held_out.drafted_per_step == figures.draft_tokens_per_step
    expected = held_out.tokens_per_step / (1 + 0.05 * held_out.drafted_per_step)
    (row,) = report.batches
    assert row.speedup.value == pytest.approx(expected)
    assert row.speedup.low < expected < row.speedup.high
    assert not list((traffic.parent / "cache").rglob("*.jsonl")), "done: nothing to resume"


def test_the_reports_show_the_same_and_are_whole(
    traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    traffic = traffic.rename(tmp_path / "\x1b[2J<script>&.jsonl")
    cost = cost_file(
        tmp_path / "c.json", (1, 1, 0.01), (1, 9, 0.0101), (32, 32, 0.01), (32, 64, 0.1)
    )
    arguments = ["tune", str(traffic), "--cost", cost, "--sizes", "consecutive", "--jobs", "1"]
    against = json.dumps(dict(FEW[1].options))
    arguments += ["--against", against, "--html", str(page), "--json", str(data)]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == "", "no progress where no terminal is"
    result = json.loads(data.read_text())
    label = result["recommended"]["label"]
    assert result["advice"] == "Do not speculate above batch 1: no gain is sure there."
    assert result["off_above_batch"] == 1
    assert result["against"]["label"] == FEW[1].label
    text = page.read_text(encoding="utf-8")
    for shown in (out, text):
        assert f"{label}" in shown
        assert result["advice"] in shown
        assert f"{result['batches'][0]['speedup']['value']:.3f}" in shown
        assert "step times of c.json" in shown
        assert "\\x1b[2J" in shown
        assert "\x1b" not in shown
    for option in result["recommended"]["vllm_options"]:
        assert option in out
    assert "<script" not in text
    assert not re.search(r"(?:src|href|url|@import|http-equiv)\s*[=(]", text), "needs a network"
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 3
    for drawing in drawings:
        root = ET.fromstring(drawing)
        for element in root.iter():
            for name in ("cx", "cy", "x1", "x2", "y1", "y2", "x", "y"):
                if name in element.attrib:
                    assert -1 <= float(element.attrib[name]) <= 481, "within the drawing"


def test_nothing_to_gain_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.jsonl"
    rng = np.random.default_rng(3)
    lines = [
        {
            "prompt_token_ids": rng.integers(0, 10**6, 30).tolist(),
            "completion_token_ids": rng.integers(0, 10**6, 30).tolist(),
        }
        for _ in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "r.html"
    assert cli.main(["tune", str(path), "-c", "0.05", "--jobs", "1", "--html", str(page)]) == 0
    assert "ADVICE: Do not speculate: no gain is sure on this traffic." in capsys.readouterr().out
    assert "--speculative-config" not in page.read_text()


def test_the_sample_and_the_example_are_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.jsonl"
    line = json.dumps({"prompt": "again and " * 5000, "completion": "again and " * 20})
    path.write_text(f"{line}\n" * 30)
    arguments = ["tune", str(path), "--sample", "1", "--tokenizer", "bytes", "--jobs", "1"]
    assert cli.main([*arguments, "--sizes", "consecutive", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["traffic"]["is_sample"]
    assert "(a SAMPLE of 30 conversations, 1.51 million characters)" in err
    assert "The verification cost is an EXAMPLE" in err
    assert "These figures compare with nothing" in err


def test_interrupted_and_resumed(
    traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    replay_piece = measure_module._replay
    left = iter(range(4))

    def interrupted(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return replay_piece(*arguments)

    arguments = ["tune", str(traffic), "-c", "0.05", "--jobs", "1", "--sizes", "consecutive"]
    arguments += ["--json", str(tmp_path / "r.json")]
    with monkeypatch.context() as patch:
        patch.setattr(measure_module, "_replay", interrupted)
        assert cli.main(arguments) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
    assert cli.main(arguments) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["pieces_from_an_earlier_run"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "-1"], "must be at least 0, below 10, got -1"),
        (["-c", "0.1", "--cost", "x"], "not allowed with argument"),
        (["--cost", "nowhere.json"], "nowhere.json: no file of step times"),
        (["--batch-size", "3"], "batch size 3: "),
        (["--against", "{"], "expected a setting such as"),
        (["--html", "{tmp}/no/such.html"], "does not exist"),
        (["--jobs", "0"], "--jobs: must be at least 1"),
        (["{tmp}/nowhere.jsonl"], "no such file"),
    ],
)
def test_bad_options_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["tune", *(a.replace("{tmp}", str(tmp_path)) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
