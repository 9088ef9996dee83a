"""Runs the V2 runner with different drafting methods, and records its outputs and drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import LOOKUP, Engine, K
from ngram_npu import StoreStatistics, host_drafting
from ngram_npu.engines.vllm import admission, plugin
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as stock_module

admission.install()  # the part of the plugin that a store needs in addition to the speculator

STOCK = stock_module.NgramGPUSpeculator
MAX_MODEL_LEN = 256
GRAMMAR = r"( self\.[a-z]+ = [a-z]+\n)+"

OPTIONS: dict[str, Any] = {
    **engines.OPTIONS,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 10,  # too few for eight requests: preemption
}


@dataclass(frozen=True)
class Method:
    """A drafting method and the way of scheduling."""

    name: str | None = "ngram_gpu"
    asynchronous: bool = True
    ours: dict[str, Any] | None = None
    """Options of ngram_npu; None: vLLM's own speculator."""
    adaptive: bool = False
    """Whether vLLM chooses which drafts to verify."""
    stream: Callable[[Any, Run], DelayedStream] | None = None
    """Makes the stream for drafting on the host; None: everything runs immediately."""

    @property
    def arguments(self) -> dict[str, Any]:
        speculative = {"method": self.name, "num_speculative_tokens": K, **LOOKUP}
        if self.adaptive:
            speculative["enable_adaptive_verification"] = True
        return {
            **OPTIONS,
            "speculative_config": speculative if self.name else None,
            "additional_config": {"ngram_npu": self.ours} if self.ours else {},
            "async_scheduling": self.asynchronous,
        }


class DelayedStream(host_drafting.SynchronousStream):
    """Delays copies and jobs until the runner reads the drafts in its next step."""

    def __init__(self, runner: Any, result: Run) -> None:
        self._tasks: list[Callable[[], object]] = []
        self._runner = runner
        host, prepare_inputs = runner.speculator._host, runner.prepare_inputs
        host._stream = self
        for name in ("begin", "end"):
            setattr(host, name, self._count_pending(getattr(host, name), result))

        def synchronized(*args: Any) -> Any:
            self.synchronize()
            return prepare_inputs(*args)

        runner.prepare_inputs = synchronized

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.add(lambda: to.copy_(source))

    def run(self, job: int) -> None:
        self.add(lambda: super(DelayedStream, self).run(job))

    def add(self, task: Callable[[], object]) -> None:
        self._tasks.append(task)

    def copy_drafts_to_runner(self, batch: Any, drafts: torch.Tensor) -> None:
        """Repeats the runner's copies of the drafts, which it made before the drafts existed."""
        state, handler = self._runner.req_states, self._runner.draft_tokens_handler

        def copy() -> None:
            for req_id, row, draft in zip(batch.req_ids, batch.idx_mapping, drafts, strict=True):
                if state.req_id_to_index.get(req_id) == row:
                    state.draft_tokens[row] = draft
            if handler.draft_tokens_np is not None:
                handler.draft_tokens_np[:] = drafts.numpy()

        self.add(copy)

    @torch.inference_mode()
    def synchronize(self) -> None:
        while self._tasks:
            self._tasks.pop(0)()

    def _count_pending(self, call: Callable[..., Any], result: Run) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result.changes_while_pending += bool(self._tasks)
            return call(*args, **kwargs)

        return counted


class UnorderedStream(DelayedStream):
    """A fault: jobs run before the copies that precede them."""

    def run(self, job: int) -> None:
        host_drafting.SynchronousStream.run(self, job)


LADDER = {**engines.LADDER, "metrics": True}
INDEX_FINISH = {**LADDER, "engine": "index", "store": "finish"}

# vLLM schedules "ngram" synchronously only.
METHODS = {
    "none": Method(name=None),
    "stock": Method(),
    "async-scan": Method(ours={"engine": "scan"}),
    "async-index": Method(ours={"engine": "index", "metrics": True}),
    "sync-scan": Method("ngram", asynchronous=False, ours={"engine": "scan", "metrics": True}),
    "sync-index": Method("ngram", asynchronous=False, ours={"engine": "index"}),
    "other-options": Method(ours={"engine": "index", "match_policy": "earliest", "overlap": True}),
    "ladder": Method(ours=LADDER),
    "ladder-adaptive": Method(ours=LADDER, adaptive=True),
    "store": Method(ours={**LADDER, "store": "live"}),
    "late-index": Method(ours={"engine": "index"}, stream=DelayedStream),
    "late-store": Method(ours={**LADDER, "store": "live", "metrics": False}, stream=DelayedStream),
    "store-finish": Method("ngram", asynchronous=False, ours=INDEX_FINISH),
}


