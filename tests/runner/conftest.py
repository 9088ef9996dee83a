from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runner.worlds import Plain

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="package")
def folder() -> str:
    """The tiny model's folder."""
    pytest.importorskip("transformers")
    from runner import tiny_model

    return str(tiny_model.cached(ROOT / "build" / "tiny-model"))


@pytest.fixture(scope="package")
def model(folder: str) -> PreTrainedModel:
    """In float64, so that the order of a sum does not change the chosen token."""
    import torch

    from examples.runner import load

    return load(folder, dtype=torch.float64)


@pytest.fixture(scope="package")
def plain_model(folder: str) -> Any:
    """As transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture(scope="package")
def plain(folder: str) -> Plain:
    from runner import worlds

    return worlds.by_transformers(folder)


@pytest.fixture(scope="package")
def sampled(model: PreTrainedModel, plain: Plain) -> Plain:
    """The sampled text: one request at a time, without speculation, synchronous."""
    from examples.runner import Sampling
    from runner import worlds

    found = worlds.texts(
        model,
        plain.stops,
        ngram=None,
        asynchronous=False,
        max_rows=1,
        sampling=Sampling(0.8, seed=7),
    )
    return replace(plain, texts=found)


@pytest.fixture(scope="package")
def draft_models(folder: str) -> dict[str, PreTrainedModel]:
    """Two draft models: "good" agrees with the model as far as its window reaches; "bad" is
    untrained."""
    import torch
    from transformers import LlamaForCausalLM

    from examples.runner import load

    good = load(folder, dtype=torch.float64, attention="sdpa")
    torch.manual_seed(1)
    bad = LlamaForCausalLM(good.config).to(torch.float64).eval()
    return {"good": good, "bad": bad}


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Any:
    """The model is too small for more threads, and other tests run in parallel."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
