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
    """In float64: the order of a sum does not decide between tokens."""
    import torch
    from ngram_npu.runner import load

    return load(folder, dtype=torch.float64)


@pytest.fixture(scope="session")
def draft_models(folder: str) -> dict[str, PreTrainedModel]:
    """Beside the model: one that says what it says, as far as a window reaches, and one that has
    learnt nothing."""
    import torch
    from ngram_npu.runner import load
    from transformers import LlamaForCausalLM

    good = load(folder, dtype=torch.float64, attention="sdpa")
    torch.manual_seed(1)
    bad = LlamaForCausalLM(good.config).to(torch.float64).eval()
    return {"good": good, "bad": bad}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """The model is too small for more, and other tests run beside."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
