"""The parts that vLLM's V2 runner (0.32.0) lacks on a CPU, for these tests only: a Triton backend
"cpu", and repairs of Triton's interpreter. The ``*.dist-info`` folder beside it declares the entry
points, so every process with the parent folder on its path finds them."""
