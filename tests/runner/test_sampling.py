from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from examples.runner import Sampling
from examples.runner.sampling import gumbel_noise


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_tokens_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0])
    count = 20_000
    sampling = Sampling(temperature=1.0, seed=3)
    scores = sampling.scores(
        probabilities.log().expand(count, -1), torch.zeros(count).long(), torch.arange(count)
    )
    found = scores.argmax(-1).bincount(minlength=6) / count
    assert found[5] == 0
    assert (found - probabilities).abs().max() < 0.012  # over three standard deviations


def test_temperature_sharpens() -> None:
    logits = torch.tensor([1.0, 0.0]).expand(4000, -1)
    ids, positions = torch.zeros(4000).long(), torch.arange(4000)
    warm, cold = (
        (Sampling(t, seed=1).scores(logits, ids, positions).argmax(-1) == 0).double().mean().item()
        for t in (1.0, 0.25)
    )
    assert warm == pytest.approx(0.731, abs=0.03)
    assert cold == pytest.approx(0.982, abs=0.01)


def test_greedy_leaves_the_logits() -> None:
    logits = torch.randn(3, 7)
    assert Sampling().scores(logits, _ids(1, 2, 3), _ids(1, 2, 3)) is logits


def test_only_the_likeliest_tokens() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)).double()
    for top_k, top_p in ((1, 1.0), (5, 1.0), (0, 0.3), (12, 0.6), (90, 0.999)):
        expected = logits / 0.7
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        ids = torch.arange(20)
        found = Sampling(0.7, top_k=top_k, top_p=top_p).scores(logits, ids, ids)
        assert found.isinf().equal(expected.isinf())
        assert found.equal(expected + gumbel_noise(0, ids, ids, 50))


def test_noise_is_a_function_of_seed_request_and_position() -> None:
    rows = gumbel_noise(5, _ids(1, 1, 2, 1), _ids(9, 10, 9, 9), 50)
    assert rows[0].equal(rows[3])
    assert not rows[0].equal(rows[1])
    assert not rows[0].equal(rows[2])
    assert not rows[1].equal(rows[2])
    assert gumbel_noise(5, _ids(2), _ids(9), 50)[0].equal(rows[2])
    assert not gumbel_noise(6, _ids(2), _ids(9), 50)[0].equal(rows[2])
    assert rows.isfinite().all()


def test_a_smaller_vocabulary_has_the_same_noise() -> None:
    assert gumbel_noise(0, _ids(4), _ids(4), 20)[:, :7].equal(gumbel_noise(0, _ids(4), _ids(4), 7))


def test_the_generator_is_splitmix() -> None:
    """Its published first outputs for seed 1234567."""
    from examples.runner.sampling import _mixed, _signed

    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([_signed((1234567 + n * golden) % 2**64) for n in range(3)])
    found = [value % 2**64 for value in _mixed(states).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature: expected at least 0 and finite, got -1"):
        Sampling(temperature=-1)
    for wrong in ({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match="top_k, top_p: expected"):
            Sampling(**wrong)  # type: ignore[arg-type]
