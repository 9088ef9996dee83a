"""Tests tokenizers: mistral-common, folders, the local cache, and digests of vocabularies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ngram_npu.store import tokenizer_digest
from ngram_npu_cli.replay import InputError, ReplayOptions, format_table, load_tokenizer, replay

Writer = Callable[..., Path]


@pytest.fixture
def _require_mistral() -> None:
    for package in ("mistral_common", "sentencepiece"):
        pytest.importorskip(package, reason="needs the extra ngram-npu[replay]")


@pytest.mark.usefixtures("_require_mistral")
@pytest.mark.parametrize(
    ("name", "size", "digest"),
    [
        ("mistral-v1", 32000, "828d2b0baf0f3cc19eff011b646f50b4"),
        ("mistral-v3", 32768, "812be1a963dfb5313eabf031d10ef1cc"),
    ],
)
def test_bundled_tokenizers_add_no_special_tokens(name: str, size: int, digest: str) -> None:
    """The digests are those of `get_vocab()` of vLLM's classes for these files."""
    tokenizer = load_tokenizer(name)
    assert (tokenizer.vocab_size, tokenizer.digest) == (size, digest)
    assert tokenizer.encode("") == []
    ids = tokenizer.encode("one two one two")
    assert len(ids) == 4
    assert ids[1] == ids[3]
    assert min(ids) > 2  # in both, 0 is the unknown token, 1 begins and 2 ends a text
    byte_tokenizer = load_tokenizer("bytes")
    assert (byte_tokenizer.encode("aé"), byte_tokenizer.digest) == ([97, 0xC3, 0xA9], "")


@pytest.mark.usefixtures("_require_mistral")
@pytest.mark.parametrize("package", ["sentencepiece", "mistral_common"])
def test_bundled_tokenizer_without_its_package_names_the_package(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"needs the package .*pip install mistral-common"):
        load_tokenizer("mistral-v1")


def test_hugging_face_folder_ignores_truncation_and_padding(tmp_path: Path) -> None:
    """Truncation and padding settings from training must not change recorded texts."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("[BOS]", "a", "b"))}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 0)]
    )
    model.enable_truncation(2)
    model.enable_padding(length=5)
    model.save(str(tmp_path / "tokenizer.json"))
    assert model.encode("b a b").ids == [0, 2, 0, 0, 0]
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        tokenizer = load_tokenizer(name)
        assert (tokenizer.name, tokenizer.vocab_size) == (name, 3)
        assert tokenizer.encode("b a b") == [2, 1, 2]
        assert tokenizer.digest == tokenizer_digest(words)


def test_model_name_is_resolved_in_the_local_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("org/Name-8B", "--/.."):
        with pytest.raises(InputError, match=rf'"{name}" is neither .* hf download {name} '):
            load_tokenizer(name)
    model = tmp_path / "models--org--Name-8B"
    for revision in ("old", "new"):
        folder = model / "snapshots" / revision
        folder.mkdir(parents=True)
        saved = tokenizers.Tokenizer(tokenizers.models.WordLevel({revision: 0}, unk_token="0"))
        saved.save(str(folder / "tokenizer.json"))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("old")
    tokenizer = load_tokenizer("org/Name-8B")
    assert (tokenizer.digest, tokenizer.folder) == (
        tokenizer_digest({"old": 0}),
        model / "snapshots" / "old",
    )


@pytest.mark.usefixtures("_require_mistral")
def test_default_tokenizer_is_reported_with_a_warning(write_jsonl: Writer) -> None:
    path = write_jsonl({"prompt": "one two", "completion": "one two three"})
    assert "WARNING: this is not your model's tokenizer" in format_table(replay([path]))
    assert "WARNING" not in format_table(replay([path], ReplayOptions(tokenizer="mistral-v1")))


def test_folder_without_tokenizer_or_package_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"expected a tokenizer.json; transformers writes it"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json: cannot be loaded: "):
        load_tokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="needs tokenizers: pip install"):
        load_tokenizer(str(tmp_path))


def test_digest_depends_on_the_vocabulary_only() -> None:
    tokens = ("a</w>", "b</w>", "a", "<unk>", "\udc80", "ü", "<tool>", "xy")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Store files contain the digest, so it must not change.
    assert tokenizer_digest(vocabulary) == "48a7899b83fa2eb452a85173b4d6d85e"
    assert tokenizer_digest(dict(reversed(vocabulary.items()))) == tokenizer_digest(vocabulary)
