"""What is made of a fuzz run's output; the fuzz of stores' files: what it must notice, and a second
of it."""

from __future__ import annotations

from collections import Counter

import pytest
from ngram_npu import NgramStore, store_file

from tools.verify import store_file_fuzz
from tools.verify.fuzz import problems, summary

OUTPUT = """\
#2  INITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 40Mb
#70 DONE   cov: 711 ft: 2310 corp: 90/9Kb lim: 400 exec/s: 35 rss: 90Mb
Done 70 runs in 2 second(s)
stat::number_of_executed_units: 70
reached page splits: 12
reached slots given up: 3
"""


def test_a_run_in_numbers() -> None:
    assert summary(OUTPUT) == {
        "executions": 70,
        "coverage": {"edges": 711, "features": 2310},
        "reached": {"page splits": 12, "slots given up": 3},
    }
    assert problems(0, OUTPUT) == []


def test_what_a_fuzzer_never_reached_is_a_problem() -> None:
    assert problems(0, OUTPUT.replace("splits: 12", "splits: 0")) == ["page splits: never reached"]


def test_a_finding_is_a_problem() -> None:
    assert len(problems(77, "fuzz_index: num_tokens\n")) == 1


@pytest.mark.parametrize("line", OUTPUT.splitlines()[3:])
def test_output_without_counts_is_refused(line: str) -> None:
    kept = [other for other in OUTPUT.splitlines() if other.split(" ")[0] != line.split(" ")[0]]
    with pytest.raises(ValueError, match="expected libFuzzer's final statistics"):
        problems(0, "\n".join(kept))


def test_a_second_of_it() -> None:
    reached, finding = store_file_fuzz.run(1, seed=1)
    assert finding is None
    assert reached["accepted"] > 0
    assert reached["refused by integrity"] > 0


def test_text_that_gets_another_scope_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = NgramStore.merge

    def mixed(self: NgramStore, other: NgramStore) -> None:
        merge(self, other)
        for scope in list(other.scopes)[:1]:
            self.warm([range(900)], scope=scope)

    monkeypatch.setattr(NgramStore, "merge", mixed)
    _, finding = store_file_fuzz.run(20, seed=1)
    assert finding is not None
    assert "merge: a scope was told what it does not hold" in finding


def test_a_checksum_that_is_not_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same(bytes):
        def __ne__(self, other: object) -> bool:
            return False

    class Unread:
        def __init__(self, *_: object, **__: object) -> None: ...
        def update(self, _: object) -> None: ...
        def digest(self) -> bytes:
            return Same(32)

    saved = list(store_file_fuzz.saved_stores())
    monkeypatch.setattr(store_file_fuzz, "saved_stores", lambda: saved)
    monkeypatch.setattr(store_file.hashlib, "blake2b", Unread)
    _, finding = store_file_fuzz.run(20, seed=1)
    assert finding is not None
    assert "a file that is not as it was written was accepted" in finding


def test_a_finding_ends_with_its_seed() -> None:
    assert store_file_fuzz.problems(Counter(), "--seed 7: KeyError: 1") == ["--seed 7: KeyError: 1"]


@pytest.mark.parametrize("name", store_file_fuzz.EXPECTED)
def test_what_was_never_reached_is_a_problem(name: str) -> None:
    reached = Counter(dict.fromkeys(store_file_fuzz.EXPECTED, 1))
    assert store_file_fuzz.problems(reached, None) == []
    del reached[name]
    assert store_file_fuzz.problems(reached, None) == [f"{name}: never reached"]
