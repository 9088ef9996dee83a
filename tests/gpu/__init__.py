"""What only a GPU can show: capture and replay, streams, the allocator, synchronisation.

Each test runs its logic on CPU tensors too, eagerly and briefly, so that it is known to work where
there is no GPU; that says nothing about CUDA. The parity suite (tests/ops/test_parity.py) takes the
GPU in by itself."""
