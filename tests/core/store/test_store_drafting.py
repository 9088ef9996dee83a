"""Tests NgramProposer, Drafting and AsyncSpecState with a store."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from async_state import make_samples, to_ints
from async_state.devices import LateDevice
from ngram_npu import _C, NgramConfig, NgramProposer, NgramStore, scope_of
from ngram_npu.async_state import Admission, AsyncConfig, AsyncSpecState, Batch, KVGroup
from ngram_npu.config import default_store_costs
from ngram_npu.drafting import Drafting, Drafts
from ngram_npu.index import make_index
from ngram_npu.store import make_store

Convert = Callable[[Any], Any]
CONVERSIONS = {"numpy": np.asarray, "torch": torch.from_numpy}
EACH_KIND = pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
TEXT = list(range(100, 140))
LADDER = NgramConfig(sizes="ladder", min_draft_probability=0.177)
CONFIG = dataclasses.replace(LADDER, store="live", store_tokens=16384)
LOW_COSTS: Any = np.ones((16, _C.STORE_COST_COLUMNS), np.uint8)  # as NgramConfig.store_costs
LOW_COST_CONFIG = dataclasses.replace(CONFIG, store_costs=LOW_COSTS)
"""With such low costs, a draft ends only at the end of the stored text, or after k tokens."""
PHRASES = np.random.default_rng(6).integers(0, 50, (12, 6))
ROW_SAMPLES: dict[str, list[int] | None] = {
    "all": None,
    "fewer requests than rows": None,
    "permuted": [2, 0, 3, 1],
    "negative": [3, -1, 0, -9],
    "past the end": [4, 2, 9, 1],
    "repeated": [1, 1, 3, 1],
}
"""By name: `row_indices` of a batch over four rows; None: request i has row i."""


def make_rows(convert: Convert) -> tuple[Any, Any]:
    return convert(np.full((4, 3000), -7, np.int32)), convert(np.zeros(4, np.int32))


def make_sampled(convert: Convert, texts: list[list[int]]) -> Any:
    return convert(np.array([[*text, *[-1] * (9 - len(text))] for text in texts], np.int32))


def make_random_texts(rng: np.random.Generator, count: int = 4) -> list[list[int]]:
    """Returns up to 8 tokens per request, from a few phrases, so that requests share phrases."""
    texts = []
    for _ in range(count):
        tokens = PHRASES[rng.integers(0, 12, 2)].reshape(-1).tolist()
        texts.append(tokens[: int(rng.integers(9))])
    return texts


def are_equal(arrays: Any, expected: Any) -> bool:
    pairs = zip(arrays, expected, strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def list_stored_texts(drafter: Any) -> list[tuple[int, list[int]]]:
    return [(scope, text.tolist()) for scope, text in drafter.store.texts()]


@EACH_KIND
@pytest.mark.parametrize("has_slot_indices", [False, True])
@pytest.mark.parametrize("has_prompt_scopes", [False, True])
def test_step_equals_index_step_and_store_steps(
    convert: Convert, has_slot_indices: bool, has_prompt_scopes: bool
) -> None:
    """The requests have two scopes. In every ninth step, a new request replaces that of a row. With
    prompt scopes, a second step of the store has the other half of its slots."""
    num_store_slots = 16 if has_prompt_scopes else 8
    kind: Any = "numpy" if convert is np.asarray else "torch"
    proposer: Any = NgramProposer(
        CONFIG, num_slots=8, store=NgramStore(num_store_slots, 16384, kind=kind)
    )
    without_store = NgramProposer(LADDER, num_slots=8)
    store = NgramStore(num_store_slots, 16384)
    rows, expected_rows = make_rows(convert), make_rows(np.asarray)
    rng = np.random.default_rng(1)
    num_changed = [0, 0]
    for step in range(200):
        if step % 9 == 0:
            for tokens, lengths in (rows, expected_rows):
                for column, token in enumerate((1, 2, step)):
                    tokens[step % 4, column] = token
                lengths[step % 4] = 3
        order = rng.permutation(4).astype(np.int32)
        if step % 5 == 4:  # padding
            order[rng.integers(4)] = rng.choice([-1, 4])
        requests: dict[str, Any] = {"row_indices": order}
        if has_slot_indices:
            requests["slot_indices"] = (order + 3).astype(np.int64)
        scopes = (order % 2).astype(np.int64)
        texts = make_random_texts(rng)
        arguments = {name: convert(value) for name, value in requests.items()}
        arguments |= {"scopes": convert(scopes), "draft_costs": convert(np.zeros((4, 8), np.uint8))}
        slots = requests.get("slot_indices", order)
        calls = [{"slot_indices": slots, "scopes": scopes}]
        if has_prompt_scopes:
            prompts = {"scopes": 10 + order % 3, "slot_indices": np.where(slots < 0, -1, slots + 8)}
            calls.append(prompts)
            arguments["prompt_scopes"] = convert(prompts["scopes"])
        result = proposer.step(*rows, make_sampled(convert, texts), **arguments)
        costs = np.full((4, 8), 255, np.uint8)
        sampled = make_sampled(np.asarray, texts)
        expected = without_store.step(*expected_rows, sampled, draft_costs=costs, **requests)
        for number, call in enumerate(calls):
            drafts_before = expected.draft_token_ids.copy()
            _C.ngram_store_step_(
                *expected_rows,
                expected.num_sampled,
                store.tensor,
                row_indices=order,
                draft_token_ids=expected.draft_token_ids,
                num_draft_tokens=expected.num_draft_tokens,
                match_len=expected.match_len,
                draft_costs=costs,
                costs=default_store_costs(),
                cost_limit=40,
                **call,
            )
            num_changed[number] += (drafts_before != expected.draft_token_ids).any()
        assert are_equal((*result, arguments["draft_costs"]), (*expected, costs))
    assert num_changed[0] > 50, "the store must replace drafts"
    assert (num_changed[1] > 10) == has_prompt_scopes
    assert isinstance(proposer.store.tensor, type(rows[0]))
    assert np.array_equal(np.asarray(proposer.store.tensor), store.tensor)


def make_drafting(convert: Convert, config: NgramConfig = CONFIG) -> Drafting:
    name: Any = "numpy" if convert is np.asarray else "torch"
    index, store = make_index(config, 4, 12_000, kind=name), make_store(config, 4, kind=name)
    return Drafting(config, kind=name, index=index, store=store)


@EACH_KIND
@pytest.mark.parametrize("name", ROW_SAMPLES)
def test_step_without_advance_equals_step_with_advance(convert: Convert, name: str) -> None:
    """For any row indices and lengths, only the lengths differ. The memory after the rows' ends
    contains text that must not be stored."""
    drafter: Any = NgramProposer(CONFIG, num_slots=4)
    expected_proposer: Any = NgramProposer(CONFIG, num_slots=4)
    states = [make_rows(convert), make_rows(convert)]
    for tokens, _ in states:
        tokens[:] = convert(10_000 + np.arange(12_000, dtype=np.int32).reshape(4, 3000))
    rng = np.random.default_rng(5)
    indices = ROW_SAMPLES[name]
    batch = 2 if name == "fewer requests than rows" else 4
    arguments: dict[str, Any] = {"scopes": convert(np.array([1, 2, 3, 4])[:batch])}
    if indices is not None:
        arguments["row_indices"] = convert(np.array(indices, np.int32))
    for step in range(60):
        for tokens, lengths in states:
            if step % 20 == 7:  # invalid lengths
                lengths[3], lengths[1] = -2, 3001
            if step % 20 == 9:
                lengths[3], lengths[1] = 0, 0
            if step == 40:
                tokens[0, :2998], lengths[0] = 70, 2998
        sampled = make_sampled(convert, make_random_texts(rng, batch))
        (tokens, lengths), expected_rows = states
        lengths_before = np.asarray(lengths).copy()
        expected = expected_proposer.step(*expected_rows, sampled, **arguments)
        result = drafter.step(tokens, lengths, sampled, advance=False, **arguments)
        assert np.array_equal(np.asarray(lengths), lengths_before)
        lengths[:] = expected_rows[1]
        assert are_equal((*result, tokens), (*expected, expected_rows[0]))
    assert are_equal([drafter.store.tensor], [expected_proposer.store.tensor])
    stored_tokens = [token for _, text in list_stored_texts(drafter) for token in text]
    assert len(stored_tokens) > 0
    assert max(stored_tokens) < 10_000, "a token from after the end of a row"


@EACH_KIND
@pytest.mark.parametrize("k", [0, 1, 3])
def test_step_with_smaller_k_equals_config_with_this_k(convert: Convert, k: int) -> None:
    """vLLM uses fewer draft tokens for larger batches."""
    drafting = make_drafting(convert, LOW_COST_CONFIG)
    expected_drafting = make_drafting(convert, dataclasses.replace(LOW_COST_CONFIG, k=max(k, 1)))
    (tokens, lengths), expected_rows = make_rows(convert), make_rows(convert)
    rng = np.random.default_rng(8)
    scopes = convert(np.array([0, scope_of("a"), 0, scope_of("a")]))
    num_drafted = 0
    for step in range(80):
        sampled = make_sampled(convert, make_random_texts(rng))
        expected = Drafts(*expected_drafting.step(*expected_rows, sampled, scopes=scopes)[2:])
        arguments: dict[str, Any] = {"scopes": scopes, "k": k}
        if step % 2:
            drafts = Drafts(*drafting.step(tokens, lengths, sampled, **arguments)[2:])
        else:
            tokens[:], lengths[:] = expected_rows
            arguments["num_sampled"] = convert((np.asarray(sampled) >= 0).sum(1).astype(np.int32))
            drafts = drafting.propose(tokens, lengths, **arguments)
        if k == 0:
            expected = Drafts(expected[0][:, :0], expected[1] * 0, drafts.match_len)
        assert are_equal(drafts, expected)
        num_drafted += int(drafts.num_draft_tokens.sum())
    assert num_drafted > 50 or k == 0
    assert list_stored_texts(drafting) == list_stored_texts(expected_drafting)


@pytest.mark.slow
@pytest.mark.parametrize("advance", [True, False])
def test_compiled_step_equals_eager_step(advance: bool) -> None:
    compiled, eager_proposer = (NgramProposer(CONFIG) for _ in range(2))
    states = [make_rows(torch.from_numpy) for _ in range(2)]
    rng = np.random.default_rng(7)
    arguments: dict[str, Any] = {"scopes": torch.tensor([0, 1, 0, 1]), "advance": advance}
    step: Any = compiled.step
    for step_number in range(12):
        sampled = make_sampled(torch.from_numpy, make_random_texts(rng))
        result = step(*states[0], sampled, **arguments)
        assert are_equal(result, eager_proposer.step(*states[1], sampled, **arguments))
        if step_number == 0:  # the first step created index and store
            step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled.store.tensor, eager_proposer.store.tensor)  # type: ignore[union-attr]


def test_reset_finishes_requests() -> None:
    proposer: Any = NgramProposer(dataclasses.replace(CONFIG, store="finish"))
    tokens, lengths = make_rows(np.asarray)
    proposer.step(tokens, lengths, make_sampled(np.asarray, [TEXT[:9], [], [], []]))
    sampled = make_sampled(np.asarray, [[], TEXT[:4], [], []])
    assert proposer.step(tokens, lengths, sampled).num_draft_tokens[1] == 0
    proposer.reset(np.array([0, 1]))
    lengths[1] = 0
    assert proposer.step(tokens, lengths, sampled).num_draft_tokens[1] > 0


def test_max_len_limits_drafts_from_the_store() -> None:
    proposer: Any = NgramProposer(dataclasses.replace(CONFIG, max_len=6))
    rows = make_rows(np.asarray)
    proposer.step(*rows, make_sampled(np.asarray, [TEXT[:9], TEXT[:4], [], []]))
    result = proposer.step(*rows, make_sampled(np.asarray, [[], [], TEXT[:4], []]))
    assert result.num_draft_tokens[2] == 2


def test_store_argument_is_shared_and_prevents_copies() -> None:
    store = NgramStore(8, 16384)
    first_proposer = NgramProposer(LOW_COST_CONFIG, store=store)
    second_proposer: Any = NgramProposer(LOW_COST_CONFIG, store=store, num_slots=8)
    first_proposer.step(*make_rows(np.asarray), make_sampled(np.asarray, [TEXT[:9], [], [], []]))
    sampled, slots = make_sampled(np.asarray, [[], TEXT[:4], [], []]), np.arange(4, 8)
    result = second_proposer.step(*make_rows(np.asarray), sampled, slot_indices=slots)
    assert result.num_draft_tokens[1] == 5
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(first_proposer)
    proposer = NgramProposer(LOW_COST_CONFIG)
    proposer.step(*make_rows(np.asarray), sampled)
    assert proposer.store is not None
    assert copy.deepcopy(proposer).store is None


@pytest.mark.parametrize(
    ("convert", "scopes", "message"),
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
def test_invalid_scopes_raise_before_writing(convert: Convert, scopes: Any, message: str) -> None:
    proposer = NgramProposer(CONFIG)
    tokens, lengths = make_rows(convert)
    with pytest.raises(ValueError, match=f"NgramProposer: step: scopes: expected {message}"):
        proposer.step(tokens, lengths, make_sampled(convert, [TEXT[:4]] * 4), scopes=scopes)
    assert not lengths.any()
    assert (tokens == -7).all()
    assert proposer.store is None


def test_reset_ends_requests_in_their_prompt_scopes() -> None:
    """With visibility "finish", the text can be drafted only then."""
    proposer = NgramProposer(LOW_COST_CONFIG, store=NgramStore(8, 16384, visibility="finish"))
    rows = make_rows(np.asarray)
    sampled = make_sampled(np.asarray, [TEXT[:6]] + [[]] * 3)
    proposer.step(*rows, sampled, scopes=np.arange(4), prompt_scopes=np.full(4, 9))
    proposer.reset(np.array([0]))
    sampled = make_sampled(np.asarray, [[]] + [TEXT[:2]] * 3)
    prompts = np.array([9, 9, 8, 9])
    result = proposer.step(*rows, sampled, scopes=np.arange(4), prompt_scopes=prompts)
    assert result.num_draft_tokens.tolist() == [0, 4, 0, 4]


def test_invalid_store_arguments_are_rejected() -> None:
    tokens, lengths = make_rows(np.asarray)
    sampled = make_sampled(np.asarray, [[1]] * 4)
    with pytest.raises(ValueError, match="propose: num_sampled: expected an array with a store"):
        NgramProposer(CONFIG).propose(tokens, lengths)
    with pytest.raises(ValueError, match="scopes: expected None without a store"):
        NgramProposer(LADDER).propose(tokens, lengths, scopes=np.zeros(4, np.int64))
    prompt_scopes = np.arange(4)
    with pytest.raises(ValueError, match="step: prompt_scopes: expected None without a store"):
        NgramProposer(LADDER).step(tokens, lengths, sampled, prompt_scopes=prompt_scopes)
    with pytest.raises(ValueError, match="prompt_scopes: expected a store with at least 8 slots"):
        NgramProposer(CONFIG).step(tokens, lengths, sampled, prompt_scopes=prompt_scopes)
    assert not lengths.any()
    with pytest.raises(ValueError, match="store: expected None without a min_draft_probability"):
        NgramProposer(NgramConfig(), store=NgramStore(1, 4096))
    torch_proposer = NgramProposer(LADDER, store=NgramStore(4, 16384, kind="torch"))
    with pytest.raises(ValueError, match="step: store: expected kind='numpy', got kind='torch'"):
        torch_proposer.step(tokens, lengths, sampled)
    small_proposer = NgramProposer(dataclasses.replace(CONFIG, store_tokens=4095))
    message = "store_tokens: expected at least 4096, 1024 for each of 4 requests, got 4095"
    with pytest.raises(ValueError, match=message):
        small_proposer.step(tokens, lengths, sampled)
    assert not lengths.any()


NUM_ROWS, CAPACITY = 3, 200
ASYNC_CONFIG = dataclasses.replace(LOW_COST_CONFIG, k=4)


def make_state(ngram: NgramConfig = ASYNC_CONFIG, **options: Any) -> Any:
    draft_on = options.pop("draft_on", "auto")
    sizes = {"max_rows": NUM_ROWS, "row_capacity": CAPACITY, "max_step_tokens": 256}
    groups = (KVGroup(CAPACITY, 1),)
    config = AsyncConfig(ngram, draft_on=draft_on, kv_groups=groups, **sizes)  # type: ignore[arg-type]
    return AsyncSpecState(config, **options)


def run_step(state: Any, rows: list[int], sampled: list[list[int]], **changes: Any) -> Any:
    """Runs a step that verifies no drafts, and returns its outputs."""
    num_scheduled = [1] * len(rows)
    for admission in changes.get("new", ()):
        num_scheduled[rows.index(admission.row)] = len(admission.token_ids)
    state.begin_step(
        Batch(to_ints(*rows), to_ints(*num_scheduled), to_ints(*[0] * len(rows)), **changes)
    )
    outputs = state.end_step(make_samples(*sampled))
    state.reconcile()
    return outputs


def make_admission(row: int, *prompt: int, scope: int = 0) -> Admission:
    return Admission(row, to_ints(*prompt), (to_ints(row),), scope=scope)


@pytest.mark.parametrize("draft_on", ["device", "host"])
@pytest.mark.parametrize("rows", [[0, -1], [0, NUM_ROWS], [1, 1], [0, 2]])
def test_async_state_with_invalid_rows_stores_nothing(draft_on: str, rows: list[int]) -> None:
    """Row 2 is free, but its slot may still contain the text of the removed request."""
    state = make_state(draft_on=draft_on)
    admissions = [make_admission(row, 9 - row, scope=row + 1) for row in range(3)]
    run_step(state, [0, 1, 2], [[50], [60], [70]], new=admissions)
    run_step(state, [0, 1], [[51], [61]], removed=to_ints(2))
    state_before = state.store.tensor.clone(), state.token_ids.clone()
    with pytest.raises(ValueError, match="begin_step: rows: expected"):
        run_step(state, rows, [[52], [62]])
    assert torch.equal(state.store.tensor, state_before[0])
    assert torch.equal(state.token_ids, state_before[1])


def test_async_state_uses_store_argument() -> None:
    store = NgramStore(8, 16384, kind="torch")
    store.warm([range(50, 60)], scope=3)
    state = make_state(LADDER, store=store)
    assert state.store is store
    outputs = run_step(state, [0], [[50]], new=[make_admission(0, 9, scope=3)])
    assert outputs.num_draft_tokens[0] > 0
    assert make_state(LADDER).store is None


def test_async_state_rejects_invalid_stores_and_scopes() -> None:
    store = NgramStore(3, 16384, kind="torch")
    # A device other than the CPU, on which no operator is called.
    device = LateDevice("eager", None)  # type: ignore[arg-type]
    options: list[tuple[dict[str, Any], str]] = [
        ({"ngram": NgramConfig(), "store": store}, "store: expected None without min_draft"),
        ({"ngram": LADDER, "store": NgramStore(3, 16384)}, "store: expected kind='torch'"),
    ]
    options += [
        (
            {**ngram, "runtime": device, "draft_on": "device"},
            "store: expected None with draft_on='device' on a device other than the CPU",
        )
        for ngram in ({"ngram": LADDER, "store": store}, {"ngram": ASYNC_CONFIG})
    ]
    for arguments, message in options:
        with pytest.raises(ValueError, match=f"AsyncSpecState: {message}"):
            make_state(**arguments)
    with pytest.raises(ValueError, match="store_tokens: expected at least 3072"):
        make_state(dataclasses.replace(ASYNC_CONFIG, store_tokens=3071))
    for scope in (-1, 2**63, True, "a"):
        admission: Any = make_admission(0, 9, scope=scope)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"begin_step: new/resumed: scope: expected 0 to"):
            run_step(make_state(), [0], [[1]], new=[admission])
