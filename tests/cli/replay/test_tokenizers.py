"""Tokenizers: those of mistral-common, folders, the local cache, and none that is downloaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ngram_npu_cli.replay import InputError, ReplayOptions, format_table, load_tokenizer, replay

Write = Callable[..., Path]


def test_bytes() -> None:
    assert load_tokenizer("bytes").encode("aé") == [97, 0xC3, 0xA9]


@pytest.mark.parametrize(
    ("name", "size"), [("mistral-v1", 32000), ("mistral-v3", 32768), ("tekken", 131072)]
)
def test_bundled_tokenizers_add_no_special_tokens(name: str, size: int) -> None:
    pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
    pytest.importorskip("sentencepiece", reason="needs the extra ngram-npu[replay]")
    tokenizer = load_tokenizer(name)
    assert tokenizer.vocab_size == size
    assert tokenizer.encode("") == []
    ids = tokenizer.encode("one two one two")
    assert len(ids) == 4
    assert ids[1] == ids[3]
    assert min(ids) > 2  # 0, 1 and 2 are unknown, begin and end in all three


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("mistral-v1", "mistral_common"),
        ("mistral-v1", "sentencepiece"),
        ("tekken", "mistral_common"),
    ],
)
def test_missing_package_of_a_bundled_tokenizer(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"needs the package .*pip install mistral-common"):
        load_tokenizer(name)


def test_hugging_face_folder(tmp_path: Path) -> None:
    """Truncation and padding of its training must not cut the recordings, or fill them up."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("[BOS]", "a", "b"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 0)]
    )
    made.enable_truncation(2)
    made.enable_padding(length=5)
    made.save(str(tmp_path / "tokenizer.json"))
    assert made.encode("b a b").ids == [0, 2, 0, 0, 0]
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        tokenizer = load_tokenizer(name)
        assert (tokenizer.name, tokenizer.vocab_size) == (name, 3)
        assert tokenizer.encode("b a b") == [2, 1, 2]


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_a_models_name_is_looked_up_in_the_local_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    model = tmp_path / below.get(variable, ".cache/huggingface/hub") / "models--org--Name-8B"
    with pytest.raises(InputError, match=r'"org/Name-8B" is neither .* hf download org/Name-8B'):
        load_tokenizer("org/Name-8B")
    for number, revision in enumerate(("old", "new", "weights")):
        folder = model / "snapshots" / revision
        folder.mkdir(parents=True)
        if revision != "weights":
            words = {str(n): n for n in range(number + 1)}
            made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
            made.save(str(folder / "tokenizer.json"))
        os.utime(folder, (number, number))
    tokenizer = load_tokenizer("org/Name-8B")
    assert (tokenizer.vocab_size, tokenizer.folder) == (2, model / "snapshots" / "new")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("old")
    assert load_tokenizer("org/Name-8B").vocab_size == 1
    (model / "refs" / "main").write_text("weights")
    assert load_tokenizer("org/Name-8B").vocab_size == 2


def test_a_tokenizer_that_nobody_chose_is_warned_of(write_jsonl: Write) -> None:
    pytest.importorskip("mistral_common", reason="needs the extra ngram-npu[replay]")
    pytest.importorskip("sentencepiece", reason="needs the extra ngram-npu[replay]")
    path = write_jsonl({"prompt": "one two", "completion": "one two three"})
    assert "WARNING: this is not your model's tokenizer" in format_table(replay([path]))
    for options in (ReplayOptions(tokenizer="mistral-v1"), ReplayOptions(tokenizer="tekken")):
        assert "WARNING" not in format_table(replay([path], options))


def test_hugging_face_folder_without_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="needs transformers: pip install transformers"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="needs tokenizers or transformers: pip install"):
        load_tokenizer(str(tmp_path))


def test_no_code_of_a_tokenizer_folder_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor does `transformers` ask on a terminal, as it does when the option is not given."""
    said = {}

    def from_pretrained(folder: str, **options: Any) -> Any:
        said.update(options)
        raise ValueError("seen")

    stand_in = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    with pytest.raises(InputError, match="seen"):
        load_tokenizer(str(tmp_path))
    assert said == {"local_files_only": True, "trust_remote_code": False}
