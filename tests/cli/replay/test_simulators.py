"""The simulators: of a ladder's drafts, which agrees with the reference and shares no code with it;
of rules that choose between a neural and an n-gram draft."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from naive_replay import naive_replay
from ngram_npu.ops import merge_drafts_
from ngram_npu_cli.replay import TokenRequest, TokenTurn
from ngram_npu_cli.replay.walks import Counts, candidates, outcomes, walks
from ops.reference import ladder

from tools.beside import simulate
from tools.beside.simulate import (
    Completion,
    Drafts,
    compare,
    neural_alone,
    ngram_alone,
    promising,
    walk,
)

LIMITS = (0, 20, 40, 100)


def rows() -> list[list[int]]:
    rng = random.Random(16)
    kinds = [rng.choice((1, 2, 3, 30)) for _ in range(60)]
    return [[rng.randrange(kind) for _ in range(rng.randrange(70))] for kind in kinds]


@pytest.mark.parametrize("tokens", rows())
def test_candidates_and_bytes(tokens: list[int]) -> None:
    row = np.array(tokens, np.int64)
    q, m = candidates(row)
    expected = [ladder.candidate(tokens[:x]) for x in range(len(tokens))]
    assert list(zip(q.tolist(), m.tolist(), strict=True)) == expected
    assert outcomes(row, q, m).tolist() == ladder.outcome_bytes(tokens)


def replayed(
    turns: list[tuple[list[int], list[int]]], costs: list[list[int]], limit: int
) -> Counts:
    """The reference, one step at a time."""

    def draft(context: list[int]) -> list[int]:
        return ladder.draft(context, 8, costs, limit, True, 10_000)[0]

    found = naive_replay([turns], draft)
    return Counts(found.tokens, found.steps, sum(n * c for n, c in found.drafted.items()))


@pytest.mark.parametrize("limit", LIMITS)
def test_a_replay(limit: int) -> None:
    rng = random.Random(limit)
    costs = [[rng.randrange(40) for _ in range(32)] for _ in range(16)]
    turns = [
        ([rng.randrange(4) for _ in range(10)], [rng.randrange(3) for _ in range(length)])
        for length in (20, 0, 1, 33, 2, 17)
    ]
    made = tuple(TokenTurn(np.array(p, np.int32), np.array(c, np.int32)) for p, c in turns)
    found = walks([TokenRequest("none", ()), TokenRequest("one", made)])
    expected = replayed(turns, costs, limit)
    assert found.replay(found.lengths(np.array(costs), limit, 8)) == expected
    assert expected.tokens == 19 + 32 + 1 + 16


TOKENS = list(range(100, 112))


def _completion(neural: int, ngram: dict[int, int], costs: int = 1) -> Completion:
    """A neural draft of 3 with ``neural`` right tokens everywhere, and n-gram drafts of 3 after the
    tokens in ``ngram``, which gives their number of right tokens."""
    drafts = []
    for place in range(1, len(TOKENS)):
        right = [*TOKENS[place:], 0, 0, 0]
        said = right[:neural] + [1] * (3 - neural)
        found = ngram.get(place)
        grams = [] if found is None else right[:found] + [2] * (3 - found)
        drafts.append(Drafts(said, grams, [costs] * len(grams)))
    return Completion(TOKENS, drafts)


def test_a_step_begins_behind_what_was_accepted() -> None:
    walked = walk(_completion(2, {}), neural_alone)
    assert (walked.steps, walked.accepted) == (4, 8)  # behind 1, 4, 7, 10 tokens
    walked = walk(_completion(0, {1: 3, 5: 3, 6: 3, 9: 1}), ngram_alone)
    assert (walked.steps, walked.accepted, walked.from_ngrams) == (4, 7, 4)  # behind 1, 5, 9, 11


def test_the_mean_over_positions_is_another() -> None:
    completion = _completion(0, dict.fromkeys(range(1, 6), 3))
    assert walk(completion, ngram_alone).accepted_per_step == 6 / 5
    assert walk(completion, ngram_alone, everywhere=True).accepted_per_step == 15 / 11


def test_the_drafter_is_trusted_until_it_was_measured() -> None:
    always = dict.fromkeys(range(1, 12), 3)
    sure = walk(_completion(0, always), promising(0))
    assert sure.from_ngrams == 3
    assert sure.steps == 4, "one step of the drafter's, which accepts nothing"
    assert walk(_completion(3, always), promising(0)).from_ngrams == 0
    assert walk(_completion(0, always), promising(3)).from_ngrams == 0


def test_the_rule_is_the_operators() -> None:
    """Step by step, including the state it keeps per request."""
    torch = pytest.importorskip("torch")
    completion = _completion(0, dict.fromkeys(range(3, 12), 2), costs=4)
    acceptance = torch.zeros(1, 2, dtype=torch.int32)
    place, sampled, sources = 1, 1, []
    while place < len(TOKENS):
        drafts = completion.drafts[place - 1]
        ngram = torch.tensor([(drafts.ngram + [0] * 3)[:3]], dtype=torch.int32)
        merged = merge_drafts_(
            torch.tensor([drafts.neural]),
            ngram,
            torch.tensor([len(drafts.ngram)], dtype=torch.int32),
            torch.tensor([3], dtype=torch.int32),
            draft_costs=torch.tensor([(drafts.costs + [0] * 3)[:3]], dtype=torch.uint8),
            num_sampled=torch.tensor([sampled], dtype=torch.int32),
            neural_acceptance=acceptance,
        )
        sources.append(int(merged.draft_source[0]))
        sampled = completion.accepted(place, merged.draft_token_ids[0].tolist()) + 1
        place += sampled
    walked = walk(completion, promising(0))
    assert walked.steps == len(sources)
    assert walked.from_ngrams == np.count_nonzero(np.array(sources) == 2) > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completion = _completion(1, {1: 3})
    assert Completion.from_json(completion.to_json()) == completion
    recording, output = tmp_path / "toys.jsonl", tmp_path / "out.json"
    recording.write_text(f"{completion.to_json()}\n" * 2)
    assert simulate.main([str(recording), "--thresholds", "0", "2", "--json", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["command"] == "python -m tools.beside.simulate toys.jsonl --thresholds 0 2"
    (found,) = record["results"]
    assert found["recording"] == "toys"
    assert list(found["rules"]) == ["neural", "ngrams", "promise_0", "promise_2"]
    expected = compare([completion, completion], [])[0]
    assert {"rule": "neural", **found["rules"]["neural"]} == expected
    assert "toys, 2 completions" in capsys.readouterr().out
