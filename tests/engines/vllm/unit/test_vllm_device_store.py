"""The V2 runner's drafts from a store in the device's memory, which these tests keep on the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import (
    LENGTH,
    ROWS,
    V2,
    WORDS,
    K,
    OperatorRecorder,
    Request,
    V2Neural,
    make_config,
    make_input_batch,
    run_random_steps,
)
from ngram_npu import NgramStore, _library
from ngram_npu.engines.vllm import v2
from ngram_npu.engines.vllm.options import Options, read_options
from ngram_npu.engines.vllm.sharing import DEVICE_STORE_TOKENS
from ngram_npu.ops import gather_sampled_tokens_
from ops import reference
from ops.reference.drafting import LATEST, compute_draft

STORE: dict[str, Any] = {"lookup": "1-16", "store": "live"}
pytestmark = pytest.mark.usefixtures("_wrap_add_requests")

SCOPE = "ngram_npu_scope"
ON_DEVICE: dict[str, Any] = {**STORE, "draft_on": "device", "store_tokens": 16384}


def read_on(device_type: str, method: Any = "v2", **options: Any) -> Options:
    batches, adaptive = options.pop("batches", 2), options.pop("adaptive", False)
    vllm_config = make_config(batches=batches, adaptive=adaptive, **options)
    vllm_config.device_config = SimpleNamespace(device_type=device_type)
    return read_options(vllm_config, method)


@pytest.mark.parametrize("lookup", ["1-16", "auto"])
@pytest.mark.parametrize("method", ["v2", "beside"])
def test_store_on_cuda_is_on_the_device_by_default(
    monkeypatch: pytest.MonkeyPatch, lookup: str, method: str
) -> None:
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: device == "cuda")
    options = read_on("cuda", method, **{**STORE, "lookup": lookup})
    assert (options.device_store, options.lookup, options.ngram.store) == (True, "1-16", None)
    assert options.has_store
    assert not options.drafts_on_host("cuda")


HOST = {"lookup": "auto", "store": "live"}


@pytest.mark.parametrize(
    ("device_type", "method", "options"),
    [
        ("cpu", "v2", HOST),
        ("npu", "ascend_v2", HOST),
        ("cuda", "ngram_gpu", HOST),
        ("cuda", "v2", {**HOST, "draft_on": "host"}),
        ("cuda", "v2", {**HOST, "adaptive": True}),
        ("cuda", "v2", {**HOST, "min_draft_probability": 0.3}),
        ("cuda", "v2", {**HOST, "token_cost": 0.1}),
        ("cuda", "v2", {**HOST, "engine": "index"}),
        ("cuda", "v2", {**HOST, "prompt_scopes": True}),
        ("cuda", "v2", {**HOST, "store": "finish"}),
        ("cuda", "v2", {**HOST, "batches": 3}),
        ("cuda", "v2", {**HOST, "lookup": "ladder", "min_draft_probability": 0.3}),
    ],
)
def test_what_needs_the_host_store_keeps_it(
    monkeypatch: pytest.MonkeyPatch, device_type: str, method: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: True)
    read = read_on(device_type, method, **options)
    assert (read.device_store, read.ngram.store) == (False, options["store"])
    assert method == "ngram_gpu" or read.drafts_on_host(device_type)


def test_cuda_without_the_kernel_keeps_the_host_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: False)
    assert not read_on("cuda", **HOST).device_store


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "finish"}, "store: expected 'live', got 'finish' for a store on the device"),
        ({"adaptive": True}, "expected no enable_adaptive_verification"),
        ({"token_cost": 0.1}, "token_cost: expected none, got 0.1 for a store on the device"),
        ({"engine": "index"}, "engine: expected no index"),
        ({"prompt_scopes": True}, "prompt_scopes: expected false, got true"),
        ({"batches": 3}, "expected at most 2 batches in flight, got 3"),
        ({"lookup": "ladder"}, "lookup: expected 'auto' or '1-16', got 'ladder'"),
        ({"lookup": "ngram"}, "lookup: expected 'auto' or '1-16', got 'ngram'"),
    ],
)
def test_option_that_needs_the_host_store_is_rejected_on_the_device(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"ngram_npu: .*{message}.*draft_on='host'"):
        read_on("cpu", **{**ON_DEVICE, **options})


@pytest.mark.parametrize(
    ("device_type", "options", "message"),
    [
        ("cpu", {}, "draft_on: expected 'device', because the default of cpu is the host"),
        ("cuda", {}, "store: expected a build with CUDA kernels"),
        ("cuda", {"draft_on": "host"}, "draft_on: expected 'auto' or 'device', got 'host'"),
        ("cuda", {"adaptive": True}, "expected no enable_adaptive_verification"),
    ],
)
def test_lookup_1_16_with_the_store_on_the_host_is_rejected(
    monkeypatch: pytest.MonkeyPatch, device_type: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(_library, "has_kernel", lambda op, device: False)
    with pytest.raises(ValueError, match=f"ngram_npu: .*{message}.*lookup='auto'"):
        read_on(device_type, **{**STORE, **options})


def test_npu_has_no_device_store() -> None:
    with pytest.raises(ValueError, match="expected a CPU or a CUDA device, got npu"):
        read_on("npu", **ON_DEVICE).check_device("v2", "npu")


class Model:
    """The reference's operators, called with the texts and scopes of the fake engine's requests."""

    def __init__(self, engine: V2) -> None:
        self.engine = engine
        names = ("slots", "text", "blocks", "table", "allocator")
        self.tensors = {name: getattr(engine.store, name).numpy().copy() for name in names}
        add_request = engine.req_states.add_request

        def add(**arguments: Any) -> None:
            add_request(**arguments)
            self.tensors["slots"][engine.get_row(arguments["req_id"])] = 0

        engine.req_states.add_request = add

    def draft(self, sampled: dict[str, list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the step's drafts, and those from the requests' own text; both padded."""
        requests = [self.engine.alive[name] for name in sampled]
        rows = np.array([self.engine.get_row(name) for name in sampled], np.int64)
        tokens, lengths = np.zeros((ROWS, LENGTH), np.int32), np.zeros(ROWS, np.int32)
        for row, request in zip(rows, requests, strict=True):
            tokens[row, : len(request.tokens)] = request.tokens
            lengths[row] = len(request.tokens)
        counts = np.array([len(new) for new in sampled.values()], np.int32)
        scopes = np.array([request.sampling_params.extra_args[SCOPE] for request in requests])
        step: dict[str, Any] = {"row_indices": rows, "scopes": scopes}
        reference.device_store_append_(
            *(tokens, lengths, counts), **step, slot_indices=rows, **self.tensors, max_new=K + 1
        )
        drafts = np.zeros((len(requests), K), np.int32)
        num_drafts, match_len = np.zeros((2, len(requests)), np.int32)
        for i, request in enumerate(requests):
            text, draft = request.tokens, []
            if counts[i]:
                draft, match_len[i] = compute_draft(text, 1, 16, K, LATEST, True, 10**9)
            drafts[i], num_drafts[i] = (draft + [text[-1]] * K)[:K], len(draft)
        own_drafts = drafts.tolist()
        reference.device_store_propose_(
            *(tokens, lengths, counts),
            **step,
            **{name: self.tensors[name] for name in ("text", "blocks", "table")},
            draft_token_ids=drafts,
            num_draft_tokens=num_drafts,
            match_len=match_len,
            fill=True,
        )
        return drafts.tolist(), own_drafts