@dataclass
class Run:
    """Results of one batch of requests from one engine."""

    outputs: list[tuple[list[int], str | None]] = field(default_factory=list)
    """Each request's tokens and finish reason."""
    batch_queue_size: int = 0
    preemptions: int = 0
    accepted: int = 0
    rows: int = 0
    """Rows that sampled a token and drafted, over all steps."""
    prefilling: int = 0
    """Rows that sampled nothing."""
    partly_accepted: int = 0
    """Rows with some, but not all, of their drafts accepted."""
    matched: int = 0
    """Rows whose drafts are not just the newest token repeated."""
    mismatches: list[str] = field(default_factory=list)
    """Rows whose drafts differ from the expected ones."""
    state_changes: int = 0
    """Calls of `propose` that changed the runner's state."""
    steps: int = 0
    waits: int = 0
    """Waits of the host for an event."""
    waits_in_propose: int = 0
    draft_counts: Any = None
    """[2, K] draft tokens verified and accepted by position, if the speculator counts them."""
    not_verified: int = 0
    """Draft tokens that vLLM chose not to verify."""
    store: StoreStatistics | None = None
    """Statistics of the shared store, after its integrity check."""
    drafts: list[tuple[str, list[int]]] = field(default_factory=list)
    """Each drafted row's request and draft, in the order of the steps."""
    grammars: int = 0
    """Steps with requests that have a grammar."""
    scopes: int = 0
    """Scopes with text in the store."""
    changes_while_pending: int = 0
    """Begins and ends of requests while jobs of the previous step were pending."""

    def find_different(self, other: Run) -> list[int]:
        """Returns the requests whose tokens or finish reason differ."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        return [i for i, (a, b) in enumerate(pairs) if a != b]

    def count_rows(self, num_sampled: torch.Tensor) -> None:
        """Adds a step's rows by the number of sampled tokens."""
        self.steps += 1
        self.rows += int((num_sampled > 0).sum())
        self.prefilling += int((num_sampled == 0).sum())
        self.partly_accepted += int(((num_sampled > 1) & (num_sampled <= K)).sum())


def make_requests(model: Path) -> list[tuple[list[int], SamplingParams]]:
    """Makes 20 requests: chunks, shared prefixes, stops, penalties, ends at max_model_len, two
    grammars and two scopes."""
    ids = engines.encode_corpus(model, 60_000)
    requests = []
    for i in range(20):
        length = 16 + 37 * i % 70
        start = i * 577
        prompt = ids[start : start + length] + ids[start : start + 12]
        params: dict[str, Any] = {"max_tokens": 20 + 7 * i % 30, "ignore_eos": True}
        match i % 5:
            case 1:  # ends at the model's maximum length
                prompt = ids[start : start + MAX_MODEL_LEN - 14 - i]
                params["max_tokens"] = MAX_MODEL_LEN - len(prompt)
            case 2:
                params["stop_token_ids"] = prompt[5:15]
            case 3:
                params["repetition_penalty"] = 1.3
            case 4:
                prompt = ids[:64] + prompt[:16]
                params["extra_args"] = {EXTRA_ARGUMENT: "tenant"}
            case 0 if i >= 10:
                params["structured_outputs"] = StructuredOutputsParams(regex=GRAMMAR)
        requests.append((prompt, SamplingParams(temperature=0, **params)))
    return requests


def run(model: Path, method: Method, count: int = 20) -> Run:
    """Runs the first `count` requests at once, with a new engine."""
    result = Run()
    if method.ours is not None:
        plugin.install_v2()
        assert stock_module.NgramGPUSpeculator is not STOCK
    with start_engine(model, method.arguments, result, method.adaptive) as engine:
        stream = None
        if method.name:
            module = type(engine.drafter).__module__
            assert module.startswith("ngram_npu.") == bool(method.ours)
            if method.stream is not None:
                stream = method.stream(engine.runner, result)
            _record(engine, result, stream)
        serve(engine, make_requests(model)[:count], result)
        if stream is not None:
            stream.synchronize()
        if getattr(engine.drafter, "_stats", None) is not None:
            result.draft_counts = take_draft_counts(engine.drafter)
        shared = getattr(engine.drafter, "shared_store", None)
        if shared is not None:
            shared.contents.check_integrity()
            result.store = shared.contents.statistics
            result.scopes = len(shared.contents.scopes)
        del shared, stream
    return result


