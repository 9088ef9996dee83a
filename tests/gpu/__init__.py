"""Tests that need a GPU: graph capture and replay, streams, the allocator, synchronisation. The
parity suite (tests/ops) takes a GPU in by itself.

Without a GPU each test runs its logic briefly on CPU tensors, to show that the test works; this
does not test CUDA."""
