"""A store on a device in the same steps as one on the CPU, and saved by another thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from core.store.device_steps import MAX_NEW, SCOPES, Requests, Step, new_drafts
from ngram_npu import NgramStore
from ngram_npu.store import Scope
from ngram_npu.store.device_store import DeviceStore

from gpu.replay import DEVICES, choose_count

TENSORS = ("slots", "text", "blocks", "table", "allocator")


def run_step(store: DeviceStore, requests: Requests, step: Step) -> dict[str, Any]:
    """Runs a step on the store's device, and returns its drafts on the CPU."""
    device = store.text.device
    rows = [t.to(device) for t in (requests.token_ids, requests.num_tokens, step.num_sampled)]
    indices = {"row_indices": step.rows.to(device), "scopes": step.scopes.to(device)}
    drafts = {name: tensor.to(device) for name, tensor in new_drafts(len(step.rows)).items()}
    store.begin_step(len(step.rows), MAX_NEW)
    store.append(*rows, **indices, max_new=MAX_NEW)
    store.propose(*rows, **indices, **drafts)
    return {name: tensor.cpu() for name, tensor in drafts.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_steps_clears_and_saves_match_the_cpu(device: str, tmp_path: Path) -> None:
    requests = Requests(1)
    store, expected = (DeviceStore(6, 4096, max_batch=8, device=d) for d in (device, "cpu"))
    for number in range(choose_count(device, 2000, 60)):
        if requests.rng.random() < 0.02:
            scope = Scope(requests.rng.choice(SCOPES))
            store.clear(scope)
            expected.clear(scope)
        step = requests.next_step()
        drafts, right = (run_step(s, requests, step) for s in (store, expected))
        for name, tensor in right.items():
            assert torch.equal(drafts[name], tensor), f"step {number}: {name}"
        if number % 20 == 19:
            saving = threading.Thread(target=store.save, args=(tmp_path / "store",))
            saving.start()
            saving.join()
            saved = NgramStore.load(tmp_path / "store").texts()
            texts = [(scope, text.tolist()) for scope, text in expected.texts()]
            assert [(scope, text.tolist()) for scope, text in saved] == texts
    for name in TENSORS:
        assert torch.equal(getattr(store, name).cpu(), getattr(expected, name)), name
    assert not any(tensor.any() for tensor in store._snapshot)
