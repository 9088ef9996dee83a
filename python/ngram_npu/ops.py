"""Contains the operators as Python functions on torch tensors. docs/ops contains their contracts.

Each function takes the arguments of its operator's schema and returns a named tuple if the operator
has results. The build generates ``ops.pyi`` from the schemas and the documents, so that an editor
shows signatures and descriptions. Importing this module registers the operators' fake kernels
(``torch.compile``, ``FakeTensor``).
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import ngram_npu._C as _C

if TYPE_CHECKING:
    from torch import SymInt, Tensor

    Fake = Callable[..., tuple[Tensor, ...] | None]


def _define(op: str) -> Callable[..., Any]:
    """Registers the fake kernel of operator ``op``, and returns a function that calls it."""
    operator = getattr(torch.ops.ngram_npu, op)
    schema = operator.default._schema
    names = [argument.name for argument in schema.arguments]
    torch.library.register_fake(f"ngram_npu::{op}")(_make_fake(op, names))
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


def _make_fake(op: str, names: list[str]) -> Fake:
    """Returns a fake kernel that allocates the results, whose shapes are in the operator's table
    (csrc/schemas.h). It rejects mixed devices and tensors of rank 0, as the kernels do: torch also
    calls fake kernels with a mix of fake and real tensors."""
    shapes, results = _C.describe_shapes(op)

    def call_fake(*args: Any, **keywords: Any) -> tuple[Tensor, ...] | None:
        values = dict(zip(names, args, strict=False)) | keywords
        tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
        first_name, first = next(iter(tensors.items()))
        for name, tensor in tensors.items():
            if tensor.ndim == 0:
                raise ValueError(f"{op}: {name}: expected rank 1 or 2, got rank 0")
            if tensor.device != first.device:
                raise ValueError(
                    f"{op}: {name}: expected device {first.device}, like {first_name}, "
                    f"got {tensor.device}"
                )
        sizes: dict[str, int | SymInt] = {"": 0}
        for name, shape in shapes.items():
            value = values.get(name)
            for i, (letter, number, rows) in enumerate(shape):
                if value is not None:
                    size = value.shape[i] if name in tensors else value
                    sizes.setdefault(letter, size - number)
                elif rows and rows in sizes:
                    sizes.setdefault(letter, sizes[rows])
        outputs = []
        for shape, like in results:
            dtype = torch.int32 if like is None else tensors[like].dtype
            sizes_of_result = [sizes[letter] + number for letter, number, _ in shape]
            outputs.append(first.new_empty(sizes_of_result, dtype=dtype))
        return tuple(outputs) if outputs else None

    return call_fake


ngram_propose = _define("ngram_propose")
ngram_propose_ = _define("ngram_propose_")
ngram_step_ = _define("ngram_step_")
store_append_ = _define("store_append_")
store_propose_ = _define("store_propose_")
merge_drafts_ = _define("merge_drafts_")
prepare_next_token_ids = _define("prepare_next_token_ids")
prepare_inputs_padded = _define("prepare_inputs_padded")
prepare_inputs = _define("prepare_inputs")
prepare_input_ids_ = _define("prepare_input_ids_")
correct_num_computed_tokens_ = _define("correct_num_computed_tokens_")
compute_slot_mapping_ = _define("compute_slot_mapping_")
correct_spec_state_ = _define("correct_spec_state_")


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
