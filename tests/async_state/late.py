"""A device that runs its work late.

Operators and copies are queued in streams. They run when the host waits for an event, or when the
policy decides, but only in an order that streams and events allow. The host cannot read its
tensors.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from ngram_npu import _C, NgramConfig
from ngram_npu.index import NgramIndex, make_index

POISON = -559038737
POLICIES = ("eager", "lazy", "main first", "side first", "random")

_COPIES = {"cat", "_to_copy", "new_empty"}
_ALIASES = {"slice", "view", "unbind", "split_with_sizes", "select", "detach", "alias"}


class HostReadError(AssertionError):
    """The host asked for a value that is on the device."""


class CriticalWaitError(AssertionError):
    """The host waited on the critical path, where it must not."""


class Event:
    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.happened = False


class LateDevice:
    """See ngram_npu.async_state.Device.

    Attributes:
        without: operators that do nothing here.
        distort: by operator, a function that changes its results.
        launches: names of the operators launched so far.
    """

    def __init__(self, policy: str, rng: random.Random) -> None:
        self.policy = policy
        self.without: set[str] = set()
        self.distort: dict[str, Callable[..., None]] = {}
        self.launches: list[str] = []
        self._rng = rng
        self._queues: dict[str, deque[Callable[[], object] | Event | _Wait]] = {
            "main": deque(),
            "side": deque(),
        }
        self._critical = False

    # What AsyncSpecState uses.

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return LateTensor(torch.zeros(tuple(shape), dtype=dtype), self)

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def index(self, ngram: NgramConfig, num_slots: int, token_capacity: int) -> NgramIndex:
        made = make_index(ngram, num_slots, token_capacity, kind="torch")
        made.tensor = LateTensor(made.tensor, self)
        return made

    def jobs(self) -> LateJobs:
        return LateJobs(self)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        assert isinstance(target, LateTensor) != isinstance(source, LateTensor)
        to, real = value_of(target), value_of(source)
        if not isinstance(target, LateTensor):
            # Before the host has waited for a download, its target may contain anything.
            target.fill_(POISON)
        self.launch(lambda: to.copy_(real), stream)

    def scatter(self, target: torch.Tensor, indices: torch.Tensor, source: torch.Tensor) -> None:
        """``target[indices] = source``."""
        assert isinstance(indices, LateTensor)
        assert isinstance(source, LateTensor)
        real = [value_of(tensor) for tensor in (target, indices, source)]
        self.launch(lambda: _scatter(*real))

    def record(self, stream: str) -> Event:
        event = Event(stream)
        self._queues[stream].append(event)
        self._advance()
        return event

    def wait(self, stream: str, event: Event) -> None:
        self._queues[stream].append(_Wait(event))
        self._advance()

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, Event), "a wait for what was never recorded"
        if self._critical and not event.happened:
            raise CriticalWaitError("the host waits on the critical path")
        self._run_until(event)

    # What the tests use.

    def launch(self, work: Callable[[], object], stream: str = "main") -> None:
        self._queues[stream].append(work)
        self._advance()

    def drain(self) -> None:
        for stream in self._queues:
            self._run_until(self.record(stream))

    @contextmanager
    def critical(self) -> Iterator[None]:
        """Within the block, the host must not wait for an event that has not happened."""
        self._critical = True
        try:
            yield
        finally:
            self._critical = False

    # Execution.

    def _run_until(self, event: Event) -> None:
        while not event.happened:
            head = self._queues[event.stream][0]
            if isinstance(head, _Wait) and not head.event.happened:
                self._run_until(head.event)
            self._step(event.stream)

    def _step(self, stream: str) -> bool:
        """Runs the first item of a stream; False if there is none or it has to wait."""
        queue = self._queues[stream]
        if not queue or (isinstance(queue[0], _Wait) and not queue[0].event.happened):
            return False
        head = queue.popleft()
        if isinstance(head, Event):
            head.happened = True
        elif not isinstance(head, _Wait):
            head()
        return True

    def _advance(self) -> None:
        if self.policy == "eager":
            while self._step("main") or self._step("side"):
                pass
        elif self.policy == "main first":
            while self._step("main"):
                pass
        elif self.policy == "side first":
            while self._step("side"):
                pass
        elif self.policy == "random":
            while self._rng.random() < 0.5:
                self._step(self._rng.choice(("main", "side")))


class LateJobs:
    """See ngram_npu.host_drafting.Stream."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert isinstance(to, LateTensor) != isinstance(source, LateTensor)
        target, real = value_of(to), value_of(source)
        self._device.launch(lambda: target.copy_(real))

    def run(self, job: int) -> None:
        self._device.launch(lambda: _C.stream_run(job))

    def again(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Wait:
    def __init__(self, event: Event) -> None:
        self.event = event


def _scatter(target: torch.Tensor, indices: torch.Tensor, source: torch.Tensor) -> None:
    assert len(indices.unique()) == len(indices), "places that are written twice"
    target.index_copy_(0, indices, source)


class LateTensor(torch.Tensor):
    """A tensor of a LateDevice: shape and type are known, values are not."""

    inner: torch.Tensor
    owner: LateDevice

    @staticmethod
    def __new__(cls, inner: torch.Tensor, owner: LateDevice) -> LateTensor:
        made: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        made.inner = inner
        made.owner = owner
        return made

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
            given = (*arguments, *(keywords or {}).values())
            owner = next(a.owner for a in given if isinstance(a, LateTensor))
            return _launch(owner, name, function, arguments, keywords or {})
        if name in _COPIES:
            return _computed(function, arguments, keywords or {})
        if name in _ALIASES:
            owner = arguments[0].owner
            made = function(*map(_inner, arguments), **(keywords or {}))
            if isinstance(made, torch.Tensor):
                return LateTensor(made, owner)
            return [LateTensor(t, owner) for t in made]
        raise HostReadError(f"{function} on the device is neither an operator nor a view")


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise HostReadError(f"{name} reads the device on the host")

    return refuse


for _name in (
    *("item", "tolist", "numpy", "cpu", "to", "nonzero", "__bool__", "__int__", "__float__"),
    *("__index__", "__array__", "__iter__", "__contains__", "__len__", "__format__", "any", "all"),
    *("__dlpack__", "data_ptr", "equal", "allclose", "is_nonzero", "max", "min", "sum", "copy_"),
):
    setattr(LateTensor, _name, _refuse(_name))


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, LateTensor) else value


