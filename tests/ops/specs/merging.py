"""The OpSpec of ``merge_drafts_``, which merges neural drafts with n-gram drafts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from ops import reference
from ops.schema import arguments_of

from .inputs import HOSTILE_INDICES, HOSTILE_INT32, replace_each
from .spec import Args, Array, BadCall, OpSpec, Sample, contiguous, in_buffer

UNIT = 65536
NAMES = [name for name, _ in arguments_of("merge_drafts_")]


def _make_costs(rng: np.random.Generator, *shape: int) -> Array:
    """Returns low and high costs, and 255, which is the value of unused positions."""
    return in_buffer(rng.choice([0, 1, 5, 16, 40, 128, 255], shape), gap=1, dtype=np.uint8)


def _make_batch(
    rng: np.random.Generator, batch: int, width: int, k: int, dtype: Any = np.int32
) -> dict[str, Any]:
    """Returns the arguments by name. Some n-gram drafts begin with tokens of the neural draft."""
    neural = rng.integers(0, 50, (batch, width))
    ngram = rng.integers(0, 3, (batch, k))
    num_equal = rng.integers(0, width + 1, batch)
    for i in range(batch):
        ngram[i, : num_equal[i]] = neural[i, : num_equal[i]]
    drafted = rng.integers(0, k + 1, batch)
    acceptance = np.stack(
        [rng.integers(0, (width + 1) * UNIT, batch + 1), rng.integers(0, width + 2, batch + 1)], 1
    )
    return dict.fromkeys(NAMES) | {
        "neural_draft_token_ids": in_buffer(neural, before=1, gap=2, dtype=dtype),
        "ngram_draft_token_ids": in_buffer(ngram, gap=3),
        "num_ngram_draft_tokens": in_buffer(drafted, gap=1),
        "match_len": in_buffer(rng.integers(0, 18, batch), before=1),
        "num_neural_draft_tokens": in_buffer(rng.integers(0, width + 1, batch), gap=1),
        "draft_costs": _make_costs(rng, batch, k),
        "row_indices": in_buffer(rng.permutation(batch + 1)[:batch], gap=1),
        "num_sampled": in_buffer(rng.integers(0, width + 2, batch), gap=1),
        "num_scheduled_drafts": in_buffer(rng.integers(0, k + 1, batch), gap=1),
        "neural_acceptance": in_buffer(acceptance, before=1, gap=2),
        "min_match_len": 1,
        "threshold": 0,
        "extend": False,
    }


def _make_sample(label: str, call: dict[str, Any], checks_results: bool = True) -> Sample:
    return Sample(label, tuple(call.values()), checks_results)


def _make_samples(rng: np.random.Generator) -> Iterator[Sample]:
    ordinary = _make_batch(rng, 4, 2, 3)
    yield _make_sample("ordinary", ordinary)
    by_confidence = {"neural_draft_costs": _make_costs(rng, 4, 2)}
    yield _make_sample("a neural confidence", ordinary | by_confidence)
    yield _make_sample("no costs", ordinary | {"draft_costs": None})
    yield _make_sample("no acceptance", ordinary | {"neural_acceptance": None})
    yield _make_sample("all drafts verified", ordinary | {"num_scheduled_drafts": None})
    no_acceptance = dict.fromkeys(
        ("neural_acceptance", "num_sampled", "row_indices", "num_neural_draft_tokens")
    )
    no_acceptance["num_scheduled_drafts"] = None
    yield _make_sample("no acceptance, bare", ordinary | no_acceptance)
    yield _make_sample("rows in order", ordinary | {"row_indices": None})

    for batch, (width, k) in product((0, 1, 63, 64, 65, 200), ((0, 0), (0, 5), (4, 4), (3, 8))):
        for dtype, extend in product((np.int32, np.int64), (False, True)):
            call = _make_batch(rng, batch, width, k, dtype) | {"extend": extend}
            yield _make_sample(f"batch-{batch}-{width}-{k}", call)
            confidence = {"neural_draft_costs": _make_costs(rng, batch, width)}
            limits = {"min_match_len": 6, "threshold": UNIT}
            yield _make_sample(f"confident-{batch}-{width}-{k}", call | confidence | limits)
            yield _make_sample(f"none-{batch}-{width}-{k}", call | {"draft_costs": None})
    yield _make_sample("widest", _make_batch(rng, 9, 64, 64) | {"extend": True})
    yield from _make_limit_samples(rng)

    for name in (
        "num_ngram_draft_tokens", "match_len", "num_neural_draft_tokens", "num_sampled",
        "num_scheduled_drafts",
    ):  # fmt: skip
        for values in replace_each(ordinary[name].tolist(), HOSTILE_INT32):
            call = ordinary | {name: in_buffer(values)}
            yield _make_sample(f"hostile-{name}", call)
            yield _make_sample(f"hostile-{name}-extended", call | {"extend": True})
    for column, value in product((0, 1), HOSTILE_INT32):
        acceptance = in_buffer(ordinary["neural_acceptance"], gap=1)
        acceptance[:, column] = value
        call = ordinary | {"neural_acceptance": acceptance, "num_sampled": in_buffer([3, 1, 0, 2])}
        yield _make_sample(f"hostile-acceptance-{column}", call)
    for dtype, values in HOSTILE_INDICES:
        for rows in replace_each([4, 2, 1, 3], (*values, 5, 6)):
            are_distinct = len(set(rows)) == 4
            call = ordinary | {"row_indices": in_buffer(rows, dtype=dtype)}
            yield _make_sample("hostile-rows", call, checks_results=are_distinct)
    for dtype, values in HOSTILE_INDICES:
        tokens = rng.choice(np.array(values, dtype), (20, 3))
        ngram = rng.choice(HOSTILE_INT32, (20, 5))
        # int64 ids then equal the int32 ids only in the low 32 bits.
        ngram[:10, :3] = tokens[:10].astype(np.int32)
        call = _make_batch(rng, 20, 3, 5) | {
            "neural_draft_token_ids": in_buffer(tokens, gap=1, dtype=dtype),
            "ngram_draft_token_ids": in_buffer(ngram, gap=1),
            "num_neural_draft_tokens": in_buffer(rng.integers(1, 4, 20)),
            "num_ngram_draft_tokens": in_buffer(rng.integers(3, 6, 20)),
            "extend": True,
        }
        yield _make_sample("hostile-tokens", call)
    for num_rows in (0, 1, 3):
        acceptance = in_buffer(np.full((num_rows, 2), 1), gap=1)
        yield _make_sample(f"few-rows-{num_rows}", ordinary | {"neural_acceptance": acceptance})


def _make_limit_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yields calls with values at and next to the limits of the contract's comparisons."""
    single = _make_batch(rng, 1, 2, 3) | {
        "num_ngram_draft_tokens": in_buffer([2]),
        "num_neural_draft_tokens": None,
        "match_len": in_buffer([4]),
        # 2 * 32759 is the expected number of accepted tokens.
        "draft_costs": in_buffer([[16, 0, 255]], dtype=np.uint8),
        "row_indices": None,
        "num_sampled": in_buffer([0]),
    }
    for mean in (65517, 65518, 65519):
        acceptance = in_buffer([[mean, 1]])
        yield _make_sample(f"mean-{mean}", single | {"neural_acceptance": acceptance})
        base = single | {"neural_acceptance": None}
        yield _make_sample(f"threshold-{mean}", base | {"threshold": mean})
    for length in (3, 4, 5):
        yield _make_sample(f"min-match-{length}", base | {"min_match_len": length})
        counts = {"draft_costs": None, "num_neural_draft_tokens": in_buffer([0])}
        yield _make_sample(f"min-match-{length}-alone", base | counts | {"min_match_len": length})
    for first in (15, 16, 17):
        confidence = in_buffer([[first, 0]], dtype=np.uint8)
        yield _make_sample(f"confidence-{first}", base | {"neural_draft_costs": confidence})
    for total in (254, 255, 256):
        costs = in_buffer([[total - 127, 127, 255]], dtype=np.uint8)
        args = {"draft_costs": costs, "neural_draft_costs": in_buffer([[255, 0]], dtype=np.uint8)}
        yield _make_sample(f"sum-{total}", base | args)
    zeros = {"draft_costs": np.zeros((1, 20), np.uint8), "num_ngram_draft_tokens": in_buffer([20])}
    long_base = _make_batch(rng, 1, 20, 20) | zeros
    long_base |= {"num_sampled": in_buffer([0]), "row_indices": None}
    for mean in (8, 9, 19, 20):  # all tokens are expected to be accepted
        acceptance = in_buffer([[mean * UNIT, 1]])
        counts = {"num_neural_draft_tokens": in_buffer([20]), "match_len": in_buffer([4])}
        yield _make_sample(f"long-{mean}", long_base | counts | {"neural_acceptance": acceptance})
    for mean, last, sampled in product((0, 7, 65535, 3 * UNIT), (0, 1, 2, 3), (0, 1, 2, 4)):
        args = {"neural_acceptance": in_buffer([[mean, last]]), "num_sampled": in_buffer([sampled])}
        for verified in (None, in_buffer([0]), in_buffer([1]), in_buffer([2])):
            call = single | args | {"num_scheduled_drafts": verified}
            yield _make_sample(f"measured-{mean}-{last}-{sampled}", call)
    for sampled in (64, 65, 66):
        args = {"neural_acceptance": in_buffer([[7, 70]]), "num_sampled": in_buffer([sampled])}
        for verified in (None, in_buffer([68])):
            call = single | args | {"num_scheduled_drafts": verified}
            yield _make_sample(f"accepted-many-{sampled}", call)
    for ngram in ([1, 2, 3], [1, 9, 3], [9, 2, 3]):
        for num_neural, num_ngram, extend in product((0, 1, 2), (1, 2, 3), (False, True)):
            args = {
                "neural_draft_token_ids": in_buffer([[1, 2]]),
                "ngram_draft_token_ids": in_buffer([ngram]),
                "num_neural_draft_tokens": in_buffer([num_neural]),
                "num_ngram_draft_tokens": in_buffer([num_ngram]),
                "min_match_len": 5,
                "extend": extend,
                "num_sampled": in_buffer([1]),
                "neural_acceptance": in_buffer([[UNIT, 2]]),
            }
            yield _make_sample(f"extended-{ngram}-{num_neural}-{num_ngram}", single | args)


