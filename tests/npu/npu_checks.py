"""Tests calls on an NPU. test_launch.py runs these tests in a process with the simulated NPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ngram_npu
import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramStore
from ngram_npu.async_state import (
    Admission,
    AsyncConfig,
    AsyncSpecState,
    Batch,
    KVGroup,
    verify_greedy,
)
from ngram_npu.engines.vllm.ascend import AscendNgramProposerNPU, triton_ngram_spec_decode
from ngram_npu.engines.vllm.v1 import install
from ngram_npu.engines.vllm.v2 import RowDrafter, make_replacement
from ops.specs import OPSPECS
from ops.specs.spec import OpSpec
from torch.utils._pytree import tree_map
from vllm_config import make_vllm_config

acl = ctypes.CDLL("libascendcl.so")
LAUNCH = "ngram_npu_prepare_inputs_padded"


def take_record() -> list[str]:
    """Waits for the queue. Returns the launches and copies since the last call of this function."""
    torch.npu.synchronize()
    buffer = ctypes.create_string_buffer(1 << 16)
    length = acl.stand_in_take_record(buffer, len(buffer))
    assert length < len(buffer)
    return buffer.raw[:length].decode().splitlines()


def take_launches() -> list[str]:
    """Does what :func:`take_record` does, but leaves out the copies."""
    return [line for line in take_record() if line.startswith("ngram_npu_")]


def take_calls() -> list[str]:
    """Waits for the queue. Returns the calls of CANN since the last call of this function."""
    torch.npu.synchronize()
    acl.stand_in_take_calls.restype = ctypes.c_char_p
    return acl.stand_in_take_calls().decode().splitlines()


@contextmanager
def hold_device() -> Iterator[None]:
    """Stops the device until the `with` block ends."""
    acl.stand_in_hold()
    try:
        yield
    finally:
        acl.stand_in_release()


@pytest.fixture
def tensors() -> Iterator[list[torch.Tensor]]:
    """Arguments of prepare_inputs_padded: three requests with two draft tokens, one rejected."""
    values = ([2, 4, 6], [2, 2, 2], [0, 3, 6, 9])
    yield [torch.tensor(x, dtype=torch.int32).npu() for x in values]
    take_record()


def call_operator(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return torch.ops.ngram_npu.prepare_inputs_padded(*tensors)


def test_call_enqueues_one_launch(tensors: list[torch.Tensor]) -> None:
    call_operator(tensors)  # the first call loads the kernels
    take_record()
    call_operator(tensors)
    assert take_record() == [LAUNCH]
    num_sampled = torch.tensor([3, 3, 3], dtype=torch.int32).pin_memory()
    tensors[1].copy_(num_sampled, non_blocking=True)
    _, rejected = call_operator(tensors)
    assert rejected.cpu().tolist() == [0, 0, 0]
    assert take_record() == ["copy", LAUNCH, "copy"]


def test_launches_of_a_call_are_in_order() -> None:
    rows = torch.zeros((2, 9000), dtype=torch.int32).npu()  # more tokens than fit in a tile
    lengths = torch.tensor([8900, 9], dtype=torch.int32).npu()
    take_record()
    for _ in range(2):
        torch.ops.ngram_npu.ngram_propose(rows, lengths, min_n=2, max_n=4, k=3)
    assert take_record() == ["ngram_npu_ngram_propose_search", "ngram_npu_ngram_propose_draft"] * 2


def test_call_waits_neither_for_the_device_nor_for_the_queue(
    tensors: list[torch.Tensor],
) -> None:
    take_record()
    with hold_device():
        num_before = acl.stand_in_get_num_waits()
        results = [call_operator(tensors) for _ in range(100)]
        num_waits = acl.stand_in_get_num_waits() - num_before
    assert num_waits == 0
    assert take_record() == [LAUNCH] * 100
    assert all(rejected.cpu().tolist() == [1, 1, 1] for _, rejected in results)


def test_memory_of_dropped_results_is_reused_only_by_later_work(
    tensors: list[torch.Tensor],
) -> None:
    with hold_device():
        for _ in range(10):
            call_operator(tensors)
        source = torch.full((3,), 7, dtype=torch.int32).pin_memory()
        target = torch.empty(3, dtype=torch.int32, device="npu")
        target.copy_(source, non_blocking=True)
    assert target.cpu().tolist() == [7, 7, 7]


def test_launch_neither_allocates_nor_loads(tensors: list[torch.Tensor]) -> None:
    outputs = call_operator(tensors)
    take_calls()
    for _ in range(10):
        outputs = call_operator(tensors)
    calls = take_calls()
    assert calls.count("aclrtLaunchKernelWithHostArgs") == 10
    assert not [name for name in calls if "Malloc" in name or "Free" in name or "Binary" in name]
    assert outputs[1].cpu().tolist() == [1, 1, 1]


def test_call_uses_the_current_stream(tensors: list[torch.Tensor]) -> None:
    other_stream = torch.npu.Stream()
    with torch.npu.stream(other_stream):
        call_operator(tensors)
    take_record()
    assert acl.stand_in_is_last_stream(ctypes.c_void_p(other_stream.npu_stream))
    call_operator(tensors)
    take_record()
    assert not acl.stand_in_is_last_stream(ctypes.c_void_p(other_stream.npu_stream))


def test_step_of_vllm_ascend_is_one_launch() -> None:
    rows = torch.arange(24, dtype=torch.int32).reshape(2, 12) % 3
    host_arguments = (rows, torch.tensor([7, 9], dtype=torch.int32), torch.tensor([[2], [1]]).int())
    discard = torch.zeros(2, dtype=torch.bool)
    device_arguments = [t.npu() for t in host_arguments]
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 3, "method": "ngram_gpu"}
    config = make_vllm_config(k=4, max_model_len=12, max_num_seqs=2, **lookup)
    AscendNgramProposerNPU(config, torch.device("npu"), None)
    take_record()
    with hold_device():
        results = triton_ngram_spec_decode(*device_arguments, discard.npu(), 100, 2, 3, 4)
    assert take_launches() == ["ngram_npu_ngram_step"]
    AscendNgramProposerNPU(config, torch.device("cpu"), None)
    expected = triton_ngram_spec_decode(*host_arguments, discard, 100, 2, 3, 4)
    assert [r.cpu().tolist() for r in results] == [r.tolist() for r in expected]
    assert torch.equal(device_arguments[0].cpu(), rows)


def test_v2_step_of_vllm_ascend_reads_the_rows_in_place() -> None:
    rows = torch.tensor([[9, 8, 0, 0, 0, 0], [5, 6, 7, 5, 6, 0], [1, 1, 0, 0, 0, 0]]).int()
    lengths = torch.tensor([2, 5, 2], dtype=torch.int32)
    state = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=rows.npu()),
        total_len=SimpleNamespace(gpu=lengths.npu()),
        req_id_to_index={},
    )
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 2, "method": "ngram_gpu"}
    config = make_vllm_config(k=3, max_model_len=6, max_num_seqs=3, **lookup)
    speculator_class = make_replacement(object, pytest.fail, "ascend_v2")
    speculator = speculator_class(config, torch.device("npu"), state)
    indices = torch.tensor([1, -1, 0], dtype=torch.int32)
    batch = SimpleNamespace(req_ids=["a"], num_reqs=3, idx_mapping=indices.npu())
    num_sampled = torch.ones(3, dtype=torch.int32).pin_memory().to("npu")
    for _ in range(2):  # the first call may load the kernels
        take_record()
        drafts = speculator.propose(batch, None, None, None, None, num_sampled, None, None)
    assert take_record() == ["ngram_npu_ngram_propose"]
    assert drafts.cpu().tolist() == [[7, 5, 6], [-1] * 3, [8] * 3]


def test_invalid_arguments_raise_before_a_launch(tensors: list[torch.Tensor]) -> None:
    cu_num_draft_tokens, num_sampled, query_start_loc = tensors
    take_record()
    strided = num_sampled.as_strided((3,), (0,))
    for invalid in (num_sampled.cpu(), num_sampled[:2], strided):
        with pytest.raises(ValueError, match=r"^prepare_inputs_padded: num_sampled: expected"):
            call_operator([cu_num_draft_tokens, invalid, query_start_loc])
    assert LAUNCH not in take_record()


@pytest.mark.parametrize("op", OPSPECS.values(), ids=lambda op: op.name)
def test_operator_can_be_the_first_call_of_a_thread(op: OpSpec) -> None:
    """An in-place operator allocates no tensor, so nothing else sets the thread's device."""
    args = op.sample().args
    on_npu = (torch.from_numpy(x).npu() if isinstance(x, np.ndarray) else x for x in args)
    positional, keywords = op.split(tuple(on_npu))
    take_record()
    failures: list[BaseException] = []

    def call_in_thread() -> None:
        try:
            getattr(torch.ops.ngram_npu, op.name)(*positional, **keywords)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call_in_thread)
    thread.start()
    thread.join()
    assert not failures
    assert take_launches()


