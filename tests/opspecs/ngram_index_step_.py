from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st
from ngram_npu import reference

from . import ngram_step_
from .ngram_index_ import fresh, nonsense, warm
from .rows import HOSTILE_INT32, HOSTILE_INT64, POLICIES, random_rows
from .spec import NO_INDEX_ON_NPU, Args, Array, BadCall, OpSpec, Sample, in_buffer

# Where an argument of ngram_step_ stands.
TOKENS, LENGTHS, SAMPLED, ROWS, MIN_N, MAX_N, POLICY = 0, 1, 2, 4, 7, 8, 10


def _indexed(args: Args, index: Array, slots: Array | None = None) -> Args:
    """Arguments of ngram_step_ as those of ngram_index_step_."""
    return (*args[:-1], index, slots, args[-1])


def _within_span(args: Args) -> bool:
    return bool(args[MAX_N] - args[MIN_N] < 8)


def _warm_for(args: Args, num_pages: int = 64) -> Array:
    tokens = args[TOKENS]
    slots = max(1, tokens.shape[0])
    return warm(
        tokens, args[LENGTHS], slots, args[MIN_N], args[MAX_N], args[POLICY], num_pages=num_pages
    )


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for i, sample in enumerate(ngram_step_.SPEC.samples(rng)):
        if not _within_span(sample.args):
            continue
        slots = None
        if i == 0:
            slots = in_buffer([3, 0, 6], gap=1)
            yield Sample("ordinary", _indexed(sample.args, fresh(7), slots))
            continue
        if rng.random() < 0.5:  # of the eight variants that a sample comes in, half
            cold = _indexed(sample.args, fresh(max(1, sample.args[TOKENS].shape[0])))
            yield Sample(f"cold-{sample.label}", cold, sample.compare)
        else:
            warm_args = _indexed(sample.args, _warm_for(sample.args))
            yield Sample(f"warm-{sample.label}", warm_args, sample.compare)
        if i % 5 == 0:
            small = _indexed(sample.args, _warm_for(sample.args, num_pages=2))
            yield Sample(f"no-memory-{sample.label}", small, sample.compare)
    yield from _slot_samples(rng)


def _slot_samples(rng: np.random.Generator) -> Iterator[Sample]:
    tokens = in_buffer(random_rows(rng, 9, 60, 2), gap=2)
    lengths = in_buffer([50] * 9)
    sampled = in_buffer(rng.integers(0, 2, (8, 3), dtype=np.int32))
    for policy in POLICIES:
        args = (tokens, lengths, sampled, None, None, True, 9, 2, 4, 3, *policy, 70, None)
        index = _warm_for(args)
        order = rng.permutation(9)[:8]
        # Slots that index other rows, and slots nobody has.
        yield Sample(f"others-slots-{policy}", _indexed(args, index, in_buffer(order)))
        for dtype, bad in ((np.int32, HOSTILE_INT32), (np.int64, HOSTILE_INT64[3:])):
            slots = in_buffer(bad[:8], dtype=dtype)
            yield Sample(f"hostile-slots-{policy}", _indexed(args, index, slots))
        twice = in_buffer([1, 1, 1, 2, 2, 3, 3, 1])
        yield Sample(f"one-slot-twice-{policy}", _indexed(args, index, twice), compare=False)
        other = (*args[:MIN_N], 1, 3, *args[MAX_N + 1 :])
        yield Sample(f"other-range-{policy}", _indexed(other, index))
        shorter = (tokens, in_buffer([30] * 9), *args[2:])
        yield Sample(f"shorter-{policy}", _indexed(shorter, index))
        rewritten = (in_buffer(random_rows(rng, 9, 60, 5)), *args[1:])
        yield Sample(f"rewritten-{policy}", _indexed(rewritten, index), compare=False)
        for i, words in enumerate(nonsense(rng, index)):
            yield Sample(f"nonsense-{i}-{policy}", _indexed(args, words), compare=False)


@st.composite
def _strategy(draw: st.DrawFn) -> Args:
    args = draw(ngram_step_.SPEC.strategy.filter(_within_span))
    num_slots = draw(st.integers(1, 6))
    index = fresh(num_slots, num_pages=draw(st.sampled_from([1, 8])))
    batch = args[SAMPLED].shape[0]
    slots = None
    if draw(st.booleans()):
        slots = in_buffer(draw(st.permutations(range(-1, 6)))[:batch])
    return _indexed(args, index, slots)


def _sizes() -> tuple[Args, ...]:
    made = []
    for i, args in enumerate(ngram_step_.SPEC.sizes):
        batch = args[SAMPLED].shape[0]
        made.append(_indexed(args, fresh(30 + i, 5 + i), np.arange(batch, dtype=np.int32)))
    return tuple(made)


SPEC = OpSpec(
    name="ngram_index_step_",
    no_kernel=NO_INDEX_ON_NPU,
    schema=(
        "ngram_index_step_(Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor sampled_token_ids, "
        "Tensor? discard, Tensor? row_indices, bool advance, SymInt vocab_size, SymInt min_n, "
        "SymInt max_n, SymInt k, int match_policy, bool overlap, SymInt max_len, Tensor(c!) index, "
        "Tensor? slot_indices, Tensor(w!)? workspace) -> "
        "(Tensor next_token_ids, Tensor num_sampled, Tensor draft_token_ids, "
        "Tensor num_draft_tokens, Tensor match_len)"
    ),
    reference=reference.ngram_index_step_,
    samples=_samples,
    strategy=_strategy(),
    bad_calls=(
        *ngram_step_.SPEC.bad_calls[:-1],
        BadCall("span of 9", {"min_n": 2, "max_n": 10}, r"max_n <= 9 .*got 10", "max_n"),
        BadCall(
            "B of slots", {"slot_indices": lambda a: a[:-1]}, "size 3, got size 2", "slot_indices"
        ),
    ),
    sizes=_sizes(),
    opaque=frozenset({"index"}),
)
