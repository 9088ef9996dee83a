"""CUDA kernels made wrong on purpose: the host twin has to notice each of them."""
