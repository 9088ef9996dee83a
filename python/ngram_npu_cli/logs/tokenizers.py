"""Loads tokenizers for recorded text from local files.

`mistral-v1` (32k, the default) and `mistral-v3` (33k) come with the package `mistral-common`; a
Hugging Face folder is read with `tokenizers`; `bytes` needs no package. No tokenizer here adds
special tokens.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ngram_npu.errors import InputError, import_optional, to_one_line
from ngram_npu.store import tokenizer_digest

DEFAULT_TOKENIZER = "mistral-v1"

_MISTRAL_FILES = {
    "mistral-v1": "tokenizer.model.v1",
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
}

TOKENIZERS = (*_MISTRAL_FILES, "bytes")
"""The names that `load_tokenizer` accepts, besides folders."""


@dataclass(frozen=True)
class ReplayTokenizer:
    """A function from text to token ids, and its origin.

    Attributes:
        name: Argument of `load_tokenizer`.
        source: File or package and its version, for reports.
        vocab_size: Number of token ids, or None if unknown.
        encode: Function from text to token ids in [0, vocab_size), without special tokens.
        folder: The folder of the tokenizer, which may contain a chat template.
        vocab: Function that returns the map from token to id that a server's tokenizer returns for
            `get_vocab()`; None if the map is not known.
    """

    name: str
    source: str
    vocab_size: int | None
    encode: Callable[[str], list[int]]
    folder: Path | None = None
    vocab: Callable[[], Mapping[str, int]] | None = None

    @property
    def digest(self) -> str:
        """Digest of the vocabulary; empty if it is not known."""
        return "" if self.vocab is None else tokenizer_digest(self.vocab())


def load_tokenizer(name: str = DEFAULT_TOKENIZER) -> ReplayTokenizer:
    """Loads a tokenizer by name (one of `TOKENIZERS`), from a local Hugging Face folder, or by a
    model's name ("org/name") from the local cache of the Hugging Face hub. Nothing is downloaded.

    Raises:
        InputError: The name is unknown, the folder has no tokenizer.json, or a package is not
            installed.
    """
    if name in _MISTRAL_FILES:
        return _load_mistral(name)
    if name == "bytes":
        return ReplayTokenizer(name, "UTF-8 bytes", 256, lambda text: list(text.encode("utf-8")))
    path = Path(name)
    if path.is_file() and path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir():
        return _load_folder(name, path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _load_folder(name, _find_cached_folder(name))
    known = ", ".join(TOKENIZERS)
    raise InputError(f'tokenizer "{name}" is neither one of {known} nor an existing folder')


def _find_cached_folder(name: str) -> Path:
    """Returns the folder of a model's branch `main` in the local cache of the Hugging Face hub."""
    hub = import_optional("huggingface_hub", f"tokenizer {name}", "replay")
    file = None
    with suppress(ValueError):  # a name that no model can have
        file = hub.try_to_load_from_cache(name, "tokenizer.json")
    if not isinstance(file, str):
        raise InputError(
            f'tokenizer "{name}" is neither a folder nor in the local cache '
            f"({hub.constants.HF_HUB_CACHE}); nothing is downloaded here: hf download {name} "
            "--include 'tokenizer*'"
        )
    return Path(file).parent


def _load_mistral(name: str) -> ReplayTokenizer:
    try:
        package = importlib.import_module("mistral_common")
        # An optional dependency of mistral-common, without which it fails with a NameError.
        importlib.import_module("sentencepiece")
        module = importlib.import_module("mistral_common.tokens.tokenizers.sentencepiece")
    except ImportError as error:
        raise InputError(
            f'tokenizer "{name}" needs the package {error.name or "mistral_common"}: '
            'pip install mistral-common sentencepiece (the extra "replay"); or choose --tokenizer '
            "FOLDER with your model's tokenizer.json; --tokenizer bytes needs no package, but its "
            "figures are not comparable with others"
        ) from error
    file = Path(str(package.__file__)).parent / "data" / _MISTRAL_FILES[name]
    if not file.is_file():
        raise InputError(f'tokenizer "{name}": {file} does not exist; update mistral-common')
    tokenizer = module.SentencePieceTokenizer(file)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, bos=False, eos=False)
        return ids

    def vocab() -> dict[str, int]:
        """Returns the map that vLLM makes. A text with several ids has the lowest of these ids."""
        return {tokenizer.id_to_piece(i): i for i in reversed(range(tokenizer.n_words))}

    source = f"mistral-common {importlib.metadata.version('mistral-common')}, {file.name}"
    return ReplayTokenizer(name, source, int(tokenizer.n_words), encode, vocab=vocab)


def _load_folder(name: str, folder: Path) -> ReplayTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{folder}: expected a tokenizer.json; transformers writes it for other tokenizers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    package = import_optional("tokenizers", f"tokenizer {name}", "replay")
    try:
        tokenizer = package.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust binding raises bare Exception
        raise InputError(f"{file}: cannot be loaded: {to_one_line(error):.200}") from error
    # A tokenizer.json may contain truncation and padding settings from training.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    source = f"tokenizers {package.__version__}, tokenizer.json"
    size = int(tokenizer.get_vocab_size())
    return ReplayTokenizer(name, source, size, encode, folder, lambda: tokenizer.get_vocab())
