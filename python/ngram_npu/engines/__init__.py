"""Contains the adapters for engines: vLLM and transformers."""
