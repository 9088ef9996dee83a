"""Adapters for engines: vLLM and transformers."""
