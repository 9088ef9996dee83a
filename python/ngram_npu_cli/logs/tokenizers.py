"""Loads tokenizers for recorded text, without a network.

`mistral-v1` (32k, the default), `mistral-v3` (33k) and `tekken` (131k) come with the package
`mistral-common`; a Hugging Face folder is read with `tokenizers` or `transformers`; `bytes` needs
no package. No tokenizer here adds special tokens.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngram_npu.errors import InputError, one_line
from ngram_npu.store import tokenizer_digest

DEFAULT_TOKENIZER = "mistral-v1"

_MISTRAL_FILES = {
    "mistral-v1": "tokenizer.model.v1",
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
    "tekken": "tekken_240911.json",
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
        encode: text -> token ids in [0, vocab_size), without special tokens.
        folder: The folder it was loaded from, which may contain a chat template.
        vocab: Returns the map from token to id that `get_vocab()` of a server's tokenizer returns;
            None if it is missing.
    """

    name: str
    source: str
    vocab_size: int | None
    encode: Callable[[str], list[int]]
    folder: Path | None = None
    vocab: Callable[[], Mapping[str, int]] | None = None

    @property
    def digest(self) -> str:
        """Digest of the vocabulary; empty if it is missing."""
        return "" if self.vocab is None else tokenizer_digest(self.vocab())


def load_tokenizer(name: str = DEFAULT_TOKENIZER) -> ReplayTokenizer:
    """Loads a tokenizer by name (one of `TOKENIZERS`), from a local Hugging Face folder, or by a
    model's name ("org/name") from the local cache of the Hugging Face hub. Nothing is downloaded.

    Raises:
        InputError: Unknown name, no tokenizer in the folder, or a package that is not installed.
    """
    if name in _MISTRAL_FILES:
        return _load_mistral(name)
    if name == "bytes":
        return ReplayTokenizer(name, "UTF-8 bytes", 256, lambda text: list(text.encode("utf-8")))
    path = Path(name)
    if path.is_file() and path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir():
        return replace(_load_folder(name, path), folder=path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        path = _find_cached_folder(name)
        return replace(_load_folder(name, path), folder=path)
    known = ", ".join(TOKENIZERS)
    raise InputError(f'tokenizer "{name}" is neither one of {known} nor an existing folder')


def _find_cached_folder(name: str) -> Path:
    """Returns a model's folder in the cache of the Hugging Face hub: the branch `main`, or else the
    newest revision that has a tokenizer."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    model = hub / f"models--{name.replace('/', '--')}"
    with suppress(OSError):
        main = model / "snapshots" / (model / "refs" / "main").read_text().strip()
        if any(main.glob("tokenizer*")):
            return main
    folders = [folder for folder in model.glob("snapshots/*") if any(folder.glob("tokenizer*"))]
    if not folders:
        raise InputError(
            f'tokenizer "{name}" is neither a folder nor in the local cache ({hub}); nothing is '
            f"downloaded here: hf download {name} --include 'tokenizer*'"
        )
    return max(folders, key=lambda folder: folder.stat().st_mtime)


def _load_mistral(name: str) -> ReplayTokenizer:
    try:
        package = importlib.import_module("mistral_common")
        if name == "tekken":
            module = importlib.import_module("mistral_common.tokens.tokenizers.tekken")
        else:
            # The SentencePiece tokenizers need this package, an optional dependency of
            # mistral-common. Without it they fail with a NameError.
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
    tokenizer: Any
    if name == "tekken":
        tokenizer = module.Tekkenizer.from_file(file)
    else:
        tokenizer = module.SentencePieceTokenizer(file)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, bos=False, eos=False)
        return ids

    def vocab() -> dict[str, int]:
        """Returns the map that vLLM makes: for a text with several ids, the lowest one."""
        return {tokenizer.id_to_piece(i): i for i in reversed(range(tokenizer.n_words))}

    source = f"mistral-common {importlib.metadata.version('mistral-common')}, {file.name}"
    return ReplayTokenizer(name, source, int(tokenizer.n_words), encode, vocab=vocab)


def _load_folder(name: str, folder: Path) -> ReplayTokenizer:
    """Prefers `tokenizers` if it is installed and sufficient, because it imports much faster."""
    file = folder / "tokenizer.json"
    missing: list[str] = []
    if file.is_file():
        try:
            return _load_fast(name, file)
        except ImportError:
            missing.append("tokenizers")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        packages = " or ".join([*missing, "transformers"])
        raise InputError(
            f'tokenizer folder "{name}" needs {packages}: pip install {packages.split()[0]}'
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers of transformers raise different types
        raise InputError(
            f'tokenizer folder "{name}" cannot be loaded: {one_line(error):.200}'
        ) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    source = f"transformers {transformers.__version__}"
    return ReplayTokenizer(name, source, len(tokenizer), encode, vocab=tokenizer.get_vocab)


def _load_fast(name: str, file: Path) -> ReplayTokenizer:
    package: Any = importlib.import_module("tokenizers")
    try:
        tokenizer = package.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust binding raises bare Exception
        raise InputError(f"{file}: cannot be loaded: {one_line(error):.200}") from error
    # A tokenizer.json may contain truncation and padding settings from training.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    source = f"tokenizers {package.__version__}, tokenizer.json"
    size = int(tokenizer.get_vocab_size())
    return ReplayTokenizer(name, source, size, encode, vocab=lambda: tokenizer.get_vocab())
