"""The rounds (turns alternate, only calls are timed, laps are reset, wrong drafts are caught) and
the figures computed from them."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench import stats
from tools.bench.measure import Contestant, Measurement, measure, waited_ns
from tools.bench.options import BenchError, Options
from tools.bench.stats import Drafts

Journal = list[tuple[str, Any]]


class Recorder(Contestant):
    """Records the harness's calls; each timed call takes ``cost`` on a fake clock."""

    def __init__(self, name: str, journal: Journal, now: list[int], cost: int) -> None:
        self.name = name
        self._journal = journal
        self._now = now
        self._cost = cost

    def activate(self) -> None:
        self._journal.append((self.name, "activate"))

    def reset(self) -> None:
        self._journal.append((self.name, "reset"))

    def arguments(self, step: int) -> tuple[Any, ...]:
        self._now[0] += 1_000_000  # making the arguments must not be timed
        return (step,)

    def function(self, step: int) -> None:
        self._journal.append((self.name, step))
        self._now[0] += self._cost


def run(rounds: int, steps: int, lap: int) -> tuple[Journal, Measurement]:
    journal: Journal = []
    now = [0]
    contestants = [Recorder("a", journal, now, 2_000), Recorder("b", journal, now, 6_000)]
    options = Options(rounds=rounds, steps=steps)
    found = measure(contestants, lap, options, clock=lambda: now[0], waited=lambda: 0)
    return journal, found


def turns(journal: Journal) -> list[tuple[str, list[int]]]:
    """Who made which steps, after the warm-up's check of drafts."""
    found: list[tuple[str, list[int]]] = []
    for name, what in journal:
        if what == "activate":
            found.append((name, []))
        elif isinstance(what, int):
            found[-1][1].append(what)
    return [turn for turn in found if turn[1]][2:]


def test_only_the_calls_are_timed_and_turns_change() -> None:
    journal, found = run(rounds=4, steps=2, lap=100)
    assert found.rounds_us == {"a": [2.0] * 4, "b": [6.0] * 4}
    assert found.worst_us == {"a": 2.0, "b": 6.0}
    names = "".join(name for name, _ in turns(journal))
    assert names == "ba" + "ab" + "ba" + "ab" + "ba"  # one round in front to warm up
    made = [steps for _, steps in turns(journal)]
    assert made[0::2] == made[1::2]
    assert made[0::2] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]


def test_a_lap_ends_with_a_reset() -> None:
    journal, found = run(rounds=3, steps=4, lap=11)
    made = [steps for _, steps in turns(journal)][0::2]
    assert made == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    for number, (name, what) in enumerate(journal):
        if what == 0:  # nobody begins anew without it
            before = [w for n, w in journal[:number] if n == name and w != "activate"]
            assert before[-1] == "reset"
    assert found.steps == 4


@pytest.mark.parametrize(("cost", "steps"), [(2_000, 50), (60_000_000, 3)])
def test_steps_are_chosen_by_duration(cost: int, steps: int) -> None:
    now = [0]
    one = Recorder("a", [], now, cost)
    found = measure([one], 1000, Options(rounds=1), clock=lambda: now[0], waited=lambda: 0)
    assert found.steps == steps


def test_disturbed_rounds_are_repeated() -> None:
    """The second and third rounds wait for a core; they are slow, and left out."""
    now, round_of = [0], [-1]

    class Turn(Contestant):
        name = "turn"

        def arguments(self, step: int) -> tuple[Any, ...]:
            return (step,)

        def function(self, step: int) -> None:
            round_of[0] = step // 2 - 1  # one round in front, of two steps each
            now[0] += 9_000 if round_of[0] in (1, 2) else 1_000

    def waited() -> int:
        return 5_000 * sum(r <= round_of[0] for r in (1, 2))

    found = measure([Turn()], 1000, Options(rounds=3, steps=1), lambda: now[0], waited)
    assert found.rounds_us["turn"] == [1.0, 1.0, 1.0]
    assert found.disturbed_rounds == 0
    always = iter(range(0, 10**12, 10**6))
    one = Recorder("a", [], now, 1_000)
    found = measure([one], 1000, Options(rounds=2, steps=1), lambda: now[0], lambda: next(always))
    assert len(found.rounds_us["a"]) == found.disturbed_rounds == 2
    assert 0 <= waited_ns() <= waited_ns()


class Drafter(Contestant):
    semantics = (2, 4, 4, "earliest")

    def __init__(self, name: str, drafts: Drafts) -> None:
        self.name = name
        self.function = lambda: drafts

    def drafts(self, result: Any) -> Drafts:
        return list(result)


def test_different_drafts_are_an_error() -> None:
    one = Drafter("one", [[1], []])
    found = measure([one, Drafter("same", [[1], []])], 20, Options(rounds=1, steps=1))
    assert found.same_drafts is True
    assert found.drafted_share == 0.5
    with pytest.raises(BenchError, match="other and one draft differently"):
        measure([one, Drafter("other", [[2], []])], 20, Options(rounds=1, steps=1))


def test_spread_and_ratio() -> None:
    """A slow machine in one round slows both: their quotient stays, the quotient of medians not."""
    assert stats.spread([10.0, *range(10)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    ours, peer = [1.0, 10.0, 2.0], [5.0, 50.0, 30.0]
    assert stats.ratios(peer, ours)["median"] == 5.0
