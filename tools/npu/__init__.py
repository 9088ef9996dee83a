"""Everything that a machine with an NPU is needed for, in one command: ``python -m tools.npu``."""
