"""Tests that need a GPU: graph capture and replay, streams, the allocator, synchronisation.

The parity suite (tests/ops) uses a GPU by itself. Without a GPU, each test runs briefly on CPU
tensors. This tests the test itself, not CUDA.
"""
