"""The replay loop: compared with a naive one and with examples by hand; wrong proposers."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cli_helpers import ScriptedProposer, Turns, token_request
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu_cli.replay import InputError, ReplayFigures, simulate
from ngram_npu_cli.replay import simulation as simulation_module
from ops.reference import drafting

# A second, deliberately naive replay to compare with: lists, one conversation at a time, no batch.
# It shares no code with the package. The loop follows the definition in docs/guides/replay.md.


@dataclass
class NaiveCounts:
    """Tokens and steps; steps by number of drafted and of accepted tokens."""

    tokens: int = 0
    steps: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


def draft_ngram(
    context: list[int], match_policy: str, max_len: int | None, **lookup: int
) -> list[int]:
    limit = drafting.UNLIMITED if max_len is None else max_len
    policy = int(match_policy == "latest")
    return drafting.draft_for(context, match_policy=policy, max_len=limit, **lookup)[0]


def naive_replay(
    conversations: list[Turns], draft_of: Callable[[list[int]], list[int]]
) -> NaiveCounts:
    """Counts a replay. ``draft_of`` returns the draft for a context."""
    counts = NaiveCounts()
    for turns in conversations:
        context: list[int] = []
        for prompt, completion in turns:
            context += prompt
            todo = list(completion)
            if todo:
                context.append(todo.pop(0))  # the first token comes from prefill
            while todo:
                draft = draft_of(context)
                accepted = 0
                for drafted, recorded in zip(draft, todo, strict=False):
                    if drafted != recorded:
                        break
                    accepted += 1
                yielded = todo[: accepted + 1]
                del todo[: accepted + 1]
                context += yielded
                counts.steps += 1
                counts.tokens += len(yielded)
                counts.drafted[len(draft)] += 1
                counts.accepted[accepted] += 1
    return counts


def random_conversations(rng: random.Random) -> list[Turns]:
    """Up to six conversations of three different tokens, so that repetitions and right and wrong
    drafts are frequent."""

    def random_tokens() -> list[int]:
        return rng.choices(range(3), k=rng.randint(0, 14))

    return [
        [(random_tokens(), random_tokens()) for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(0, 6))
    ]


def random_lookup(rng: random.Random) -> dict[str, Any]:
    min_n = rng.randint(1, 3)
    return {
        "min_n": min_n,
        "max_n": rng.randint(min_n, 5),
        "k": rng.randint(1, 6),
        "match_policy": rng.choice(["earliest", "latest"]),
        "overlap": rng.random() < 0.5,
        "max_len": rng.choice([None, rng.randint(0, 40)]),
    }


def run(turns_of_all: Any, batch_size: int, **lookup: Any) -> ReplayFigures:
    return simulate(
        "test",
        [token_request(turns) for turns in turns_of_all],
        NgramProposer(NgramConfig(**lookup)),
        k=lookup["k"],
        batch_size=batch_size,
    )


def assert_equal(figures: ReplayFigures, naive: NaiveCounts, k: int) -> None:
    assert (figures.num_tokens, figures.num_steps) == (naive.tokens, naive.steps)
    assert figures.accepted_length_counts == tuple(naive.accepted[n] for n in range(k + 1))
    assert figures.num_drafts == naive.steps - naive.drafted[0]
    assert figures.num_draft_tokens == sum(n * c for n, c in naive.drafted.items())
    assert figures.num_accepted_tokens == sum(n * c for n, c in naive.accepted.items())
    for j in range(k):
        drafted = sum(c for n, c in naive.drafted.items() if n > j)
        accepted = sum(c for n, c in naive.accepted.items() if n > j)
        assert figures.draft_tokens_per_pos[j] == drafted
        assert figures.accepted_tokens_per_pos[j] == accepted


def without_time(figures: ReplayFigures) -> ReplayFigures:
    return dataclasses.replace(figures, draft_time_ns=0, num_calls=0)


@pytest.mark.parametrize("seed", range(300))
def test_simulation_equals_the_naive_replay(seed: int) -> None:
    rng = random.Random(seed)
    turns_of_all, lookup = random_conversations(rng), random_lookup(rng)
    figures = run(turns_of_all, rng.randint(1, 7), **lookup)
    naive = naive_replay(turns_of_all, lambda context: draft_ngram(context, **lookup))
    assert_equal(figures, naive, lookup["k"])


def test_ladder_uses_a_prompt_from_the_first_step() -> None:
    """Long prompts must be indexed completely, because missing outcome bytes count as 0."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 40, 30_000).tolist() for _ in range(4)]
    chats = [[(prompt, prompt[100:140]), ([7] * 3, prompt[50:90])] for prompt in prompts]
    options = {"sizes": "ladder", "min_draft_probability": 0.5, "k": 8}
    alone = without_time(run(chats, 1, **options))
    assert without_time(run(chats, 4, **options)) == alone
    proposer = NgramProposer(NgramConfig(**options), "index")
    simulate("t", [token_request(turns) for turns in chats], proposer, k=8, batch_size=4)
    assert proposer.index is not None
    assert proposer.index.statistics.rows_scanned_catching_up == 0


