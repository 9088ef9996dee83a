"""What vLLM's V2 runner (0.32.0) lacks on a CPU, for these tests only: a Triton backend called
"cpu", and repairs of Triton's interpreter. A folder beside it (``*.dist-info``) makes the entry
points known, so that every process with the folder above on its path has them."""
