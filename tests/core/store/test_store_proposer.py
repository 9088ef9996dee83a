"""NgramProposer with a store: its drafts, which equal those of the two operators in sequence."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import _C, NgramConfig, NgramProposer, NgramStore, scope_of
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu.drafting import Drafting, Drafts, make_store
from ngram_npu.index import make_index

TEXT = list(range(100, 140))
LADDER = NgramConfig(sizes="ladder", min_draft_probability=0.177)
CONFIG = NgramConfig(sizes="ladder", min_draft_probability=0.177, store="live", store_tokens=16384)
CHEAP = dataclasses.replace(CONFIG, store_costs=np.ones((16, 56), np.uint8))  # type: ignore[arg-type]
"""Costs so low that a draft ends only where its text does."""
WORDS = np.random.default_rng(6).integers(0, 50, (12, 6))


def rows(kind: Callable[[Any], Any], count: int = 4) -> tuple[Any, Any]:
    return kind(np.full((count, 3000), -7, np.int32)), kind(np.zeros(count, np.int32))


def begin(tokens: Any, lengths: Any, row: int, prompt: list[int]) -> None:
    for at, token in enumerate(prompt):
        tokens[row, at] = token
    lengths[row] = len(prompt)


def said(kind: Callable[[Any], Any], lists: list[list[int]], width: int = 9) -> Any:
    return kind(np.array([[*s, *[-1] * (width - len(s))] for s in lists], np.int32))


KINDS = pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def texts(rng: np.random.Generator) -> list[int]:
    """A few words, so that all requests share phrases."""
    return [int(t) for word in rng.integers(0, 12, 2) for t in WORDS[word]][: int(rng.integers(9))]


@KINDS
@pytest.mark.parametrize("by_slots", [False, True])
def test_a_step_is_the_operators(kind: Callable[[Any], Any], by_slots: bool) -> None:
    """Rows that change hands and scopes, with and without slots of their own."""
    proposer: Any = NgramProposer(CONFIG, num_slots=8)
    twin = NgramProposer(LADDER, num_slots=8)
    store = NgramStore(8, 16384)
    (tokens, lengths), (twin_tokens, twin_lengths) = rows(kind), rows(np.asarray)
    rng = np.random.default_rng(1)
    changed = 0
    for step in range(200):
        if step % 9 == 0:
            for at in ((tokens, lengths), (twin_tokens, twin_lengths)):
                begin(*at, step % 4, [1, 2, step])
        order = rng.permutation(4).astype(np.int32)
        requests: dict[str, Any] = {"row_indices": order}
        if by_slots:
            requests["slot_indices"] = (order + 3).astype(np.int64)
        scopes = (order % 2).astype(np.int64)
        words = [texts(rng) for _ in range(4)]
        given = {name: kind(value) for name, value in requests.items()}
        given |= {"scopes": kind(scopes), "draft_costs": kind(np.zeros((4, 8), np.uint8))}
        found = proposer.step(tokens, lengths, said(kind, words), **given)
        costs = np.full((4, 8), 255, np.uint8)
        own = twin.step(
            twin_tokens, twin_lengths, said(np.asarray, words), draft_costs=costs, **requests
        )
        before = own.draft_token_ids.copy()
        _C.ngram_store_step_(
            twin_tokens,
            twin_lengths,
            own.num_sampled,
            store.tensor,
            scopes=scopes,
            draft_token_ids=own.draft_token_ids,
            num_draft_tokens=own.num_draft_tokens,
            match_len=own.match_len,
            draft_costs=costs,
            costs=default_store_costs(),
            cost_limit=40,
            **requests,
        )
        changed += (before != own.draft_token_ids).any()
        for a, b in zip((*found, given["draft_costs"]), (*own, costs), strict=True):
            assert np.array_equal(np.asarray(a), b)
    assert changed > 50, "the store matters"
    assert isinstance(proposer.store.tensor, type(tokens))
    assert np.array_equal(np.asarray(proposer.store.tensor), store.tensor)


ROW_SAMPLES: dict[str, list[int] | None] = {
    "all": None,
    "fewer than rows": None,
    "permuted": [2, 0, 3, 1],
    "negative": [3, -1, 0, -9],
    "past the end": [4, 2, 9, 1],
    "repeated": [1, 1, 3, 1],
}
"""By name, `row_indices` of a batch over four rows."""


def new_drafting(kind: Callable[[Any], Any], config: NgramConfig = CONFIG) -> Drafting:
    name: Any = "numpy" if kind is np.asarray else "torch"
    index, store = make_index(config, 4, 12_000, kind=name), make_store(config, 4, kind=name)
    return Drafting(config, kind=name, index=index, store=store)


def new_proposer(kind: Callable[[Any], Any]) -> NgramProposer:
    return NgramProposer(CONFIG, num_slots=4)


@KINDS
@pytest.mark.parametrize("made", [new_proposer, new_drafting])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", ROW_SAMPLES)
def test_step_without_advance_equals_step_with_advance(
    kind: Callable[[Any], Any], made: Callable[[Any], Any], name: str, dtype: type
) -> None:
    """Drafts, rows and store, for any row indices and lengths; only the lengths stay as they are.
    Behind the rows' ends is text of other requests, which must not enter the store."""
    ours, twin = made(kind), made(kind)
    states = [rows(kind), rows(kind)]
    for tokens, _ in states:
        tokens[:] = kind(10_000 + np.arange(12_000, dtype=np.int32).reshape(4, 3000))
    rng = np.random.default_rng(5)
    indices = ROW_SAMPLES[name]
    batch = 2 if name == "fewer than rows" else 4
    given: dict[str, Any] = {"scopes": kind(np.array([1, 2, 3, 4])[:batch])}
    if indices is not None:
        given["row_indices"] = kind(np.array(indices, dtype))
    for step in range(60):
        for tokens, lengths in states:
            if step % 20 == 7:  # lengths that no row has
                lengths[3], lengths[1] = -2, 3001
            if step % 20 == 9:
                lengths[3], lengths[1] = 0, 0
            if step == 40:
                tokens[0, :2998], lengths[0] = 70, 2998
        words = said(kind, [texts(rng) for _ in range(batch)])
        (tokens, lengths), (twin_tokens, twin_lengths) = states
        before = np.asarray(lengths).copy()
        expected = twin.step(twin_tokens, twin_lengths, words, **given)
        found = ours.step(tokens, lengths, words, advance=False, **given)
        assert np.array_equal(np.asarray(lengths), before)
        lengths[:] = twin_lengths
        for a, b in zip((*found, tokens), (*expected, twin_tokens), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
    assert np.array_equal(np.asarray(ours.store.tensor), np.asarray(twin.store.tensor))
    stored = [token for _, text in ours.store._texts() for token in text.tolist()]
    assert stored
    assert max(stored) < 10_000, "no token from behind the end of a row"


def test_proposer_step_stores_only_what_each_scope_sampled() -> None:
    proposer: Any = NgramProposer(CONFIG)
    tokens, lengths = rows(np.asarray)
    tokens[:], lengths[:] = 9999, 10
    words = said(np.asarray, [[50, 51], [60, 61, 62, 63]])
    given = {"row_indices": np.array([3, -1]), "scopes": np.array([1111, 2222])}
    proposer.step(tokens, lengths, words, advance=False, **given)
    assert [(scope, text.tolist()) for scope, text in proposer.store._texts()] == [(1111, [50, 51])]


@KINDS
@pytest.mark.parametrize("k", [0, 1, 3])
def test_drafting_with_fewer_drafts_than_config_equals_config_of_as_many(
    kind: Callable[[Any], Any], k: int
) -> None:
    """A step or a lookup whose ``k`` is below ``config.k``, with a store: vLLM lowers it with the
    batch size."""
    ours = new_drafting(kind, CHEAP)
    twin = new_drafting(kind, dataclasses.replace(CHEAP, k=max(k, 1)))
    (tokens, lengths), (twin_tokens, twin_lengths) = rows(kind), rows(kind)
    rng = np.random.default_rng(8)
    drafted = 0
    for step in range(80):
        words = said(kind, [texts(rng) for _ in range(4)])
        expected = Drafts(*twin.step(twin_tokens, twin_lengths, words)[2:])
        if step % 2:
            found = Drafts(*ours.step(tokens, lengths, words, k=k)[2:])
        else:
            tokens[:], lengths[:] = twin_tokens, twin_lengths
            sampled = kind((np.asarray(words) >= 0).sum(1).astype(np.int32))
            found = ours.propose(tokens, lengths, num_sampled=sampled, k=k)
        if k == 0:
            expected = Drafts(expected[0][:, :0], expected[1] * 0, found.match_len)
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
        drafted += int(found.num_draft_tokens.sum())
    assert drafted > 50 or k == 0
    texts_of = [
        [(scope, text.tolist()) for scope, text in drafting.store._texts()]  # type: ignore[union-attr]
        for drafting in (ours, twin)
    ]
    assert texts_of[0] == texts_of[1]


@KINDS
def test_propose_is_the_step_of_a_runner_that_appends(kind: Callable[[Any], Any]) -> None:
    proposer: Any = NgramProposer(CONFIG)
    stepping: Any = NgramProposer(CONFIG)
    (tokens, lengths), (others, other_lengths) = rows(kind), rows(kind)
    scopes = kind(np.array([0, scope_of("a"), 0, scope_of("a")]))
    rng = np.random.default_rng(2)
    for row in range(4):
        begin(tokens, lengths, row, [row])
        begin(others, other_lengths, row, [row])
    for _ in range(100):
        words = [texts(rng) for _ in range(4)]
        expected = stepping.step(others, other_lengths, said(kind, words), scopes=scopes)
        for row, word in enumerate(words):
            begin_at = int(lengths[row])
            for at, token in enumerate(word):
                tokens[row, begin_at + at] = token
            lengths[row] += len(word)
        sampled = kind(np.array([len(word) for word in words], np.int32))
        found = proposer.propose(tokens, lengths, num_sampled=sampled, scopes=scopes)
        for a, b in zip(found, expected[2:], strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
    assert np.array_equal(np.asarray(proposer.store.tensor), np.asarray(stepping.store.tensor))


@KINDS
@pytest.mark.parametrize("name", [name for name in ROW_SAMPLES if name != "fewer than rows"])
def test_proposer_propose_with_any_row_indices_stores_only_rows_that_exist(
    kind: Callable[[Any], Any], name: str
) -> None:
    proposer: Any = NgramProposer(CONFIG)
    tokens, lengths = rows(kind)
    for row in range(4):
        begin(tokens, lengths, row, [100 * row, 100 * row + 1])
    indices = ROW_SAMPLES[name]
    given = {} if indices is None else {"row_indices": kind(np.array(indices))}
    scopes = np.array(indices or range(4))
    sampled = kind(np.array([1, 2, 1, 2], np.int32))
    proposer.propose(tokens, lengths, num_sampled=sampled, scopes=kind(scopes), **given)
    stored = dict(proposer.store._texts())
    assert set(stored) == {scope for scope in scopes.tolist() if 0 <= scope < 4}
    assert all(text[-1] == 100 * scope + 1 for scope, text in stored.items())


@pytest.mark.slow
@pytest.mark.parametrize("advance", [True, False])
def test_a_compiled_step_is_the_same(advance: bool) -> None:
    compiled, plain = (NgramProposer(CONFIG) for _ in range(2))
    states = [rows(torch.from_numpy) for _ in range(2)]
    rng = np.random.default_rng(7)
    scopes = torch.tensor([0, 1, 0, 1])
    given: dict[str, Any] = {"scopes": scopes, "advance": advance}
    step: Any = compiled.step
    for at in range(12):
        words = said(torch.from_numpy, [texts(rng) for _ in range(4)])
        found = step(*states[0], words, **given)
        for a, b in zip(found, plain.step(*states[1], words, **given), strict=True):
            assert torch.equal(a, b)
        if not advance:
            for _, lengths in states:
                lengths += found.num_sampled
        if at == 0:  # it created index and store
            step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled.store.tensor, plain.store.tensor)  # type: ignore[union-attr]


def test_two_that_are_fed_equally_have_equal_stores() -> None:
    """Bit for bit, over evictions and ends, as the ranks of a tensor-parallel server need."""
    pair: list[Any] = [NgramProposer(CONFIG) for _ in range(2)]
    states = [rows(np.asarray) for _ in pair]
    rng = np.random.default_rng(3)
    for step in range(400):
        words = [texts(rng) for _ in range(4)]
        scopes = rng.integers(0, 3, 4)
        for proposer, state in zip(pair, states, strict=True):
            if step % 60 == 59:
                state[1][step % 4] = 0
                proposer.reset(np.array([step % 4]))
            proposer.step(*state, said(np.asarray, words), scopes=scopes)
    assert np.array_equal(pair[0].store.tensor, pair[1].store.tensor)
    assert pair[0].store.statistics.drafts > 0


def test_reset_finishes() -> None:
    proposer: Any = NgramProposer(dataclasses.replace(CONFIG, store="finish"))
    tokens, lengths = rows(np.asarray)
    proposer.step(tokens, lengths, said(np.asarray, [TEXT[:9], [], [], []]))
    again = said(np.asarray, [[], TEXT[:4], [], []])
    assert proposer.step(tokens, lengths, again).num_draft_tokens[1] == 0
    proposer.reset(np.array([0, 1]))
    lengths[1] = 0
    assert proposer.step(tokens, lengths, again).num_draft_tokens[1] > 0


def test_max_len_ends_the_store_s_drafts_too() -> None:
    proposer: Any = NgramProposer(dataclasses.replace(CONFIG, max_len=6))
    tokens, lengths = rows(np.asarray)
    proposer.step(tokens, lengths, said(np.asarray, [TEXT[:9], TEXT[:4], [], []]))
    found = proposer.step(tokens, lengths, said(np.asarray, [[], [], TEXT[:4], []]))
    assert found.num_draft_tokens[2] == 2


def test_a_given_store_is_shared_and_not_copied() -> None:
    store = NgramStore(8, 16384)
    first, second = (NgramProposer(CHEAP, store=store) for _ in range(2))
    tokens, lengths = rows(np.asarray)
    words = said(np.asarray, [TEXT[:9], [], [], []])
    first.step(tokens, lengths, words)
    tokens, lengths = rows(np.asarray)
    slots = np.arange(4, 8)
    words = said(np.asarray, [[], TEXT[:4], [], []])
    other: Any = NgramProposer(CHEAP, store=store, num_slots=8)
    assert other.step(tokens, lengths, words, slot_indices=slots).num_draft_tokens[1] == 5
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(second)
    own: Any = NgramProposer(CHEAP)
    own.step(*rows(np.asarray), words)
    assert copy.deepcopy(own).store is None


@pytest.mark.parametrize(
    ("kind", "scopes", "message"),
    [
        (np.asarray, np.zeros(3, np.int64), r"int32 or int64 \[4\], got int64 \[3\]"),
        (np.asarray, torch.zeros(4).long(), "a numpy array, got Tensor"),
        (torch.from_numpy, np.zeros(4, np.int64), "a torch.Tensor, got ndarray"),
        (np.asarray, [0, 0, 0, 0], "a numpy array, got list"),
        (np.asarray, np.zeros(4), r"int32 or int64 \[4\], got float64 \[4\]"),
        (np.asarray, np.zeros(8, np.int64)[::2], "contiguous .* on cpu, got strided memory on cpu"),
        (torch.from_numpy, torch.zeros(8).long()[::2], "contiguous .*, got strided memory on cpu"),
        (torch.from_numpy, torch.zeros(4, device="meta").long(), "contiguous .* memory on meta"),
    ],
)
def test_errors_before_anything_is_written(
    kind: Callable[[Any], Any], scopes: Any, message: str
) -> None:
    proposer = NgramProposer(CONFIG)
    tokens, lengths = rows(kind)
    with pytest.raises(ValueError, match=f"NgramProposer: step: scopes: expected {message}"):
        proposer.step(tokens, lengths, said(kind, [TEXT[:4]] * 4), scopes=scopes)
    assert not lengths.any()
    assert (tokens == -7).all()
    assert proposer.store is None


def test_other_errors() -> None:
    tokens, lengths = rows(np.asarray)
    with pytest.raises(ValueError, match="propose: num_sampled: expected one with a store"):
        NgramProposer(CONFIG).propose(tokens, lengths)
    with pytest.raises(ValueError, match="scopes: expected None without a store"):
        NgramProposer(LADDER).propose(tokens, lengths, scopes=np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="store: expected None without a min_draft_probability"):
        NgramProposer(NgramConfig(), store=NgramStore(1, 4096))
    torchs = NgramProposer(LADDER, store=NgramStore(4, 16384, kind="torch"))
    with pytest.raises(ValueError, match="step: store: expected one of kind='numpy'"):
        torchs.step(tokens, lengths, said(np.asarray, [[1]] * 4))
    few = NgramProposer(dataclasses.replace(CONFIG, store_tokens=4095))
    message = "store_tokens: expected at least 4096, 1024 for each of 4 requests, got 4095"
    with pytest.raises(ValueError, match=message):
        few.step(tokens, lengths, said(np.asarray, [[1]] * 4))
    assert not lengths.any()


def test_config() -> None:
    assert (CONFIG.store, CONFIG.store_tokens) == ("live", 16384)
    assert np.array_equal(CONFIG.store_cost_table, default_store_costs())  # type: ignore[arg-type]
    assert NgramConfig().store is None
    assert NgramConfig().store_cost_table is None
    assert hash(CONFIG) == hash(copy.copy(CONFIG))
    table = np.arange(16 * 56).reshape(16, 56) % 256
    own = NgramConfig(sizes="ladder", min_draft_probability=0.2, store="finish", store_costs=table)
    assert np.array_equal(own.store_cost_table, table)  # type: ignore[arg-type]
    assert hash(own) != hash(CONFIG)
    assert default_costs().shape == (16, 32)
    ladder: dict[str, Any] = {"sizes": "ladder", "min_draft_probability": 0.2}
    for options, message in (
        ({"store": "live"}, "store: expected None without sizes='ladder' and a min_draft"),
        ({"sizes": "ladder", "store": "live"}, "store: expected None without sizes='ladder'"),
        ({"store_costs": table}, "store_costs: expected None without sizes='ladder'"),
        ({**ladder, "store": "now"}, "store: expected 'live', 'finish' or None, got 'now'"),
        ({**ladder, "store_costs": table[:, :32]}, "store_costs: expected 16 rows of 56 integers"),
        ({**ladder, "store": "live", "store_tokens": 0}, "store_tokens: expected 1 to"),
    ):
        with pytest.raises(ValueError, match=f"NgramConfig: {message}"):
            NgramConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="store_tokens: expected int"):
        NgramConfig(**ladder, store="live", store_tokens=1.5)
