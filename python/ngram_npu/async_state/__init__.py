"""Drafts for runners whose scheduler never waits for the device (docs/guides/own-runner.md)."""

from ngram_npu.async_state.batch import (
    Admission,
    AsyncConfig,
    Batch,
    KVGroup,
    MergeConfig,
    NewBlocks,
)
from ngram_npu.async_state.device import CpuDevice, Device, StreamDevice
from ngram_npu.async_state.results import (
    HostDrafts,
    NeuralDrafter,
    NeuralDrafts,
    PaddedDrafterBatch,
    RaggedDrafterBatch,
    Reconciled,
    StepInputs,
    StepOutputs,
)
from ngram_npu.async_state.state import AsyncSpecState
from ngram_npu.async_state.verify import verify_greedy

__all__ = [
    "Admission",
    "AsyncConfig",
    "AsyncSpecState",
    "Batch",
    "CpuDevice",
    "Device",
    "HostDrafts",
    "KVGroup",
    "MergeConfig",
    "NeuralDrafter",
    "NeuralDrafts",
    "NewBlocks",
    "PaddedDrafterBatch",
    "RaggedDrafterBatch",
    "Reconciled",
    "StepInputs",
    "StepOutputs",
    "StreamDevice",
    "verify_greedy",
]