def begin_requests_in_scopes(engine: V2, num_scopes: int) -> None:
    """Gives each request that begins from now on one of these scopes."""
    numbers, begin = itertools.count(), engine.begin

    def begin_in_scope(*requests: Request) -> None:
        for request in requests:
            request.sampling_params.extra_args = {SCOPE: next(numbers) % num_scopes}
        begin(*requests)

    engine.begin = begin_in_scope  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(2))
def test_drafts_equal_the_reference(seed: int) -> None:
    engine = V2(**ON_DEVICE)
    begin_requests_in_scopes(engine, 2)
    model = Model(engine)
    num_from_store = 0
    for sampled, drafts in run_random_steps(engine, seed, 80):
        expected, own_drafts = model.draft(sampled)
        for new, draft, right, own in zip(
            sampled.values(), drafts.values(), expected, own_drafts, strict=True
        ):
            if new:
                assert draft == right
                num_from_store += right != own
    assert num_from_store > 20
    assert engine.store.scopes.keys() == {0, 1}
    engine.store.check_integrity()


@pytest.mark.parametrize("k", [0, 1])
def test_step_with_fewer_drafts_still_stores_its_text(k: int) -> None:
    engine = V2(**ON_DEVICE)
    engine.begin(Request("a", [1]), Request("b", [2]))
    for begin in range(0, len(WORDS), K):
        engine.step({"a": WORDS[begin : begin + K]}, num_speculative_tokens=k)
    assert engine.store.statistics.tokens_held == len(WORDS) - K
    assert engine.step({"b": WORDS[:3]})["b"] == WORDS[3 : 3 + K]


