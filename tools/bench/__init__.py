"""The benchmark: ``python -m tools.bench OP``. README.md describes the method."""
