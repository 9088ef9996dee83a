"""CUDA kernels with deliberate faults: the host twin has to notice each of them."""