def test_neural_draft_is_replaced_by_text_of_the_store() -> None:
    engine = V2Neural(**ON_DEVICE)
    engine.begin(Request("a", [1]))
    for begin in range(0, len(WORDS), K):
        engine.step({"a": WORDS[begin : begin + K]})
    engine.begin(Request("b", [2]))
    for word in WORDS[:20]:  # no neural draft token is accepted
        drafts = engine.step({"b": [word]})
    assert drafts["b"] == WORDS[20 : 20 + K]


def test_warm_up_requests_are_not_stored() -> None:
    engine = V2(**ON_DEVICE)
    engine.begin(Request("_warmup_0_", [1]))
    for _ in range(3):
        engine.step({"_warmup_0_": WORDS[:4]})
    assert engine.store.statistics.tokens_held == 0


def test_step_launches_five_kernels_and_neither_waits_nor_copies() -> None:
    engine = V2(**ON_DEVICE)
    engine.begin(Request("a", [1]))
    engine.step({"a": WORDS[:4]})
    row = engine.get_row("a")
    engine.req_states.append_tokens(row, WORDS[4:8])
    arguments = make_input_batch([row]), torch.tensor([4], dtype=torch.int32)
    with OperatorRecorder() as recorder:
        engine.drafter._look_up(*arguments, int64=True)
    # An append has two launches. Slices and allocations launch nothing.
    launches = [n for n in recorder.names if not n.startswith(("aten.slice", "aten.empty"))]
    assert launches == [
        *("aten.clamp", "aten.index.Tensor", "ngram_npu.device_store_append_"),
        *("ngram_npu.ngram_propose_", "ngram_npu.device_store_propose_"),
    ]


def test_files_are_loaded_merged_and_saved(tmp_path: Path) -> None:
    seed, file = tmp_path / "seed", tmp_path / "file"
    seeded = NgramStore(1, 4096)
    seeded.warm([WORDS])
    seeded.save(seed)
    options = {**ON_DEVICE, "store_seed": str(seed), "store_file": str(file)}
    engine = V2(**options)
    engine.begin(Request("a", [2]))
    assert engine.step({"a": WORDS[:3]})["a"] == WORDS[3 : 3 + K]
    engine.step({"a": [70, 71]})
    engine.drafter.shared_store._end()
    saved = NgramStore.load(file)
    assert [text.tolist() for _, text in saved.texts()] == [WORDS, WORDS[:3]]
    # The file contains the seed, which is not added a second time.
    assert V2(**options).store.statistics.tokens_held == len(WORDS) + 3


def test_capacity_defaults_to_a_million_tokens() -> None:
    options = {name: value for name, value in ON_DEVICE.items() if name != "store_tokens"}
    assert V2(**options).store.token_capacity == DEVICE_STORE_TOKENS == 2**20
    with pytest.raises(ValueError, match="store_tokens: expected at least"):
        V2(**{**ON_DEVICE, "store_tokens": 1024})


def test_store_with_fewer_slots_than_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match=f"store: expected at most {ROWS - 1} rows"):
        V2(**ON_DEVICE, rows=ROWS - 1)


def test_file_with_more_text_than_the_store_is_refused_and_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "file"
    host_store = NgramStore(1, 65536)
    host_store.warm([range(begin, begin + 400) for begin in range(0, 20_000, 400)])
    host_store.save(file)
    before = file.read_bytes()
    message = r"store_file: expected at most 16384 tokens, .* got 20000"
    with pytest.raises(ValueError, match=message):
        V2(**ON_DEVICE, store_file=str(file))
    assert file.read_bytes() == before
    larger = {**ON_DEVICE, "store_tokens": 65536, "store_file": str(file)}
    assert V2(**larger).store.statistics.tokens_held == 20_000


def test_gather_with_torch_equals_the_operator_in_valid_rows() -> None:
    tokens = torch.arange(40, dtype=torch.int32).view(4, 10)
    lengths, counts = torch.tensor([[10, 3, 7, 1], [2, 0, 5, 1]], dtype=torch.int32)
    rows = torch.tensor([3, 1, 0, 2])
    results = []
    for gather in (v2.gather_with_torch, gather_sampled_tokens_):
        result = torch.full((4, 6), -7, dtype=torch.int32)
        gather(tokens, lengths, counts[rows], row_indices=rows, sampled_tokens=result)
        results.append([row[1 : 1 + row[0]] for row in result.tolist()])
    assert results[0] == results[1] == [[30], [], [8, 9], [22, 23, 24, 25, 26]]
