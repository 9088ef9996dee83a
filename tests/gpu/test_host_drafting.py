"""Drafting on the host in the order of a GPU's stream, compared with the same steps at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.host_drafting import HostDrafting
from ngram_npu.index import make_index

from gpu.replay import DEVICES, no_synchronisation, synchronize, times

R, S, K = 32, 2048, 5
CONFIG = NgramConfig(
    k=K, sizes="ladder", min_draft_probability=0.1, store="live", store_tokens=1 << 17
)


def _drafting(device: str) -> HostDrafting:
    return HostDrafting(
        CONFIG,
        num_rows=R,
        capacity=S,
        max_sampled=K + 1,
        device=torch.device(device),
        lag=1,
        index=make_index(CONFIG, R, R * S, kind="numpy"),
        store=NgramStore(R, 1 << 17, visibility="live", kind="numpy"),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_late_jobs_draft_what_they_would_at_once(device: str) -> None:
    rng = np.random.default_rng(0)
    late, at_once = _drafting(device), _drafting("cpu")
    lengths = np.zeros(R, np.int64)
    found = []
    for _ in range(times(device, 2000, 50)):
        if device == "cuda" and rng.random() < 0.1:
            torch.cuda._sleep(1 << 20)  # half a millisecond, in which the host runs ahead
        for row in np.flatnonzero((lengths == 0) | (lengths > S - 8)):
            text = rng.integers(0, 30, rng.integers(1, 1500))
            lengths[row] = len(text)
            for drafting in (late, at_once):
                drafting.end(row)
                drafting.begin(row, text, scope=int(row) % 2)
        rows = rng.permutation(R)[: rng.integers(1, R + 1)].astype(np.int32)
        sampled = torch.from_numpy(rng.integers(0, 30, (len(rows), K + 2), dtype=np.int32))
        sampled[:, 0] = torch.from_numpy(rng.integers(0, K + 2, len(rows), dtype=np.int32))
        lengths[rows] += sampled[:, 0].numpy()
        on_device = sampled.pin_memory() if device == "cuda" else sampled
        with no_synchronisation(device):
            drafts = late.propose(rows, on_device.to(device, non_blocking=True))
        found.append((drafts, at_once.propose(rows, sampled)))
    synchronize(device)
    assert late.settle(1)
    for got, expected in found:
        assert [tensor.tolist() for tensor in got] == [tensor.tolist() for tensor in expected]
