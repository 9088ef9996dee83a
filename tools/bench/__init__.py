"""Benchmarks: ``python -m tools.bench.NAME``. README.md describes them."""