# The store. CANN's stand-ins do not compute torch's own operators, which here run on the host.

TORCH_OPERATORS = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "rsub.Scalar", "gt.Scalar", "clamp"),
    *("index.Tensor", "index_put_", "zero_", "fill_.Scalar", "fill_.Tensor"),
    "index_fill_.int_Scalar",
)


@pytest.fixture
def torch_operators() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for name in TORCH_OPERATORS:
        library.impl(name, _make_host_kernel(name), "PrivateUse1", allow_override=True)
    yield
    library._destroy()


def _make_host_kernel(name: str) -> Any:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def to_host(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    def run_on_host(*args: Any, **keywords: Any) -> Any:
        result = operator(*tree_map(to_host, args), **tree_map(to_host, keywords))
        return args[0].copy_(result) if packet.endswith("_") else result.npu()

    return run_on_host


STORE = {"ngram_npu": {"store": True, "store_tokens": 16384, "scope": "shared"}}
ARRAYS = ("slots", "text", "blocks", "table", "allocator")
STORE_LAUNCHES = [
    f"ngram_npu_store_{name}" for name in ("append", "append_copy", "append_write", "propose")
]


def read_store(store: NgramStore) -> list[Any]:
    return [torch.as_tensor(getattr(store, name)).cpu().tolist() for name in ARRAYS]


def run_vllm_ascend_v1(device: str) -> list[Any]:
    """Runs steps of two requests in rows that are swapped. Returns all drafts, and the store."""

    class NPUModelRunner:
        def __init__(self) -> None:
            self.input_batch = SimpleNamespace(req_ids=["a", "b"])

        def execute_model(self, scheduler_output: Any) -> None: ...

    install(SimpleNamespace(GPUModelRunner=NPUModelRunner))
    config = make_vllm_config(
        k=4, max_model_len=64, max_num_seqs=2, method="ngram_gpu", additional_config=STORE
    )
    runner = NPUModelRunner()
    drafter = AscendNgramProposerNPU(config, torch.device(device), runner)
    runner.drafter = drafter
    requests = [SimpleNamespace(req_id=n, sampling_params=None, lora_request=None) for n in "ab"]
    runner.execute_model(
        SimpleNamespace(
            scheduled_new_reqs=requests, finished_req_ids=set(), total_num_scheduled_tokens=2
        )
    )
    texts = {"a": list(range(30)), "b": [99, 3, 4]}
    lengths = {"a": 5, "b": 3}
    results = []
    for step in range(8):
        names = runner.input_batch.req_ids = ["a", "b"] if step % 5 else ["b", "a"]
        rows = torch.zeros(2, 64, dtype=torch.int32)
        for row, name in zip(rows, names, strict=True):
            row[: lengths[name]] = torch.tensor(texts[name][: lengths[name]])
        old_lengths = torch.tensor([lengths[name] for name in names], dtype=torch.int32)
        texts["b"] += texts["a"][step : step + 3]
        sampled = torch.tensor(
            [texts[name][lengths[name] : lengths[name] + 3] for name in names], dtype=torch.int32
        )
        lengths = {name: length + 3 for name, length in lengths.items()}
        arguments = [t.to(device) for t in (rows, old_lengths, sampled, torch.zeros(2).bool())]
        outputs = triton_ngram_spec_decode(*arguments, 100, 1, 16, 4)
        results.append([output.cpu().tolist() for output in outputs])
    return [results, read_store(drafter.ngram_npu.shared_store.contents)]


@pytest.mark.usefixtures("torch_operators")
def test_v1_of_vllm_ascend_uses_the_store() -> None:
    results, store = run_vllm_ascend_v1("cpu")
    assert max(store[1]) > [0]
    take_record()
    assert run_vllm_ascend_v1("npu") == [results, store]
    assert take_launches() == ["ngram_npu_ngram_step", *STORE_LAUNCHES] * 8


def run_vllm_ascend_v2(device: str) -> list[Any]:
    """Runs steps of two requests, in a batch that is padded. Returns all drafts, and the store."""
    rows, lengths = torch.zeros(2, 64, dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    rows[0, :40], rows[1, :3] = torch.arange(40), torch.tensor([99, 3, 4])
    buffers = rows.to(device), lengths.to(device)
    state = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=buffers[0]),
        total_len=SimpleNamespace(gpu=buffers[1]),
        req_id_to_index={"a": 0, "b": 1},
    )
    config = make_vllm_config(
        k=4, max_model_len=64, max_num_seqs=2, method="ngram_gpu", additional_config=STORE
    )
    speculator_class = make_replacement(object, pytest.fail, "ascend_v2")
    speculator = speculator_class(config, torch.device(device), state)
    request = SimpleNamespace(lora_request=None, sampling_params=None)
    for row in range(2):
        speculator.ngram_npu.begin(row, request)
    mapping = torch.tensor([0, 1, -1], dtype=torch.int32)
    batch = SimpleNamespace(req_ids=["a", "b"], num_reqs=3, idx_mapping=mapping.to(device))
    num_sampled = torch.full((3,), 3, dtype=torch.int32).to(device)
    drafts = []
    for step in range(8):
        lengths += 3
        rows[1, lengths[1] - 3 : lengths[1]] = rows[0, step : step + 3]
        buffers[0].copy_(rows)
        buffers[1].copy_(lengths)
        step_drafts = speculator.propose(batch, *[None] * 4, num_sampled, None, None)
        drafts.append(step_drafts.cpu().tolist())
    return [drafts, read_store(speculator.ngram_npu.shared_store.contents)]


