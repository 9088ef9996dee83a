"""The store of a running V2 engine across updates of the model's weights, as in RL: vLLM sleeps,
wakes up, loads other weights and resets its prefix cache between two batches of requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import v2_runs
from engines import Engine, K, encode_corpus, make_params, start_engine
from safetensors.torch import load_file, save_file
from test_v2_store import STORE_EXTENSION, call_store

NUM_VERSIONS = 3
NOISE = 0.05
"""Standard deviation of the change of a weight, relative to that of the weights of its tensor."""


@dataclass
class Rollouts:
    """What an engine generated and stored with each version of the weights."""

    token_ids: list[list[list[int]]] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    stored_tokens: list[int] = field(default_factory=list)
    """Number of tokens in the store after each update, which keeps one version's text."""


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of the model with different weights."""
    folders = [model]
    for version in range(1, NUM_VERSIONS):
        folder = tmp_path_factory.mktemp("version")
        shutil.copytree(model, folder, dirs_exist_ok=True)
        generator = torch.Generator().manual_seed(version)
        for file in folder.glob("*.safetensors"):
            weights = load_file(file)
            for weight in weights.values():
                noise = torch.randn(weight.shape, generator=generator)
                weight += (NOISE * weight.std() * noise).to(weight.dtype)
            save_file(weights, file, metadata={"format": "pt"})
        folders.append(folder)
    return folders


def make_prompts(model: Path) -> list[dict[str, list[int]]]:
    tokens = encode_corpus(model, 4_000)
    prompts = [tokens[100 * i : 100 * i + 40] for i in range(2)]
    return [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(2)]


def run_rollouts(engine: Engine, versions: list[Path]) -> Rollouts:
    rollouts = Rollouts()
    prompts = make_prompts(versions[0])
    has_store = engine.uses_ngram_npu
    for version, folder in enumerate(versions):
        if version > 0:
            engine.llm.sleep(level=2)
            engine.llm.wake_up(tags=["weights"])
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            engine.llm.wake_up(tags=["kv_cache"])
            assert engine.llm.reset_prefix_cache()
            if has_store:
                num_tokens = call_store(engine, "statistics")["tokens_held"]
                assert num_tokens > 0, "the store survived"
                call_store(engine, "mark_update", 2)
                rollouts.stored_tokens.append(call_store(engine, "statistics")["tokens_held"])
        accepted = engine.read_counters()[1]
        rollouts.token_ids.append(engine.generate(prompts, make_params(32)))
        rollouts.num_accepted.append(engine.read_counters()[1] - accepted)
    if has_store:
        engine.store.check_integrity()
    return rollouts


@pytest.fixture(scope="module")
def expected_rollouts(model: Path, versions: list[Path]) -> Iterator[Rollouts]:
    """Without drafts."""
    with start_engine(model, v2_runs.METHODS["none"]) as engine:
        yield run_rollouts(engine, versions)


def test_store_across_weight_updates_keeps_text_equal(
    model: Path, versions: list[Path], expected_rollouts: Rollouts
) -> None:
    options = {"worker_extension_cls": STORE_EXTENSION}
    with start_engine(model, v2_runs.METHODS["store"], **options) as engine:
        rollouts = run_rollouts(engine, versions)
    assert rollouts.token_ids == expected_rollouts.token_ids
    for i in range(1, NUM_VERSIONS):
        assert rollouts.token_ids[i] != rollouts.token_ids[i - 1], "the weights have changed"
    assert min(rollouts.num_accepted) > 0
    # The store may contain the tokens that a step verified after the stop.
    max_tokens = sum(len(tokens) + K for tokens in rollouts.token_ids[0])
    for count in rollouts.stored_tokens:
        assert 0 < count <= max_tokens, "text of one version of the weights remains"
