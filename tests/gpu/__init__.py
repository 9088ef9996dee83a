"""Tests that need a GPU: capture and replay, streams, the allocator, synchronisation.

Without a GPU each test runs its logic briefly on CPU tensors, to show that the test works; this
does not test CUDA. The parity suite (tests/ops/test_parity.py) includes a GPU if there is one."""
