"""Tests the replay loop with a naive replay, examples computed by hand, and faulty proposers."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cli_helpers import ScriptedProposer, Turns, make_token_request
from ngram_npu import NgramConfig, NgramProposer
from ngram_npu_cli.replay import InputError, Progress, ReplayFigures, simulate
from ngram_npu_cli.replay import simulation as simulation_module
from ops.reference import drafting

# The naive replay uses lists and replays one conversation after the other. It shares no code with
# the package. The loop follows the definition in docs/guides/replay.md.


@dataclass
class NaiveCounts:
    """Numbers of tokens and steps, and steps by number of drafted and of accepted tokens."""

    tokens: int = 0
    steps: int = 0
    drafted_lengths: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)


def draft_ngram(
    context: list[int], match_policy: str, max_len: int | None, **lookup: int
) -> list[int]:
    limit = drafting.UNLIMITED if max_len is None else max_len
    policy = int(match_policy == "latest")
    return drafting.compute_draft(context, match_policy=policy, max_len=limit, **lookup)[0]


def replay_naively(
    conversations: list[Turns], draft_context: Callable[[list[int]], list[int]]
) -> NaiveCounts:
    """Counts a replay. ``draft_context`` returns the draft for a context."""
    counts = NaiveCounts()
    for turns in conversations:
        context: list[int] = []
        for prompt, completion in turns:
            context += prompt
            remaining = list(completion)
            if remaining:
                context.append(remaining.pop(0))  # the first token comes from prefill
            while remaining:
                draft = draft_context(context)
                accepted = 0
                for drafted, recorded in zip(draft, remaining, strict=False):
                    if drafted != recorded:
                        break
                    accepted += 1
                yielded = remaining[: accepted + 1]
                del remaining[: accepted + 1]
                context += yielded
                counts.steps += 1
                counts.tokens += len(yielded)
                counts.drafted_lengths[len(draft)] += 1
                counts.accepted_lengths[accepted] += 1
    return counts


def make_random_conversations(rng: random.Random) -> list[Turns]:
    """Returns up to six conversations of three different tokens, so that repetitions and both right
    and wrong drafts are frequent."""

    def make_random_tokens() -> list[int]:
        return rng.choices(range(3), k=rng.randint(0, 14))

    return [
        [(make_random_tokens(), make_random_tokens()) for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(0, 6))
    ]


def make_random_lookup(rng: random.Random) -> dict[str, Any]:
    min_n = rng.randint(1, 3)
    return {
        "min_n": min_n,
        "max_n": rng.randint(min_n, 5),
        "k": rng.randint(1, 6),
        "match_policy": rng.choice(["earliest", "latest"]),
        "overlap": rng.random() < 0.5,
        "max_len": rng.choice([None, rng.randint(0, 40)]),
    }


def run_simulation(conversations: Any, batch_size: int, **lookup: Any) -> ReplayFigures:
    return simulate(
        "test",
        [make_token_request(turns) for turns in conversations],
        NgramProposer(NgramConfig(**lookup)),
        k=lookup["k"],
        batch_size=batch_size,
    )


def assert_counts_equal(figures: ReplayFigures, naive: NaiveCounts, k: int) -> None:
    assert (figures.num_tokens, figures.num_steps) == (naive.tokens, naive.steps)
    assert figures.accepted_length_counts == tuple(naive.accepted_lengths[n] for n in range(k + 1))
    assert figures.num_drafts == naive.steps - naive.drafted_lengths[0]
    assert figures.num_draft_tokens == sum(n * c for n, c in naive.drafted_lengths.items())
    assert figures.num_accepted_tokens == sum(n * c for n, c in naive.accepted_lengths.items())
    for j in range(k):
        drafted = sum(c for n, c in naive.drafted_lengths.items() if n > j)
        accepted = sum(c for n, c in naive.accepted_lengths.items() if n > j)
        assert figures.draft_tokens_per_pos[j] == drafted
        assert figures.accepted_tokens_per_pos[j] == accepted


def remove_times(figures: ReplayFigures) -> ReplayFigures:
    return dataclasses.replace(figures, draft_time_ns=0, num_calls=0)


@pytest.mark.parametrize("seed", range(300))
def test_simulation_equals_the_naive_replay(seed: int) -> None:
    rng = random.Random(seed)
    conversations, lookup = make_random_conversations(rng), make_random_lookup(rng)
    figures = run_simulation(conversations, rng.randint(1, 7), **lookup)
    naive = replay_naively(conversations, lambda context: draft_ngram(context, **lookup))
    assert_counts_equal(figures, naive, lookup["k"])


def test_ladder_uses_a_prompt_from_the_first_step() -> None:
    """Long prompts must be indexed completely, because missing outcome bytes count as 0."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 40, 30_000).tolist() for _ in range(4)]
    chats = [[(prompt, prompt[100:140]), ([7] * 3, prompt[50:90])] for prompt in prompts]
    options = {"sizes": "ladder", "min_draft_probability": 0.5, "k": 8}
    expected = remove_times(run_simulation(chats, 1, **options))
    assert remove_times(run_simulation(chats, 4, **options)) == expected
    proposer = NgramProposer(NgramConfig(**options), "index")
    simulate("t", [make_token_request(turns) for turns in chats], proposer, k=8, batch_size=4)
    assert proposer.index is not None
    assert proposer.index.statistics.rows_scanned_catching_up == 0


