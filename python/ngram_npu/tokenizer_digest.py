"""Names a vocabulary, so that token ids in a file are not taken for those of another tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["digest_of"]

_DIGEST_BYTES = 16


def digest_of(vocab: Mapping[str, int]) -> str:
    """32 hex characters that name the vocabulary of a tokenizer: BLAKE2b of its pairs of id and
    token, ordered by id, added tokens included.

    The digest is the same for a ``tokenizers.Tokenizer``, for a slow or a fast tokenizer of
    transformers and for vLLM's, which all have ``get_vocab()``, if they have the same tokens. It
    does not cover what else makes ids of a text: merges, normalizer, pre-tokenizer, chat template,
    and which tokens are special. So the ids in a file mean the same text, but the same text may
    have been split in another way, which costs accepted drafts and nothing else.

    Args:
        vocab: token to id, as ``get_vocab()`` returns it.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for number, token in sorted((number, token) for token, number in vocab.items()):
        # The length keeps two tokens from being taken for one.
        raw = token.encode("utf-8", "surrogatepass")
        digest.update(number.to_bytes(8, "little") + len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
