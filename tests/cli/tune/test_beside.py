"""Tests `tune --beside`: counts equal those of the operators, figures follow their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu.config import default_match_costs
from ngram_npu_cli import command as cli
from ngram_npu_cli.tune.beside import count_steps, find_positions
from ngram_npu_cli.tune.traffic import read_traffic

K = 4


def run_operators(request: Any, accepted: list[int]) -> tuple[int, int, int]:
    """Returns the counts of `count_steps` for a request, with drafts of the operators. At each
    position, the neural draft has as many recorded tokens as are accepted, then wrong tokens."""
    tokens = torch.tensor(np.append(request.tokens(), [-7] * K).astype(np.int32))
    match_costs = torch.from_numpy(default_match_costs().copy())
    counts = np.zeros(3, int)
    first = 0
    for start, end in request.spans():
        acceptance = torch.zeros(1, 2, dtype=torch.int32)
        position, num_sampled, source = start + 1, 1, 0
        while position < end:
            context = torch.tensor([position], dtype=torch.int32)
            ngram = torch.ops.ngram_npu.ngram_propose(
                tokens[None], context, min_n=2, max_n=16, k=K, match_policy=1, overlap=True
            )
            neural = tokens[None, position : position + K].clone()
            neural[0, accepted[first + position - start - 1] :] = -9
            drafts, _, sources = torch.ops.ngram_npu.merge_drafts_(
                neural,
                *ngram,
                match_costs=match_costs,
                num_sampled=torch.tensor([num_sampled], dtype=torch.int32),
                neural_acceptance=acceptance,
            )
            equal = drafts[0] == tokens[position : position + K]
            num_sampled = 1 + int(equal.int().cumprod(0).sum())
            source = int(sources[0])
            counts += [1, source == 2, 0 if source == 2 else accepted[first + position - start - 1]]
            position += num_sampled
        first += end - start - 1
    return tuple(counts.tolist())


def test_step_counts_equal_those_of_the_operators(traffic_file: Path) -> None:
    rng = np.random.default_rng(3)
    ngram_steps = 0
    for request in read_traffic([traffic_file]).requests[:12]:
        positions = find_positions(request, K)
        accepted = rng.integers(0, K + 1, len(positions.correct)) // 2
        accepted = np.minimum(accepted, positions.remaining).tolist()
        counts = count_steps(positions, accepted, K, with_ngrams=True)
        assert counts == run_operators(request, accepted)
        ngram_steps += counts[1]
    assert ngram_steps > 20


def test_report_has_gain_and_limit_of_time(
    traffic_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", str(traffic_file), "-c", "0.1", "--beside"]
    assert cli.main([*arguments, "1.5", "--k", "3", "--json", "-"]) == 0
    out, text = capsys.readouterr()
    independent, same_positions = json.loads(out)["results"]
    ratio = independent["tokens_per_step"] / independent["neural_tokens_per_step"]
    assert independent["gain"]["value"] == pytest.approx(ratio)
    assert ratio > same_positions["gain"]["value"]
    for result in (independent, same_positions):  # the last step of an answer may yield less
        assert 2.5 * 0.96 < result["neural_tokens_per_step"] < 2.51
    assert independent["break_even"]["1"] == pytest.approx((ratio - 1) * 1.3)
    assert f"{ratio:.3f} [" in text
    for more, message in (
        (["4"], "beside: expected above 0 and below k = 4, got 4"),
        (["1", "--k", "17"], "k: expected at most 16 with beside, got 17"),
        (["1", "--store"], "--store: expected none with --beside, got True"),
    ):
        assert cli.main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err
    assert cli.main([*arguments[:-1], "--k", "3"]) == 2
    assert "--k: expected none without --beside, got 3" in capsys.readouterr().err