def _make_sizes() -> Iterator[Args]:
    rng = np.random.default_rng(1)
    for batch, width, k in ((11, 3, 5), (21, 4, 7), (31, 6, 9)):
        call = _make_batch(rng, batch, width, k) | {"min_match_len": k + 4, "threshold": batch * 2}
        yield contiguous(call.values())


MERGE_DRAFTS = OpSpec(
    name="merge_drafts_",
    reference=reference.merge_drafts_,
    make_samples=_make_samples,
    bad_calls=(
        BadCall(
            {"neural_draft_token_ids": np.zeros((4, 4), np.int32)},
            r"width <= 3 \(width of ngram_draft_token_ids\), got 4",
        ),
        BadCall(
            {"ngram_draft_token_ids": np.zeros((4, 65), np.int32)},
            "0 to 64, got 65",
            "ngram_draft_token_ids width",
        ),
        BadCall(
            {"neural_draft_costs": lambda a: a[:, :1]},
            r"\[4, 2\], got .*\[4, 1\]",
            sample="a neural confidence",
        ),
        BadCall(
            {"draft_costs": None},
            r"None \(draft_costs is None\), got a tensor",
            "neural_draft_costs",
            sample="a neural confidence",
        ),
        BadCall(
            {"draft_costs": None, "threshold": 1},
            r"threshold <= 0 \(draft_costs is None\), got 1",
            "threshold",
        ),
        BadCall({"num_sampled": None}, r"\(neural_acc.* None"),
        BadCall({"neural_acceptance": np.zeros((5, 3), np.int32)}, r"\[5, 2\], got .*\[5, 3\]"),
        BadCall(
            {"row_indices": None, "neural_acceptance": lambda a: a[:3]},
            "batch <= 3 .*got 4",
            "neural_draft_token_ids",
        ),
    ),
    sizes=tuple(_make_sizes()),
    not_randomized=frozenset({"row_indices"}),  # a row must not occur twice
)
