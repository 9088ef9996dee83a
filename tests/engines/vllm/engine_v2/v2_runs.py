"""vLLM's engine with the V2 runner in this process: its outputs and drafts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401, puts stand-ins in the place of events
from ngram_npu import StoreStatistics, host_drafting
from ngram_npu.engines.vllm import admission, plugin
from ngram_npu.engines.vllm.options import EXTRA_ARGUMENT
from tiny_model import corpus
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as stock_module

admission.install()  # the part of the plugin that a store needs besides the speculator

STOCK = stock_module.NgramGPUSpeculator
K = 4
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
MAX_MODEL_LEN = 256
GRAMMAR = r"( self\.[a-z]+ = [a-z]+\n)+"

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,  # less than the prompts of a step: prefill in chunks
    "block_size": 32,
    "num_gpu_blocks_override": 10,  # too few for eight requests: preemption
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}


@dataclass(frozen=True)
class Method:
    """One way of drafting and of scheduling."""

    name: str | None = "ngram_gpu"
    asynchronous: bool = True
    ours: dict[str, Any] | None = None
    """Options; None: vLLM's own speculator."""
    prepare: Callable[[Any], None] = field(default=lambda speculator: None)
    """A change to the speculator before it is used."""
    adaptive: bool = False
    """Whether vLLM chooses which drafts to verify."""
    stream: Callable[[Any, Run], LateStream] | None = None
    """Makes the stream for drafting on the host; None: everything runs at once."""

    @property
    def arguments(self) -> dict[str, Any]:
        speculative = {"method": self.name, "num_speculative_tokens": K, **LOOKUP}
        if self.adaptive:
            speculative["enable_adaptive_verification"] = True
        return {
            **ENGINE,
            "speculative_config": speculative if self.name else None,
            "additional_config": {"ngram_npu": self.ours} if self.ours else {},
            "async_scheduling": self.asynchronous,
        }


class LateStream(host_drafting.CallingThread):
    """Copies and jobs wait until the runner reads the drafts: in its next step."""

    def __init__(self, runner: Any, result: Run) -> None:
        self._tasks: list[Callable[[], object]] = []
        self._runner = runner
        host, prepare_inputs = runner.speculator._host, runner.prepare_inputs
        host._stream = self
        for name in ("begin", "end"):
            setattr(host, name, self._counted(getattr(host, name), result))

        def arrived(*args: Any) -> Any:
            self.arrive()
            return prepare_inputs(*args)

        runner.prepare_inputs = arrived

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.add(lambda: to.copy_(source))

    def run(self, job: int) -> None:
        self.add(lambda: super(LateStream, self).run(job))

    def add(self, task: Callable[[], object]) -> None:
        self._tasks.append(task)

    def pass_on(self, batch: Any, drafts: torch.Tensor) -> None:
        """The runner passes drafts on at once, before they have come: they follow."""
        state, handler = self._runner.req_states, self._runner.draft_tokens_handler

        def passed_on() -> None:
            for req_id, row, draft in zip(batch.req_ids, batch.idx_mapping, drafts, strict=True):
                if state.req_id_to_index.get(req_id) == row:
                    state.draft_tokens[row] = draft
            if handler.draft_tokens_np is not None:
                handler.draft_tokens_np[:] = drafts.numpy()

        self.add(passed_on)

    @torch.inference_mode()
    def arrive(self) -> None:
        while self._tasks:
            self._tasks.pop(0)()

    def _counted(self, call: Callable[..., Any], result: Run) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result.announced += bool(self._tasks)
            return call(*args, **kwargs)

        return counted


class HastyStream(LateStream):
    """A fault: jobs run before the copies that are in front of them."""

    def run(self, job: int) -> None:
        host_drafting.CallingThread.run(self, job)


LADDER = {"sizes": "ladder", "min_draft_probability": 0.177, "metrics": True}

