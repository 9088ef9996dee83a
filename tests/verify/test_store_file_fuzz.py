"""The fuzz of stores' files: what it must notice, and a second of it."""

from __future__ import annotations

from collections import Counter

import pytest
from ngram_npu import NgramStore, store_file
from ngram_npu.memory import Int32Array

from tools.verify.store_file_fuzz import EXPECTED, problems, run


def test_a_second_of_it() -> None:
    reached, finding = run(1, seed=1)
    assert finding is None
    assert reached["accepted"] > 0
    assert reached["refused by integrity"] > 0


def test_a_load_without_the_integrity_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = NgramStore.check_integrity

    def load(path: object, **options: object) -> NgramStore:
        monkeypatch.setattr(NgramStore, "check_integrity", lambda _: None)
        try:
            return whole_load(path, **options)
        finally:
            monkeypatch.setattr(NgramStore, "check_integrity", check)

    whole_load = NgramStore.load
    monkeypatch.setattr(NgramStore, "load", load)
    _, finding = run(20, seed=1)
    assert finding is not None
    assert "IntegrityError" in finding


def test_a_checksum_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_contents(file: object, name: str, head: bytes, contents: list[Int32Array]) -> None:
        for part in contents:
            file.readinto(part.data)

    monkeypatch.setattr(store_file, "read_contents", read_contents)
    _, finding = run(20, seed=1)
    assert finding is not None
    assert "a file that is not as it was written was accepted" in finding


def test_a_finding_ends_with_its_seed() -> None:
    assert problems(Counter(), "--seed 7: KeyError: 1") == ["--seed 7: KeyError: 1"]


@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_never_reached_is_a_problem(name: str) -> None:
    reached = Counter(dict.fromkeys(EXPECTED, 1))
    assert problems(reached, None) == []
    del reached[name]
    assert problems(reached, None) == [f"{name}: never reached"]
