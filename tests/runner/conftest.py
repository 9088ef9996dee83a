from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runner.workload import Reference
    from transformers import PreTrainedModel


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The model is too small for several threads, and other tests run in parallel."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder() -> str:
    """The tiny model's folder."""
    pytest.importorskip("transformers")
    from runner import tiny_model

    return str(tiny_model.cached())


@pytest.fixture(scope="session")
def model(folder: str) -> PreTrainedModel:
    """The model with paged attention, in float64 so that rounding does not change a token."""
    import torch

    from examples.runner import load

    return load(folder, dtype=torch.float64)


@pytest.fixture(scope="session")
def greedy(folder: str) -> Reference:
    from runner import workload

    return workload.generate_with_transformers(folder)


@pytest.fixture(scope="session")
def sampled(model: PreTrainedModel, greedy: Reference) -> Reference:
    """Sampled text: one request at a time, without speculation, synchronous."""
    from runner import workload

    from examples.runner import Sampling

    texts, _ = workload.generate_few(
        model,
        greedy.stops,
        ngram=None,
        asynchronous=False,
        max_rows=1,
        sampling=Sampling(0.8, seed=7),
    )
    return replace(greedy, texts=texts)


@pytest.fixture(scope="session")
def draft_models(folder: str) -> dict[str, PreTrainedModel]:
    """Two draft models: "good" is the model itself, limited by its window; "bad" is untrained."""
    import torch
    from transformers import LlamaForCausalLM

    from examples.runner import load

    good = load(folder, dtype=torch.float64, attention="sdpa")
    torch.manual_seed(1)
    bad = LlamaForCausalLM(good.config).to(torch.float64).eval()
    return {"good": good, "bad": bad}