def _computed(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> LateTensor:
    """The result of one of torch's own operators, once its turn comes."""
    first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
    real = [[*map(_inner, a)] if isinstance(a, list) else _inner(a) for a in arguments]
    result = torch.zeros_like(function(*real, **keywords))
    first.owner.launch(lambda: result.copy_(function(*real, **keywords)))
    return LateTensor(result, first.owner)


def _seen(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, LateTensor) else value


@functools.cache
def _names(function: Any) -> list[str]:
    return [argument.name for argument in function._schema.arguments]


@functools.cache
def _results(function: Any, arguments: tuple[Any, ...], keywords: tuple[Any, ...]) -> list[Any]:
    """Shapes and types of the results. A tensor is given as its shape and type."""

    def meta(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        return torch.empty(value[0], dtype=value[1], device="meta")

    if not function._schema.returns:
        return []
    found = function(*map(meta, arguments), **{n: meta(value) for n, value in keywords})
    return [(result.shape, result.dtype) for result in found]


def _launch(
    owner: LateDevice,
    name: str,
    function: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    owner.launches.append(name)
    for argument in (*arguments, *keywords.values()):
        if isinstance(argument, torch.Tensor) and not isinstance(argument, LateTensor):
            raise HostReadError(f"{name} was given a tensor of the host")
    real = {n: _inner(value) for n, value in zip(_names(function), arguments, strict=False)}
    positional = tuple(real.values())
    named = {n: _inner(value) for n, value in keywords.items()}
    real |= named
    seen = tuple(map(_seen, arguments)), tuple((n, _seen(value)) for n, value in keywords.items())
    results = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in _results(function, *seen))

    def work() -> None:
        for result, found in zip(results, function(*positional, **named) or (), strict=True):
            result.copy_(found)
        if name in owner.distort:
            owner.distort[name](real, results)

    if name not in owner.without:
        owner.launch(work)
    return tuple(LateTensor(result, owner) for result in results) or None


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The current value of a tensor, for work that runs on the device."""
    return tensor.inner if isinstance(tensor, LateTensor) else tensor
