"""Tests the ops on recorded text: their counts equal those of independent code."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ngram_npu.engines.vllm import sharing
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import ReplayOptions, replay

from tools.bench.__main__ import main
from tools.bench.ops import acceptance, acceptance_padded, draft_length, fleet
from tools.bench.ops.acceptance import DEFAULT_LIMIT, replay_with_store
from tools.fit_draft_costs import load_sets

pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sets of conversations of two turns each, composed of a few phrases."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(16)
    phrases = [[rng.randrange(9) for _ in range(rng.randrange(1, 9))] for _ in range(8)]
    for name in ("one", "two"):
        lines = []
        for number in range(6):
            ids = [token for phrase in rng.choices(phrases, k=180) for token in phrase]
            turns = [
                {"prompt_token_ids": ids[i : i + 20], "completion_token_ids": ids[i + 20 : i + 90]}
                for i in (0, 90)
            ]
            lines.append(json.dumps({"id": str(number), "turns": turns}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def run_op(data: Path, op: str, *arguments: str) -> dict[str, Any]:
    file = data.parent / "out.json"
    assert main([op, "--data", str(data), "--json", str(file), *arguments]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_acceptance_counts_more_drafts_at_higher_limits(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = 2, 20, acceptance.DEFAULT_LIMIT, acceptance.HIGH_LIMIT, 100
    monkeypatch.setattr(acceptance, "LIMITS", limits)
    *sets, summary = run_op(data, "acceptance", "--peer=vllm-ngram-k5")["results"]
    assert summary["whole"]["sets"] == len(sets) == 2
    for result in sets:
        assert result["conversations"] == 6
        curve = result["whole_by_limit"]
        counts_at_40 = {name: values[limits.index(40)] for name, values in curve.items()}
        assert result["whole"]["k8"]["limit_40"] == counts_at_40
        drafted = curve["drafted_per_step"]
        assert drafted == sorted(drafted)
        assert drafted[0] < drafted[-1]
        options = ReplayOptions(min_n=2, max_n=5, k=5)
        figures = replay([data / f"{result['set']}.jsonl"], options).total
        peer = result["whole"]["peers"]["vllm-ngram-k5"]
        assert figures.tokens_per_step == pytest.approx(peer["tokens_per_step"], abs=1e-4)


def test_scopes_of_one_prompt_equal_shared_scope(data: Path) -> None:
    """If all conversations are samples of one prompt, both scopes contain the same text."""
    for file in data.iterdir():
        lines = [json.loads(line) | {"id": f"0/{i}"} for i, line in enumerate(file.open())]
        file.write_text("\n".join(map(json.dumps, lines)))
    for result in run_op(data, "prompt-scopes")["results"]:
        assert (result["prompts"], result["samples"]) == (1, 6)
        figures = result["epochs"]
        assert figures["prompt"] == figures["shared"] == figures["both"]
        options = ReplayOptions(min_draft_probability=0.177, k=8, store="live", batch_size=1)
        total = replay([data / f"{result['set']}.jsonl"], options).total
        tokens_per_step = figures["shared"]["tokens_per_step"]
        assert tokens_per_step == pytest.approx(total.tokens_per_step, abs=1e-4)
        assert tokens_per_step > figures["no store"]["tokens_per_step"]


def test_padded_acceptance_equals_replay_of_padded_drafts(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sharing, acceptance_padded):  # of the store on the host and on the device
        monkeypatch.setattr(module, "STORE_TOKENS", 1 << 17)
    *sets, summary = run_op(data, "acceptance-padded")["results"]
    assert summary["sets"] == len(sets) == 2
    bounds = {"ngram": (2, 5, False), "1-16": (1, 16, True)}
    for result in sets:
        for lookup, (min_n, max_n, overlap) in bounds.items():
            options = ReplayOptions(
                min_n=min_n,
                max_n=max_n,
                k=5,
                match_policy="latest",
                overlap=overlap,
                drafts="padded",
            )
            figures = replay([data / f"{result['set']}.jsonl"], options).total
            assert figures.tokens_per_step is not None
            expected = round(figures.tokens_per_step, 4)
            assert result["k5"][lookup] == expected
        # All conversations have the same phrases.
        assert result["k5"][acceptance_padded.DEVICE_STORE] > result["k5"]["1-16"]


def test_fed_replicas_draft_more_than_separate_ones(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STORE_TOKENS", 1 << 16)
    monkeypatch.setattr(fleet, "NUM_REPLICAS", (1, 2))
    requests_by_set = load_sets([data], load_tokenizer())
    for result in run_op(data, "fleet")["results"]:
        counts = replay_with_store(requests_by_set[result["set"]], "live", DEFAULT_LIMIT)
        alone = result["replicas_1"]["silo"]["tokens_per_step"]
        assert alone == pytest.approx(counts.tokens_per_step, abs=1e-4)
        separate, fed = (result["replicas_2"][feed] for feed in ("silo", "fed"))
        assert result["none"]["tokens_per_step"] < separate["tokens_per_step"]
        assert separate["tokens_per_step"] < fed["tokens_per_step"]


def test_policy_always_0_is_as_fast_as_no_drafts(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_length, "BATCHES", (1, 4))
    monkeypatch.setattr(draft_length, "CURVES", {"dense": draft_length.time_dense_8b})
    monkeypatch.setattr(draft_length, "FIRST_STEPS", 20)
    results = run_op(data, "draft-length", "--steps=60")["results"]
    assert {result["policy"] for result in results} == draft_length.POLICIES.keys()
    for result in results:
        assert result["over none"] >= result["over best"] > 0
        assert result["over none"] == 1 or result["policy"] != "always 0"