@contextmanager
def start_engine(
    model: Path, arguments: dict[str, Any], result: Run, adaptive: bool = False
) -> Iterator[Engine]:
    """Starts an engine for the block, and counts its waits for events in `result`."""
    event, torch.cuda.Event = torch.cuda.Event, _make_counting_event(torch.cuda.Event, result)
    patches = pytest.MonkeyPatch()
    if adaptive:
        _allow_adaptive_verification(patches)
    try:
        engine = Engine(model, **arguments)
        result.batch_queue_size = engine.batch_queue_size
        if adaptive:
            _set_step_times(engine.runner.adaptive_verification, result)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        patches.undo()
        torch.cuda.Event = event
        cleanup_dist_env_and_memory()
        stock_module.NgramGPUSpeculator = STOCK  # type: ignore[misc]


def serve(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], result: Run
) -> None:
    """Runs all of these requests at once, and writes outputs and vLLM's counts to `result`."""
    waits = result.waits
    outputs = engine.llm.generate(
        [{"prompt_token_ids": tokens} for tokens, _ in requests],
        [params for _, params in requests],
        use_tqdm=False,
    )
    result.waits -= waits
    samples = [output.outputs[0] for output in outputs]
    result.outputs = [(list(sample.token_ids), sample.finish_reason) for sample in samples]
    result.preemptions, result.accepted = engine.read_counters()


def take_draft_counts(drafter: Any) -> Any:
    """Returns [2, K] draft tokens verified and accepted by position, as the drafter counts them."""
    return drafter._stats.acceptance.read_and_reset().sum(1)


def call_stock(stock: Any, state: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the stock speculator's drafts, but the prompt's last token in rows that are still
    prefilling. vLLM ignores those drafts; its speculator repeats the row's last sampled token."""
    drafts = stock.propose(batch, *args, **kwargs)
    last = state.all_token_ids.gpu[batch.idx_mapping, state.total_len.gpu[batch.idx_mapping] - 1]
    return torch.where(args[4][:, None] > 0, drafts, last[:, None])


@contextmanager
def observe_propose(state: Any, result: Run) -> Iterator[None]:
    """Counts waits and changes of the runner's state within the block."""
    before = state.all_token_ids.gpu.clone(), state.total_len.gpu.clone()
    waits = result.waits
    yield
    result.waits_in_propose += result.waits - waits
    after = state.all_token_ids.gpu, state.total_len.gpu
    result.state_changes += not all(map(torch.equal, before, after))


def _record(engine: Engine, result: Run, stream: DelayedStream | None) -> None:
    """Compares every call of `propose` with the stock speculator's on the same state."""
    speculator, state = engine.drafter, engine.runner.req_states
    stock = STOCK(engine.llm.llm_engine.vllm_config, engine.runner.device, state)
    propose = speculator.propose

    def recorded(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = propose(input_batch, *args, **kwargs)
            return drafts
        expected = call_stock(stock, state, input_batch, *args, **kwargs)
        with observe_propose(state, result):
            drafts = propose(input_batch, *args, **kwargs)
        result.grammars += input_batch.has_structured_output_reqs
        num_sampled = args[4]
        newest = state.last_sampled_tokens[input_batch.idx_mapping]
        result.count_rows(num_sampled)
        result.matched += int(((expected != newest).any(1) & (num_sampled > 0)).sum())

        def compare() -> None:
            rows = zip(input_batch.req_ids, drafts.tolist(), expected.tolist(), strict=True)
            for name, draft, right in rows:
                result.drafts.append((name.partition("-")[0], draft))  # without random digits
                if draft != right:
                    result.mismatches.append(f"{name}: {draft} instead of {right}")

        if stream is None:
            compare()
        else:
            stream.add(compare)
            stream.copy_drafts_to_runner(input_batch, drafts)
        return drafts

    speculator.propose = recorded


def _allow_adaptive_verification(patches: pytest.MonkeyPatch) -> None:
    """Removes vLLM's requirement of CUDA graphs; only the time per step is needed here."""
    patches.setattr(VllmConfig, "_validate_adaptive_verification", lambda self: None)
    patches.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **_: mode)
    patches.setattr(
        adaptive_verification, "get_varlen_cudagraph_unsupported_backend", lambda *_, **__: None
    )


def _set_step_times(manager: Any, result: Run) -> None:
    """Sets the time of each further token to a tenth of a step, and counts what vLLM leaves out."""
    manager.set_cost_curves([(1, 0.01), (8, 0.01)], [(1, 1.0), (101, 11.0)])
    get_num_tokens = manager.get_num_tokens

    def counted(num_tokens: Any, drafts: Any) -> Any:
        chosen = get_num_tokens(num_tokens, drafts)
        result.not_verified += sum(num_tokens.values()) - chosen
        return chosen

    manager.get_num_tokens = counted


def _make_counting_event(event: Any, result: Run) -> type:
    """Makes a subclass of vLLM's replacement for an event that counts waits."""

    class Event(event):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.synchronize = self._count_wait

        def _count_wait(self) -> None:
            result.waits += 1

    return Event
