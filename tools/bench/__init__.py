"""The bench harness: ``python -m tools.bench OP``. What it does and why: README.md beside this."""
