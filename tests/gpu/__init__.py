"""Tests of graph capture and replay, streams, the allocator and synchronisation on a GPU.

The parity suite (tests/ops) also uses a GPU if there is one. Without a GPU, these tests run briefly
on CPU tensors, which checks only that the tests themselves work.
"""