# vLLM's gate lets "ngram" be scheduled synchronously only.
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
    "late-index": Method(ours={"engine": "index"}, stream=LateStream),
    "late-store": Method(ours={**LADDER, "store": "live", "metrics": False}, stream=LateStream),
    "store-finish": Method(
        "ngram", asynchronous=False, ours={**LADDER, "engine": "index", "store": "finish"}
    ),
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
    """Drafted rows, over all steps, for which something was sampled."""
    prefilling: int = 0
    """Rows for which nothing was sampled."""
    partly_accepted: int = 0
    """Rows with some, but not all, of their drafts accepted."""
    found: int = 0
    """Rows whose drafts are not just the newest token repeated."""
    mismatches: list[str] = field(default_factory=list)
    """Rows whose drafts are not the stock speculator's."""
    state_changes: int = 0
    """Calls that changed the runner's state."""
    steps: int = 0
    waits: int = 0
    """Number of waits for an event."""
    waits_in_propose: int = 0
    counted: Any = None
    """[2, K], draft tokens verified and accepted by position, if the speculator counts them."""
    left_out: int = 0
    """Drafts that vLLM chose not to verify."""
    store: StoreStatistics | None = None
    """Of the requests' shared store, which was found consistent."""
    drafts: list[tuple[str, list[int]]] = field(default_factory=list)
    """Each drafted row's request and draft, in the order of the steps."""
    grammars: int = 0
    """Steps with requests that have a grammar."""
    scopes: int = 0
    """Scopes whose text the store holds."""
    announced: int = 0
    """Begins and ends of requests while jobs of the step before were pending."""

    def differing(self, other: Run) -> list[int]:
        """The requests whose tokens or finish reason differ."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        return [i for i, (a, b) in enumerate(pairs) if a != b]


def requests(tokenizer: Any) -> list[tuple[list[int], SamplingParams]]:
    """20 requests: chunks, shared prefixes, stops, penalties, ends at max_model_len, two grammars
    and two scopes."""
    ids: list[int] = tokenizer.encode(corpus()[1_000_000:1_060_000])
    made = []
    for i in range(20):
        length = 16 + 37 * i % 70
        start = i * 577
        prompt = ids[start : start + length] + ids[start : start + 12]
        params: dict[str, Any] = {"max_tokens": 20 + 7 * i % 30, "ignore_eos": True}
        match i % 5:
            case 1:  # until the model's length ends it
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
        made.append((prompt, SamplingParams(temperature=0, **params)))
    return made


def run(model: Path, method: Method, first: int = 20) -> Run:
    """Runs the first of the requests at once, with a fresh engine."""
    result = Run()
    if method.ours is not None:
        plugin.install_v2()
        assert stock_module.NgramGPUSpeculator is not STOCK
    with engine(model, method.arguments, result, method.adaptive) as (llm, runner):
        late = None
        if method.name:
            assert type(runner.speculator).__module__.startswith("ngram_npu.") == bool(method.ours)
            method.prepare(runner.speculator)
            if method.stream is not None:
                late = method.stream(runner, result)
            _record(runner, llm.llm_engine.vllm_config, result, late)
        serve(llm, requests(llm.get_tokenizer())[:first], result)
        if late is not None:
            late.arrive()
        if getattr(runner.speculator, "_stats", None) is not None:
            result.counted = counted(runner.speculator)
        shared = getattr(runner.speculator, "shared_store", None)
        if shared is not None:
            shared.contents.check_integrity()
            result.store = shared.contents.statistics
            result.scopes = len(shared.contents.scopes)
        del llm, runner, shared, late
    return result


@contextmanager
def engine(
    model: Path, arguments: dict[str, Any], result: Run, adaptive: bool = False
) -> Iterator[tuple[LLM, Any]]:
    """An engine and its runner for the block, which must drop both at its end."""
    event, torch.cuda.Event = torch.cuda.Event, _counting(torch.cuda.Event, result)
    patched = pytest.MonkeyPatch()
    if adaptive:
        _let_adaptive_be_asked_for(patched)
    try:
        llm = LLM(str(model), **arguments)
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        result.batch_queue_size = core.batch_queue_size
        runner = core.model_executor.driver_worker.worker.model_runner
        if adaptive:
            _choose(runner.adaptive_verification, result)
        yield llm, runner
        del llm, core, runner
        gc.collect()
    finally:
        patched.undo()
        torch.cuda.Event = event
        cleanup_dist_env_and_memory()
        stock_module.NgramGPUSpeculator = STOCK  # type: ignore[misc]


def serve(llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]], result: Run) -> None:
    """Runs all of these requests at once; returns vLLM's counts too."""
    waits = result.waits
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for tokens, _ in asked],
        [params for _, params in asked],
        use_tqdm=False,
    )
    result.waits -= waits
    ends = [output.outputs[0] for output in outputs]
    result.outputs = [(list(end.token_ids), end.finish_reason) for end in ends]
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    result.preemptions = int(values["vllm:num_preemptions"])
    result.accepted = int(values.get("vllm:spec_decode_num_accepted_tokens", 0))


