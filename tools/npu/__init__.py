"""Everything that needs a machine with an NPU, in one command: ``python -m tools.npu``."""
