"""The vocabulary that vLLM's token ids are from."""

from __future__ import annotations

import importlib
from typing import Any

from ngram_npu.tokenizer_digest import digest_of


def vocabulary_digest(model_config: Any) -> str | None:
    """The digest of the model's vocabulary; None if the server runs without a tokenizer. Loading it
    takes seconds."""
    if getattr(model_config, "skip_tokenizer_init", False):
        return None
    tokenizers = importlib.import_module("vllm.tokenizers")
    return digest_of(tokenizers.cached_tokenizer_from_config(model_config).get_vocab())
