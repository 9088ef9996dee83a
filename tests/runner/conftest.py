from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def folder() -> str:
    """The tiny model's folder."""
    pytest.importorskip("transformers")
    from runner import tiny_model

    return str(tiny_model.cached(ROOT / "build" / "tiny-model"))


@pytest.fixture(scope="session")
def model(folder: str) -> PreTrainedModel:
    """In float64, so that the order of a sum does not change the chosen token."""
    import torch
    from ngram_npu.runner import load

    return load(folder, dtype=torch.float64)


@pytest.fixture(scope="session")
def draft_models(folder: str) -> dict[str, PreTrainedModel]:
    """Two draft models: "good" agrees with the model as far as its window reaches; "bad" is
    untrained."""
    import torch
    from ngram_npu.runner import load
    from transformers import LlamaForCausalLM

    good = load(folder, dtype=torch.float64, attention="sdpa")
    torch.manual_seed(1)
    bad = LlamaForCausalLM(good.config).to(torch.float64).eval()
    return {"good": good, "bad": bad}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """The model is too small for more threads, and other tests run in parallel."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
