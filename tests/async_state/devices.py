"""A simulated device, LateDevice, which delays its work. Countdown makes a device call fail.

A LateDevice queues operators and copies in streams. The queued work runs when the host waits for an
event, or when the policy decides, in any order that streams and events allow. The host cannot read
the device's tensors.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from ngram_npu import NgramStore
from ngram_npu.async_state import AsyncSpecState
from ngram_npu.store.contents import read_texts
from ngram_npu.store.memory import HostMemory
from ops.specs.store import STORE
from store_integrity import check_contents

Launch = tuple[Any, Callable[[], object]]
"""The signature of an operator and its arguments, and the work on the device."""

UNDEFINED_VALUE = -559038737
POLICIES = ("eager", "lazy", "main first", "side first", "random")
"""Which queued work runs after each call of the host: all, none, one stream's, or random work."""

_FUNCTIONS = {"_to_copy", "clamp", "ge", "index", "mul", "sub", "add"}
_IN_PLACE = {"clamp_", "index_fill_", "masked_fill_", "fill_"}
_ALIASES = {"slice", "view", "split_with_sizes", "unsqueeze", "detach"}


class HostReadError(AssertionError):
    """The host read a value on the device."""


class ChangedLaunchError(AssertionError):
    """Work that a graph contains would now be launched with other arguments."""


class ForbiddenWaitError(AssertionError):
    """The host waited for the device inside a block of LateDevice.forbid_waits()."""


class Event:
    """A point in a stream; it is set when the stream has run all earlier work."""

    def __init__(self, device: LateDevice, stream: str) -> None:
        self.device = device
        self.stream = stream
        self.is_set = False


class LateDevice:
    """Implements ngram_npu.async_state.Device.

    Attributes:
        launches: Names of the operators launched so far.
    """

    def __init__(self, policy: str, rng: random.Random) -> None:
        self.policy = policy  # one of POLICIES
        self.launches: list[str] = []
        self._rng = rng
        self._queues: dict[str, deque[Callable[[], object] | Event | _Wait]] = {
            "main": deque(),
            "side": deque(),
        }
        self._waits_are_errors = False
        self._captured: list[Launch] | None = None
        self._graphs: dict[Any, list[Launch]] = {}

    # The methods that AsyncSpecState calls.

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return LateTensor(torch.zeros(tuple(shape), dtype=dtype), self)

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        assert isinstance(target, LateTensor) or isinstance(source, LateTensor)
        target_value, source_value = get_value(target), get_value(source)
        if not isinstance(target, LateTensor):
            # Until the host has waited for a download, the content of its target is undefined.
            target.fill_(UNDEFINED_VALUE)
        self.launch(lambda: target_value.copy_(source_value), stream)

    def scatter(self, target: torch.Tensor, indices: torch.Tensor, source: torch.Tensor) -> None:
        """Launches ``target[indices] = source``."""
        assert isinstance(indices, LateTensor)
        assert isinstance(source, LateTensor)
        values = [get_value(tensor) for tensor in (target, indices, source)]
        self.launch(lambda: _scatter(*values))

    def record(self, stream: str) -> Event:
        event = Event(self, stream)
        self._queues[stream].append(event)
        self._run_by_policy()
        return event

    def wait(self, stream: str, event: Event) -> None:
        self._queues[stream].append(_Wait(event))
        self._run_by_policy()

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, Event), "expected a recorded event"
        if self._waits_are_errors and not event.is_set:
            raise ForbiddenWaitError("the host waits for the device")
        self._run_until(event)

    # The methods that tests call.

    def launch(
        self, work: Callable[[], object], stream: str = "main", signature: Any = None
    ) -> None:
        """Enqueues work. The signature identifies an operator and its arguments."""
        if self._captured is not None:
            self._captured.append((signature, work))
            return
        self._queues[stream].append(work)
        self._run_by_policy()

    def replay(self, key: Any, work: Callable[[], object]) -> None:
        """Launches what `work` launched in the first call with this key, like a device graph.

        Raises:
            ChangedLaunchError: `work` would now launch other operators, or use other addresses.
        """
        self._captured = []
        try:
            work()
            captured = self._captured
        finally:
            self._captured = None
        graph = self._graphs.setdefault(key, captured)
        for (signature, _), (expected, _) in zip(captured, graph, strict=True):
            if signature != expected:
                raise ChangedLaunchError(f"expected {expected}, got {signature}")
        for _, launch in graph:
            self.launch(launch)

    def drain(self) -> None:
        for stream in self._queues:
            self._run_until(self.record(stream))

    @contextmanager
    def forbid_waits(self) -> Iterator[None]:
        """Within the block, a wait of the host for an event that is not set raises an error."""
        self._waits_are_errors = True
        try:
            yield
        finally:
            self._waits_are_errors = False

    # Execution.

    def _run_until(self, event: Event) -> None:
        while not event.is_set:
            head = self._queues[event.stream][0]
            if isinstance(head, _Wait) and not head.event.is_set:
                head.event.device._run_until(head.event)
            self._run_first_item(event.stream)

    def _run_first_item(self, stream: str) -> bool:
        """Runs the first item of a stream. Returns False if the stream is empty or has to wait."""
        queue = self._queues[stream]
        if not queue or (isinstance(queue[0], _Wait) and not queue[0].event.is_set):
            return False
        head = queue.popleft()
        if isinstance(head, Event):
            head.is_set = True
        elif not isinstance(head, _Wait):
            head()
        return True

    def _run_by_policy(self) -> None:
        if self.policy == "eager":
            while self._run_first_item("main") or self._run_first_item("side"):
                pass
        elif self.policy == "main first":
            while self._run_first_item("main"):
                pass
        elif self.policy == "side first":
            while self._run_first_item("side"):
                pass
        elif self.policy == "random":
            while self._rng.random() < 0.5:
                self._run_first_item(self._rng.choice(("main", "side")))


