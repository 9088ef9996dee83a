"""Contains the operators as Python functions on torch tensors. docs/ops contains their contracts.

Each function takes the arguments of its operator's schema and returns a named tuple if the operator
has results. The build generates ``ops.pyi`` from the schemas and the documents, so that an editor
shows signatures and descriptions. Importing this module registers the operators' fake kernels
(``torch.compile``, ``FakeTensor``).
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import ngram_npu._C as _C

if TYPE_CHECKING:
    from torch import SymInt, Tensor

    Fake = Callable[..., tuple[Tensor, ...] | None]


def _define(op: str, fake: Fake) -> Callable[..., Any]:
    """Registers the fake kernel of operator ``op``, and returns a function that calls it."""
    operator = getattr(torch.ops.ngram_npu, op)
    schema = operator.default._schema
    names = [argument.name for argument in schema.arguments]
    torch.library.register_fake(f"ngram_npu::{op}")(_add_checks(op, names, fake))
    results = [result.name for result in schema.returns]
    result = namedtuple(f"{op.rstrip('_')}_result", results)  # type: ignore[misc]

    def call_operator(*args: Any, **keywords: Any) -> Any:
        returned = operator(*args, **keywords)
        return result(*returned) if results else None

    call_operator.__name__ = call_operator.__qualname__ = op
    call_operator.__doc__ = f"{schema}\n\nContract: docs/ops/{op.rstrip('_')}.md"
    parameters = []
    for argument in schema.arguments:
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        kind = kinds[argument.kwarg_only]
        has_default = argument.has_default_value()
        default = argument.default_value if has_default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    call_operator.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call_operator


def _add_checks(op: str, names: list[str], fake: Fake) -> Fake:
    """Returns a fake kernel that rejects mixed devices and tensors of rank 0, as the kernels do.
    torch also calls fake kernels with a mix of fake and real tensors."""

    @functools.wraps(fake)
    def call_checked(*args: Any, **keywords: Any) -> Any:
        first: tuple[str, torch.device] | None = None
        for name, value in (*zip(names, args, strict=False), *keywords.items()):
            if not isinstance(value, torch.Tensor):
                continue
            if value.ndim == 0:
                raise ValueError(f"{op}: {name}: expected rank 1 or 2, got rank 0")
            first = first or (name, value.device)
            if value.device != first[1]:
                raise ValueError(
                    f"{op}: {name}: expected device {first[1]}, like {first[0]}, got {value.device}"
                )
        return fake(*args, **keywords)

    return call_checked


# torch omits keywords with default values. A fake declares what it needs; ``**_`` takes the rest.


def _fake_none(*_: Any, **__: Any) -> None:
    return None


def _fake_lookup(
    token_ids: Tensor,
    num_tokens: Tensor,
    *,
    row_indices: Tensor | None = None,
    k: int | SymInt,
    **_: Any,
) -> tuple[Tensor, ...]:
    batch = (token_ids if row_indices is None else row_indices).shape[0]
    return tuple(token_ids.new_empty(shape) for shape in ((batch, k), (batch,), (batch,)))


def _fake_step(
    token_ids: Tensor,
    num_tokens: Tensor,
    sampled_token_ids: Tensor,
    *,
    k: int | SymInt,
    **_: Any,
) -> tuple[Tensor, ...]:
    batch = sampled_token_ids.shape[0]
    shapes = (batch,), (batch,), (batch, k), (batch,), (batch,)
    return tuple(token_ids.new_empty(shape) for shape in shapes)


def _fake_merge(
    neural_draft_token_ids: Tensor,
    ngram_draft_token_ids: Tensor,
    num_ngram_draft_tokens: Tensor,
    match_len: Tensor,
    **_: Any,
) -> tuple[Tensor, ...]:
    batch, k = neural_draft_token_ids.shape[0], ngram_draft_token_ids.shape[1]
    counts, sources = (ngram_draft_token_ids.new_empty((batch,)) for _ in range(2))
    return neural_draft_token_ids.new_empty((batch, k)), counts, sources


def _fake_next_token_ids(sampled_token_ids: Tensor, **_: Any) -> tuple[Tensor, ...]:
    batch = sampled_token_ids.shape[0]
    return sampled_token_ids.new_empty((batch,)), sampled_token_ids.new_empty((batch,))


def _fake_inputs_padded(
    cu_num_draft_tokens: Tensor, num_sampled: Tensor, query_start_loc: Tensor
) -> tuple[Tensor, ...]:
    return _fake_next_token_ids(cu_num_draft_tokens)


def _fake_inputs(
    query_start_loc: Tensor, seq_lens: Tensor, num_rejected: Tensor, *, total_tokens: int | SymInt
) -> tuple[Tensor, ...]:
    shapes = (query_start_loc.shape[0],), (seq_lens.shape[0],), (total_tokens,)
    return tuple(query_start_loc.new_empty(shape) for shape in shapes)


ngram_propose = _define("ngram_propose", _fake_lookup)
ngram_propose_ = _define("ngram_propose_", _fake_none)
ngram_step_ = _define("ngram_step_", _fake_step)
store_append_ = _define("store_append_", _fake_none)
store_propose_ = _define("store_propose_", _fake_none)
merge_drafts_ = _define("merge_drafts_", _fake_merge)
prepare_next_token_ids = _define("prepare_next_token_ids", _fake_next_token_ids)
prepare_inputs_padded = _define("prepare_inputs_padded", _fake_inputs_padded)
prepare_inputs = _define("prepare_inputs", _fake_inputs)
prepare_input_ids_ = _define("prepare_input_ids_", _fake_none)
correct_num_computed_tokens_ = _define("correct_num_computed_tokens_", _fake_none)
compute_slot_mapping_ = _define("compute_slot_mapping_", _fake_none)
correct_spec_state_ = _define("correct_spec_state_", _fake_none)


def workspace_size(op: str, batch: int) -> int:
    """Returns the number of int32 items in the workspace of ``op`` for up to ``batch`` requests.

    Allocate a workspace once per stream, outside of graph capture. Its contents do not matter.
    Device kernels need 16-byte alignment, which torch's allocators provide::

        workspace = torch.empty(
            workspace_size("ngram_step_", max_batch), dtype=torch.int32, device="cuda"
        )

    Args:
        op: an operator with the argument ``workspace``.
        batch: maximum number of requests in a call.

    Raises:
        ValueError: the operator has no workspace, or the batch is negative.
    """
    if batch < 0:
        raise ValueError(f"workspace_size: batch: expected >= 0, got {batch}")
    size = _C.workspace_words(op, batch)
    if size < 0:
        raise ValueError(f"workspace_size: op: expected an operator with a workspace, got {op!r}")
    return size
