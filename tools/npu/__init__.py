"""The command for a machine with an NPU: ``python -m tools.npu`` builds, tests and measures."""