def counted(lookup: Any) -> Any:
    """[2, K], draft tokens verified and accepted by position, as counted by the drafter."""
    return lookup._stats.acceptance.read_and_reset().sum(1)


def stocks_drafts(stock: Any, state: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The expected drafts: the same, but the prompt's last token in rows whose prefill goes on.
    vLLM ignores those drafts; its speculator repeats the token last sampled in that row, if any."""
    drafts = stock.propose(batch, *args, **kwargs)
    last = state.all_token_ids.gpu[batch.idx_mapping, state.total_len.gpu[batch.idx_mapping] - 1]
    return torch.where(args[4][:, None] > 0, drafts, last[:, None])


def _record(runner: Any, vllm_config: Any, result: Run, late: LateStream | None) -> None:
    """Compares every call with the stock speculator's on the same state."""
    speculator, state = runner.speculator, runner.req_states
    stock = STOCK(vllm_config, runner.device, state)
    propose = speculator.propose

    def recorded(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dummy_run"):
            drafts: torch.Tensor = propose(input_batch, *args, **kwargs)
            return drafts
        expected = stocks_drafts(stock, state, input_batch, *args, **kwargs)
        before = state.all_token_ids.gpu.clone(), state.total_len.gpu.clone()
        waits = result.waits
        drafts = propose(input_batch, *args, **kwargs)
        result.waits_in_propose += result.waits - waits
        after = state.all_token_ids.gpu, state.total_len.gpu
        result.state_changes += not all(map(torch.equal, before, after))
        result.steps += 1
        result.grammars += input_batch.has_structured_output_reqs
        num_sampled = args[4]
        newest = state.last_sampled_tokens[input_batch.idx_mapping]
        result.rows += int((num_sampled > 0).sum())
        result.prefilling += int((num_sampled == 0).sum())
        result.partly_accepted += int(((num_sampled > 1) & (num_sampled <= K)).sum())
        result.found += int(((expected != newest).any(1) & (num_sampled > 0)).sum())

        def compare() -> None:
            names = input_batch.req_ids
            both = drafts.tolist(), expected.tolist()
            for name, ours, theirs in zip(names, *both, strict=True):
                result.drafts.append((name.partition("-")[0], ours))  # then random digits
                if ours != theirs:
                    result.mismatches.append(f"{name}: {ours} instead of {theirs}")

        if late is None:
            compare()
        else:
            late.add(compare)
            late.pass_on(input_batch, drafts)
        return drafts

    speculator.propose = recorded


def _let_adaptive_be_asked_for(patched: pytest.MonkeyPatch) -> None:
    """For GPU graphs; without them only the cost of a step is needed."""
    patched.setattr(VllmConfig, "_validate_adaptive_verification", lambda self: None)
    patched.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **_: mode)
    patched.setattr(
        adaptive_verification, "get_varlen_cudagraph_unsupported_backend", lambda *_, **__: None
    )


def _choose(manager: Any, result: Run) -> None:
    """Pretends that each further token costs a tenth of a step."""
    manager.set_cost_curves([(1, 0.01), (8, 0.01)], [(1, 1.0), (101, 11.0)])
    get_num_tokens = manager.get_num_tokens

    def counted(num_tokens: Any, drafts: Any) -> Any:
        chosen = get_num_tokens(num_tokens, drafts)
        result.left_out += sum(num_tokens.values()) - chosen
        return chosen

    manager.get_num_tokens = counted


def _counting(event: Any, result: Run) -> type:
    """vLLM's stand-in for an event, whose waits are counted."""

    class Event(event):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.synchronize = self._wait

        def _wait(self) -> None:
            result.waits += 1

    return Event