class _Wait:
    def __init__(self, event: Event) -> None:
        self.event = event


def _scatter(target: torch.Tensor, indices: torch.Tensor, source: torch.Tensor) -> None:
    assert len(indices.unique()) == len(indices), "expected different indices in a scatter"
    target.index_copy_(0, indices, source)


class LateTensor(torch.Tensor):
    """A tensor of a LateDevice. The host can read its shape and dtype, but not its values."""

    inner: torch.Tensor
    owner: LateDevice

    @staticmethod
    def __new__(cls, inner: torch.Tensor, owner: LateDevice) -> LateTensor:
        tensor: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        tensor.inner = inner
        tensor.owner = owner
        return tensor

    def __init__(self, inner: torch.Tensor, owner: LateDevice) -> None:
        pass

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        name = function._schema.name.partition("::")[2]
        if name == "index_put_":
            target, (indices,), source = arguments
            target.owner.scatter(target, indices, source)
            return target
        if function.namespace == "ngram_npu":
            values = (*arguments, *(keywords or {}).values())
            owner = next(value.owner for value in values if isinstance(value, LateTensor))
            return _launch_operator(owner, name, function, arguments, keywords or {})
        if function is torch.ops.aten.add.out:
            return _launch_add(function, arguments, **(keywords or {}))
        if name in _FUNCTIONS:
            return _launch_torch_operator(function, arguments, keywords or {})
        if name in _IN_PLACE:
            values, named = [*map(get_value, arguments)], keywords or {}
            named = {key: get_value(value) for key, value in named.items()}
            arguments[0].owner.launch(lambda: function(*values, **named))
            return arguments[0]
        if name in _ALIASES:
            owner = arguments[0].owner
            views = function(*map(get_value, arguments), **(keywords or {}))
            if isinstance(views, torch.Tensor):
                return LateTensor(views, owner)
            return [LateTensor(view, owner) for view in views]
        raise HostReadError(f"{function} on the device is neither an operator nor a view")


def _make_read_error(name: str) -> Callable[..., Any]:
    def raise_error(*arguments: Any, **keywords: Any) -> Any:
        raise HostReadError(f"{name} reads the device on the host")

    return raise_error


for _name in (
    *("item", "tolist", "numpy", "cpu", "to", "nonzero", "__bool__", "__int__", "__float__"),
    *("__index__", "__array__", "__iter__", "__contains__", "__len__", "__format__", "any", "all"),
    *("__dlpack__", "data_ptr", "equal", "allclose", "is_nonzero", "max", "min", "sum", "copy_"),
):
    setattr(LateTensor, _name, _make_read_error(_name))


def get_value(value: Any) -> Any:
    """Returns the tensor inside a LateTensor, for work that runs on the device."""
    return value.inner if isinstance(value, LateTensor) else value


def _launch_add(function: Any, arguments: tuple[Any, ...], out: LateTensor) -> LateTensor:
    """Launches ``torch.add(*arguments, out=out)``."""
    values, target = [*map(get_value, arguments)], get_value(out)
    addresses = [*map(_get_address, (*arguments, out))]
    out.owner.launch(lambda: function(*values, out=target), signature=("add", addresses))
    return out


