"""A store on a device in the same steps as one in host memory, and saved by another thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core.store.steps import MAX_NEW, SCOPES, Requests, Step, new_drafts
from core.store.steps import run_step as run_step_on_host
from ngram_npu import NgramStore, Scope

from gpu.replay import DEVICES, choose_count

ARRAYS = ("slots", "text", "blocks", "table", "allocator")


def run_step(store: NgramStore, requests: Requests, step: Step, device: str) -> dict[str, Any]:
    """Runs a step on the store's device, and returns its drafts as arrays."""

    def place(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    rows = [*map(place, (requests.token_ids, requests.num_tokens, step.num_sampled))]
    indices = {"row_indices": place(step.rows), "scopes": place(step.scopes)}
    drafts = {name: place(array) for name, array in new_drafts(len(step.rows)).items()}
    store.begin_step(len(step.rows), MAX_NEW)
    store.append(*rows, **indices, max_new=MAX_NEW)
    store.propose(*rows, **indices, **drafts)
    return {name: tensor.cpu().numpy() for name, tensor in drafts.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_steps_clears_and_saves_match_host_memory(device: str, tmp_path: Path) -> None:
    requests = Requests(1)
    store, expected = (NgramStore(4096, num_slots=6, device=d) for d in (device, None))
    for number in range(choose_count(device, 2000, 60)):
        if requests.rng.random() < 0.02:
            scope = Scope(requests.rng.choice(SCOPES))
            store.clear(scope)
            expected.clear(scope)
        step = requests.next_step()
        drafts = run_step(store, requests, step, device)
        for name, array in run_step_on_host(expected, requests, step).items():
            assert np.array_equal(drafts[name], array), f"step {number}: {name}"
        if number % 20 == 19:
            saving = threading.Thread(target=store.save, args=(tmp_path / "store",))
            saving.start()
            saving.join()
            saved = NgramStore.load(tmp_path / "store").texts()
            texts = [(scope, text.tolist()) for scope, text in expected.texts()]
            assert [(scope, text.tolist()) for scope, text in saved] == texts
    store.check_integrity()
    for name in ARRAYS:
        array = getattr(store, name)
        assert np.array_equal(np.asarray(torch.as_tensor(array).cpu()), getattr(expected, name))
