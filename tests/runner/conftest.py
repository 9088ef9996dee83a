"""Fixtures of the example runner's tests: the models, and texts without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runner.workload import Reference
    from transformers import PreTrainedModel


@pytest.fixture(scope="module", autouse=True)
def _use_one_thread() -> Iterator[None]:
    """The model is too small for several threads, and other tests run in parallel."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_folder() -> str:
    """The folder of the tiny model."""
    pytest.importorskip("transformers")
    import tiny_model

    return str(tiny_model.get_model_folder(name="log"))


@pytest.fixture(scope="session")
def model(model_folder: str) -> PreTrainedModel:
    """The tiny model with paged attention, in float64 so that rounding does not change a token."""
    import torch

    from examples.runner import load

    return load(model_folder, dtype=torch.float64)


@pytest.fixture(scope="session")
def greedy_run(model_folder: str) -> Reference:
    """Greedy texts of transformers."""
    from runner import workload

    return workload.generate_with_transformers(model_folder)


@pytest.fixture(scope="session")
def sampled_run(model: PreTrainedModel, greedy_run: Reference) -> Reference:
    """Sampled texts of the example runner, which runs one request at a time, synchronously and
    without speculation."""
    from runner import workload

    from examples.runner import Sampling

    texts, _ = workload.generate_small_batch(
        model,
        greedy_run.stops,
        ngram=None,
        asynchronous=False,
        max_rows=1,
        sampling=Sampling(0.8, seed=7),
    )
    return replace(greedy_run, texts=texts)


@pytest.fixture(scope="session")
def draft_models(model_folder: str) -> dict[str, PreTrainedModel]:
    """Two draft models: "good" is the model itself, limited by its window; "bad" is untrained."""
    import torch
    from transformers import LlamaForCausalLM

    from examples.runner import load

    good = load(model_folder, dtype=torch.float64, attention="sdpa")
    torch.manual_seed(1)
    bad = LlamaForCausalLM(good.config).to(torch.float64).eval()
    return {"good": good, "bad": bad}
