"""Feeds the stores of several engines with each other's text, which vLLM publishes as KV events."""
