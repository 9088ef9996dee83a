"""Reads logs of language models as conversations. docs/guides/logs.md describes what is read."""