def test_waiting_conversations_reuse_rows() -> None:
    lengths = [2, 6, 3, 1, 2]  # of the completions: each needs one step less, the fourth needs none
    requests = [
        make_token_request([([100 * i], [100 * i + j for j in range(1, n + 1)])], str(i))
        for i, n in enumerate(lengths, start=1)
    ]
    proposer = ScriptedProposer(1, lambda _: [])
    figures = simulate("t", requests, proposer, k=1, batch_size=2)
    conversations_by_row = [
        {row: context[0] // 100 for row, context in zip(call.rows, call.contexts, strict=True)}
        for call in proposer.calls
    ]
    assert conversations_by_row == [{0: 1, 1: 2}, {0: 3, 1: 2}, {0: 3, 1: 2}, {0: 5, 1: 2}, {1: 2}]
    assert all(call.row_indices is None for call in proposer.calls[:-1])
    assert proposer.calls[-1].row_indices.dtype == np.int32
    assert figures.num_calls == 5
    assert figures.num_steps == 1 + 5 + 2 + 1


def test_draft_time_includes_only_the_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"ns": 0}
    monkeypatch.setattr(simulation_module.time, "perf_counter_ns", lambda: clock["ns"])
    progress: list[Progress] = []

    def draft(_: list[int]) -> list[int]:
        clock["ns"] += 7
        return []

    def add_progress(reported: Progress) -> None:
        clock["ns"] += 1000
        progress.append(reported)

    requests = [make_token_request([([1], [2, 3, 4, 5])])]
    proposer = ScriptedProposer(2, draft)
    figures = simulate("t", requests, proposer, k=2, batch_size=1, progress=add_progress)
    assert (figures.num_calls, figures.draft_time_ns) == (3, 21)
    assert figures.draft_us_per_call == figures.draft_us_per_step == pytest.approx(0.007)
    assert progress == [Progress("t", "replay", done, 3) for done in (1, 2, 3)]


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
def test_faulty_proposer_is_an_error(fault: str, message: str) -> None:
    class FaultyProposer(ScriptedProposer):
        def step(self, token_ids: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().step(token_ids, num_tokens, *args, **kwargs)
            exec(fault, {"token_ids": token_ids, "num_tokens": num_tokens, "result": result})
            return result

    requests = [make_token_request([([1], [2, 3])])] * 2  # only the first request has the fault
    with pytest.raises(InputError, match=message):
        simulate("t", requests, FaultyProposer(2, lambda _: []), k=2, batch_size=2)


def test_reset_is_called_for_rows_with_a_new_conversation() -> None:
    """Uses two rows for four conversations of several turns."""
    reset_rows: list[list[int]] = []

    class ProposerWithReset(ScriptedProposer):
        def reset(self, rows: np.ndarray) -> None:
            assert rows.dtype == np.int32
            reset_rows.append(rows.tolist())

    proposer = ProposerWithReset(5, lambda tokens: [])
    turns = [([1], [2, 3, 4]), ([5], [6, 7])]
    requests = [make_token_request(turns, name) for name in "abcd"]
    simulate("x", requests, proposer, k=5, batch_size=2)
    assert reset_rows == [[0, 1], [0, 1]]
