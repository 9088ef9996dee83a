"""One vocabulary has one digest, whoever has loaded it; another vocabulary has another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ngram_npu.tokenizer_digest import digest_of
from ngram_npu_cli.replay import load_tokenizer

VOCAB = {"a</w>": 0, "b</w>": 1, "a": 2, "<unk>": 3, "\udc80": 4, "ü": 5}
ADDED = ["<tool>", "xy"]
WITH_ADDED = {**VOCAB, "<tool>": 6, "xy": 7}


def test_it_is_what_it_always_was() -> None:
    """Files name it."""
    assert digest_of(WITH_ADDED) == "48a7899b83fa2eb452a85173b4d6d85e"
    assert digest_of(dict(reversed(WITH_ADDED.items()))) == digest_of(WITH_ADDED)


@pytest.mark.parametrize(
    "other",
    [
        VOCAB,
        {**WITH_ADDED, "xy": 8},
        {**WITH_ADDED, "z": 7},
        {**WITH_ADDED, "a": 5, "ü": 2},
        {("axy" if t == "xy" else "" if t == "a" else t): i for t, i in WITH_ADDED.items()},
        {},
    ],
)
def test_another_vocabulary_has_another(other: dict[str, int]) -> None:
    assert len(digest_of(other)) == 32
    assert digest_of(other) != digest_of(WITH_ADDED)


def _rust(folder: Path) -> Any:
    package = pytest.importorskip("tokenizers")
    vocab = {token: i for token, i in VOCAB.items() if i != 4} | {"?": 4}
    made = package.Tokenizer(package.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.add_special_tokens(ADDED[:1])
    made.add_tokens(ADDED[1:])
    made.save(str(folder / "tokenizer.json"))
    return made


def _fast(folder: Path) -> Any:
    package = pytest.importorskip("transformers")
    return package.PreTrainedTokenizerFast(tokenizer_object=_rust(folder))


def _slow(folder: Path) -> Any:
    package = pytest.importorskip("transformers")
    vocab = {token: i for token, i in VOCAB.items() if i != 4} | {"?": 4}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version\na b\n")
    made = package.CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    made.add_special_tokens({"additional_special_tokens": ADDED[:1]})
    made.add_tokens(ADDED[1:])
    assert not made.is_fast
    return made


@pytest.mark.parametrize("make", [_rust, _fast, _slow])
def test_whoever_has_loaded_it(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    expected = {token: i for token, i in WITH_ADDED.items() if i != 4} | {"?": 4}
    assert digest_of(make(tmp_path).get_vocab()) == digest_of(expected)
    if make is _rust:
        assert load_tokenizer(str(tmp_path)).digest == digest_of(expected)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("mistral-v1", "828d2b0baf0f3cc19eff011b646f50b4"),
        ("mistral-v3", "812be1a963dfb5313eabf031d10ef1cc"),
        ("tekken", "207db1d253222307fd0b79d0cc52cff7"),
        ("bytes", ""),
    ],
)
def test_those_of_mistral_common_are_vllm_s(name: str, digest: str) -> None:
    """Taken from `get_vocab()` of vLLM's own classes for these files."""
    if name != "bytes":
        pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
        pytest.importorskip("sentencepiece", reason="needs the extra ngram-npu[replay]")
    assert load_tokenizer(name).digest == digest