def test_waiting_conversations_reuse_rows() -> None:
    lengths = [2, 6, 3, 1, 2]  # of the completions; each takes one step less, the fourth none
    requests = [
        token_request([([100 * i], [100 * i + j for j in range(1, n + 1)])], str(i))
        for i, n in enumerate(lengths, start=1)
    ]
    proposer = ScriptedProposer(1, lambda _: [])
    figures = simulate("t", requests, proposer, k=1, batch_size=2)
    served = [
        {row: context[0] // 100 for row, context in zip(call.rows, call.contexts, strict=True)}
        for call in proposer.calls
    ]
    assert served == [{0: 1, 1: 2}, {0: 3, 1: 2}, {0: 3, 1: 2}, {0: 5, 1: 2}, {1: 2}]
    assert all(call.row_indices is None for call in proposer.calls[:-1])
    assert proposer.calls[-1].row_indices.dtype == np.int32
    assert figures.num_calls == 5
    assert figures.num_steps == 1 + 5 + 2 + 1


def test_draft_time_excludes_everything_but_the_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"ns": 0}
    monkeypatch.setattr(simulation_module.time, "perf_counter_ns", lambda: clock["ns"])
    seen: list[tuple[int, int]] = []

    def draft(_: list[int]) -> list[int]:
        clock["ns"] += 7
        return []

    def show(done: int, total: int) -> None:
        clock["ns"] += 1000
        seen.append((done, total))

    requests = [token_request([([1], [2, 3, 4, 5])])]
    proposer = ScriptedProposer(2, draft)
    figures = simulate("t", requests, proposer, k=2, batch_size=1, progress=show)
    assert (figures.num_calls, figures.draft_time_ns) == (3, 21)
    assert figures.draft_us_per_call == figures.draft_us_per_step == pytest.approx(0.007)
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("num_tokens[0] += 1", "num_tokens"),
        ("token_ids[0, 0] += 1", "token_ids"),
        ("result.draft_token_ids = result.draft_token_ids[:, :1]", "shape"),
        ("result.num_draft_tokens[0] = 3", "count"),
        ("result.num_draft_tokens[0] = -1", "count"),
    ],
)
def test_wrong_proposer_is_an_error(fault: str, message: str) -> None:
    class Broken(ScriptedProposer):
        def step(self, token_ids: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().step(token_ids, num_tokens, *args, **kwargs)
            exec(fault, {"token_ids": token_ids, "num_tokens": num_tokens, "result": result})
            return result

    requests = [token_request([([1], [2, 3])])] * 2  # only the first one has the fault
    with pytest.raises(InputError, match=message):
        simulate("t", requests, Broken(2, lambda _: []), k=2, batch_size=2)


def test_reset_is_called_for_rows_with_a_new_conversation() -> None:
    """Uses two rows for four conversations of several turns."""
    reset_rows: list[list[int]] = []

    class Stateful(ScriptedProposer):
        def reset(self, rows: np.ndarray) -> None:
            assert rows.dtype == np.int32
            reset_rows.append(rows.tolist())

    proposer = Stateful(5, lambda tokens: [])
    turns = [([1], [2, 3, 4]), ([5], [6, 7])]
    requests = [token_request(turns, name) for name in "abcd"]
    simulate("x", requests, proposer, k=5, batch_size=2)
    assert reset_rows == [[0, 1], [0, 1]]
