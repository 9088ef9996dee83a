"""The example runner, on a model trained here."""