@pytest.mark.usefixtures("torch_operators")
def test_v2_of_vllm_ascend_uses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowDrafter, "has_request_data", True)
    drafts, store = run_vllm_ascend_v2("cpu")
    assert [step[2] for step in drafts] == [[-1] * 4] * 8  # of the padding
    assert max(store[1]) > [0]
    take_record()
    assert run_vllm_ascend_v2("npu") == [drafts, store]
    assert take_launches() == ["ngram_npu_ngram_propose", *STORE_LAUNCHES] * 8


def run_async_state(device: str) -> list[Any]:
    """Runs steps of two requests. Returns their tokens and the drafts, and the store."""
    store = NgramStore(4096, device=device, num_slots=2)
    config = AsyncConfig(
        ngram=NgramConfig(k=3),
        max_rows=2,
        row_capacity=64,
        max_step_tokens=32,
        kv_groups=(KVGroup(block_size=16, max_blocks=4),),
    )
    state = AsyncSpecState(config, device=device, store=store)
    rows, prompts, blocks = np.arange(2), ((1, 4, 6, 5), (2, 2)), ((0, 1, 2, 3), (4, 5, 6, 7))
    new = [Admission(int(row), np.int32(prompts[row]), (np.int32(blocks[row]),)) for row in rows]
    joining = Batch(np.int32(rows), np.int32([4, 2]), np.int32([0, 0]), new=new)
    decoding = Batch(np.int32(rows), np.int32([4, 4]), np.int32([3, 3]))
    results: list[Any] = []
    for step in range(9):
        inputs = state.begin_step(decoding if step else joining)
        input_ids = inputs.input_ids.cpu()
        logits = torch.eye(7)[((3 * input_ids + 1) % 7).long()]  # the model and the sampler
        sampled_at, drafts_at = map(torch.from_numpy, (inputs.sample_indices, inputs.draft_indices))
        ends = inputs.cu_num_scheduled_drafts.cpu()
        sampled = verify_greedy(logits[sampled_at], input_ids[drafts_at], ends, 3)
        state.end_step(sampled.to(device))
        if step:
            result = state.reconcile()
            results += [result.sampled_token_ids.tolist(), result.num_accepted_drafts.tolist()]
    return [results, read_store(store)]


@pytest.mark.usefixtures("torch_operators")
def test_asynchronous_state_uses_the_store() -> None:
    results, store = run_async_state("cpu")
    assert max(store[1]) > [0]
    take_record()
    assert run_async_state("npu") == [results, store]
    assert take_record().count(STORE_LAUNCHES[-1]) == 9


def test_self_test_of_the_doctor_passes() -> None:
    results = ngram_npu.doctor(self_test=True).self_test
    on_npu = {result.operator: result.problem for result in results if result.device == "npu"}
    assert on_npu == dict.fromkeys(OPSPECS, "")