def _launch_torch_operator(function: Any, arguments: tuple[Any, ...], keywords: Any) -> LateTensor:
    """Launches one of torch's own operators."""
    owner = next(a.owner for a in arguments if isinstance(a, LateTensor))
    values = [[*map(get_value, a)] if isinstance(a, list) else get_value(a) for a in arguments]
    result = torch.zeros_like(function(*values, **keywords))
    owner.launch(lambda: result.copy_(function(*values, **keywords)))
    return LateTensor(result, owner)


def _get_address(value: Any) -> Any:
    if not isinstance(value, LateTensor):
        return value
    return value.inner.data_ptr(), value.shape, value.stride(), value.dtype


def _get_signature(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, LateTensor) else value


@functools.cache
def _infer_result_signatures(
    function: Any, arguments: tuple[Any, ...], keywords: tuple[Any, ...]
) -> list[Any]:
    """Returns the shapes and dtypes of the results, for arguments given by their signatures."""

    def to_meta(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        return torch.empty(value[0], dtype=value[1], device="meta")

    if not function._schema.returns:
        return []
    named = {name: to_meta(value) for name, value in keywords}
    results = function(*map(to_meta, arguments), **named)
    return [(result.shape, result.dtype) for result in results]


def _launch_operator(
    owner: LateDevice,
    name: str,
    function: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    owner.launches.append(name)
    for argument in (*arguments, *keywords.values()):
        if isinstance(argument, torch.Tensor) and not isinstance(argument, LateTensor):
            raise HostReadError(f"{name} was called with a tensor in host memory")
    positional = [*map(get_value, arguments)]
    named = {n: get_value(value) for n, value in keywords.items()}
    signatures = _infer_result_signatures(
        function,
        tuple(map(_get_signature, arguments)),
        tuple((n, _get_signature(value)) for n, value in keywords.items()),
    )
    results = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in signatures)

    def run_operator() -> None:
        for result, value in zip(results, function(*positional, **named) or (), strict=True):
            result.copy_(value)

    addresses = [*map(_get_address, (*arguments, *keywords.values()))]
    owner.launch(run_operator, signature=(name, addresses))
    return tuple(LateTensor(result, owner) for result in results) or None


class LateMemory(HostMemory):
    """The memory of a store on a LateDevice."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def zeros(self, *shape: int) -> Any:
        return self._device.tensor(shape, torch.int32)

    def place(self, array: Any) -> Any:
        return LateTensor(torch.from_numpy(array), self._device)


def make_store(device: LateDevice, tokens: int, num_slots: int) -> NgramStore:
    """Returns a store in the memory of a device."""
    memory = LateMemory(device), "cpu"
    with mock.patch("ngram_npu.store.store._make_memory", return_value=memory):
        return NgramStore(tokens, num_slots=num_slots)


def check_store(store: NgramStore) -> list[tuple[int, list[int]]]:
    """Checks a store in the memory of a device without pending work. Returns its texts."""
    arrays = {name: np.asarray(get_value(getattr(store, name))) for name in STORE}
    check_contents({name: array.astype(np.int64) for name, array in arrays.items()})
    return [(scope, text.tolist()) for scope, text in read_texts(arrays["blocks"], arrays["text"])]


class DeviceError(RuntimeError):
    """A device call failed, e.g. because memory is exhausted."""


class Countdown:
    """Makes a device call of a state fail: the ``calls_left``-th call from now on, or none if 0."""

    def __init__(self, state: AsyncSpecState) -> None:
        self.calls_left = 0
        device: Any = state._device
        for name in ("copy", "scatter", "record", "wait", "synchronize"):
            if hasattr(device, name):  # only a LateDevice has scatter
                setattr(device, name, self.wrap_call(getattr(device, name)))
        state._device_state._ops = _CountedOperators(state._device_state._ops, self)

    def wrap_call(self, call: Any) -> Any:
        def count_call(*arguments: Any, **keywords: Any) -> Any:
            if self.calls_left > 0:
                self.calls_left -= 1
                if not self.calls_left:
                    raise DeviceError("out of memory")
            return call(*arguments, **keywords)

        return count_call


class _CountedOperators:
    def __init__(self, operators: Any, countdown: Countdown) -> None:
        self._operators = operators
        self._countdown = countdown

    def __getattr__(self, name: str) -> Any:
        return self._countdown.wrap_call(getattr(self._operators, name))
