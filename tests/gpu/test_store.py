"""A store on a device in the same steps as one in host memory, and saved by another thread."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from ngram_npu import NgramStore, Scope
from ops.specs.store import SCOPES, STORE
from store_steps import generate_steps, run_step

from gpu.replay import DEVICES, choose_count


@pytest.mark.parametrize("device", DEVICES)
def test_steps_clears_and_saves_match_host_memory(device: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    store, expected = (NgramStore(4096, num_slots=6, device=d) for d in (device, None))
    num_steps = choose_count(device, 2000, 60)
    for number, rows in zip(range(num_steps), generate_steps(1), strict=False):
        if rng.random() < 0.02:
            scope = Scope(int(rng.choice(SCOPES)))
            store.clear(scope)
            expected.clear(scope)
        drafts = run_step(store, rows, lambda array: torch.from_numpy(array).to(device))
        for name, array in run_step(expected, rows).items():
            assert np.array_equal(drafts[name], array), f"step {number}: {name}"
        if number % 20 == 19:
            saving = threading.Thread(target=store.save, args=(tmp_path / "store",))
            saving.start()
            saving.join()
            saved = NgramStore.load(tmp_path / "store").texts()
            texts = [(scope, text.tolist()) for scope, text in expected.texts()]
            assert [(scope, text.tolist()) for scope, text in saved] == texts
    for name in STORE:
        array = torch.as_tensor(getattr(store, name)).cpu()
        assert np.array_equal(array, getattr(expected, name))
