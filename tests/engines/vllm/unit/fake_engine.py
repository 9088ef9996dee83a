"""Fakes of vLLM's configuration, requests and runners. Each fake runner keeps requests in rows and
calls its drafter as the real runner does, and checks what the real runner relies on."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ngram_npu.engines.vllm import NgramProposer, ascend, neural, v1, v2
from ngram_npu.engines.vllm.drafter import ATTRIBUTE, Drafter
from ngram_npu.engines.vllm.options import read_options
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_config import make_vllm_config

CPU = torch.device("cpu")
K, ROWS, LENGTH, VOCABULARY = 4, 6, 96, 100
"""Number of draft tokens, number of rows, max_model_len, and size of the vocabulary."""
WORDS = list(range(50, 90))
STORE: dict[str, Any] = {"store": True, "store_tokens": 16384, "scope": "shared"}


def make_config(
    *,
    method: str = "ngram_gpu",
    bounds: tuple[int, int] = (2, 4),
    k: int = K,
    rows: int = ROWS,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
    rank: int = 0,
    ranks: int = 1,
    batches: int = 1,
    adaptive: bool = False,
    **options: Any,
) -> Any:
    """Returns a VllmConfig with these options of ngram_npu."""
    result = make_vllm_config(
        k=k,
        max_model_len=length,
        max_num_seqs=rows,
        rank=rank,
        tensor_parallel_size=ranks,
        additional_config={"ngram_npu": options},
        method=method,
        prompt_lookup_min=bounds[0],
        prompt_lookup_max=bounds[1],
    )
    result.max_concurrent_batches = batches
    result.speculative_config.enable_adaptive_verification = adaptive
    result.model_config.get_vocab_size = lambda: vocabulary
    return result


def make_store_config(rank: int = 0, *, store: bool = True, ranks: int = 1, **options: Any) -> Any:
    """Returns a VllmConfig with a small store, or without a store."""
    section = {**(STORE if store else {}), **options}
    return make_config(rank=rank, ranks=ranks, length=400, vocabulary=1000, **section)


def make_adapter(number: int, name: str) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name=name)


def make_params(*, is_stored: bool = True) -> Any:
    """Returns sampling parameters without stop conditions."""
    extra_args = None if is_stored else {"ngram_npu_store": False}
    stop = dict.fromkeys(("stop_token_ids", "eos_token_id", "repetition_detection"))
    return SimpleNamespace(extra_args=extra_args, max_tokens=1 << 20, **stop)


class Request:
    """A request, with the attributes of the scheduler's ``NewRequestData``."""

    def __init__(
        self,
        req_id: str,
        prompt: list[int],
        salt: str | None = None,
        adapter: Any = None,
        *,
        is_stored: bool = True,
    ) -> None:
        self.req_id, self.tokens, self.prompt_len = req_id, list(prompt), len(prompt)
        self.lora_request, self.cache_salt = adapter, salt
        self.sampling_params = make_params(is_stored=is_stored)


class Engine:
    """Requests and the drafter that a runner calls after each step."""

    pads = False
    """Whether the runner gets K draft tokens per request, padded with the newest token."""

    def __init__(self) -> None:
        self.alive: dict[str, Request] = {}

    def begin(self, *requests: Request) -> None:
        self.alive |= {request.req_id: request for request in requests}

    def end(self, name: str) -> None:
        del self.alive[name]

    def preempt(self, name: str) -> None:
        """Removes a request from the batch. The request stays alive and may resume later."""

    def begin_step(self, scheduler_output: Any) -> None:
        """Does what the runner does with the scheduler's output before it executes a step."""
        assert self.runner.execute_model(scheduler_output=scheduler_output) == "result"

    def step(self, samples: dict[str, list[int]], k: int = K) -> dict[str, list[int]]:
        """Runs a step with the batch ``samples``, in this order, and returns the drafts. A request
        without sampled tokens is in prefill."""
        for name, tokens in samples.items():
            self.alive[name].tokens += tokens
        drafts = self._propose(samples, k) if samples else []
        return dict(zip(samples, drafts, strict=True))

    def _propose(self, samples: dict[str, list[int]], k: int) -> list[list[int]]:
        raise NotImplementedError

    @property
    def store(self) -> Any:
        return self.drafter.shared_store.contents

    runner: Any
    adapter: Any
    """The object that the runner calls."""

    @property
    def drafter(self) -> Drafter:
        drafter: Drafter = getattr(self.adapter, ATTRIBUTE)
        return drafter


class V1(Engine):
    """The synchronous V1 runner. The batch occupies its first rows."""

    def __init__(self, *, rows: int = ROWS, length: int = LENGTH, **options: Any) -> None:
        super().__init__()
        vllm_config = make_config(method="custom_class", rows=rows, length=length, **options)
        self.runner = GPUModelRunner()
        self.adapter = self.runner.drafter = NgramProposer(vllm_config)
        self.buffer = np.full((rows, length), 3, np.int32)
        self.lengths = np.full(rows, 5, np.int32)

    def _propose(self, samples: dict[str, list[int]], k: int) -> list[list[int]]:
        for row, name in enumerate(samples):
            tokens = self.alive[name].tokens
            self.buffer[row, : len(tokens)] = tokens
            self.lengths[row] = len(tokens)
        arguments = [*samples.values()], self.lengths, self.buffer
        arguments_copy = copy.deepcopy(arguments)
        drafts: list[list[int]] = self.adapter.propose(*arguments, slot_mappings=None)
        assert all(map(np.array_equal, arguments[1:], arguments_copy[1:]))
        assert arguments[0] == arguments_copy[0]
        assert {type(token) for draft in drafts for token in draft} <= {int}
        return drafts


class GPUModelRunner:
    """vLLM's V1 runner."""

    drafter: Any

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, vocab_size=VOCABULARY)
        self._num_valid_draft_tokens_event = "event"

    def execute_model(self, scheduler_output: Any) -> str:
        return "result"


class NPUModelRunner(GPUModelRunner):
    """vLLM-Ascend's V1 runner, which overrides the function without a call of the stock one."""

    def __init__(self) -> None:
        super().__init__()

    def execute_model(self, scheduler_output: Any) -> str:
        return "result"


v1.install(SimpleNamespace(GPUModelRunner=GPUModelRunner))


class V1Async(Engine):
    """The asynchronous V1 runner. The batch occupies its first rows."""

    pads = True

    def __init__(self, *, length: int = LENGTH, **options: Any) -> None:
        super().__init__()
        self.runner = self.runner_class()
        self.tokens = torch.full((ROWS, length), 7, dtype=torch.int32)
        vllm_config = make_config(length=length, **options)
        self.adapter = self.adapter_class(vllm_config, CPU, self.runner)
        self.runner.drafter = self.adapter
        self.adapter.load_model(object())
        assert self.runner._num_valid_draft_tokens_event == (None if self.pads else "event")

    adapter_class: Any = v1.AsyncNgramProposer
    runner_class: Any = GPUModelRunner

    def begin(self, *requests: Request) -> None:
        super().begin(*requests)
        self.begin_step(make_scheduler_output(*requests))

    def end(self, name: str) -> None:
        super().end(name)
        self.begin_step(make_scheduler_output(finished=[name]))

    def write_rows(self, samples: dict[str, list[int]]) -> tuple[Any, Any, Any]:
        """Writes the rows without the sampled tokens. Returns the sampled tokens, the lengths, and
        the mask of requests in prefill, for which vLLM samples a token that is not used."""
        batch = self.runner.input_batch
        batch.req_ids, batch.num_reqs = list(samples), len(samples)
        lengths = torch.full((ROWS,), 5, dtype=torch.int32)
        matrix = torch.full((len(samples), K + 1), -1, dtype=torch.int32)
        discard = torch.zeros(ROWS, dtype=torch.bool)
        for row, (name, new_tokens) in enumerate(samples.items()):
            tokens = self.alive[name].tokens
            lengths[row] = len(tokens) - len(new_tokens)
            self.tokens[row, : lengths[row]] = torch.tensor(tokens[: lengths[row]])
            matrix[row, : max(1, len(new_tokens))] = torch.tensor(new_tokens or [1])
            discard[row] = not new_tokens
        return matrix, lengths, discard

    def call_drafter(self, matrix: Any, lengths: Any, discard: Any, k: int) -> tuple[Any, ...]:
        """Returns newest tokens, numbers of sampled tokens, drafts, and lengths of the drafts."""
        batch = self.runner.input_batch
        newest, counts, valid_tokens = self.adapter.update_token_ids_ngram(
            matrix, batch, self.tokens, lengths, discard
        )
        rows = lengths[: batch.num_reqs], self.tokens[: batch.num_reqs]
        return newest, counts, *self.adapter.propose(k, *rows, valid_tokens, counts)

    def _propose(self, samples: dict[str, list[int]], k: int) -> list[list[int]]:
        matrix, lengths, discard = self.write_rows(samples)
        old_lengths = lengths.clone()
        newest, counts, drafts, draft_lengths = self.call_drafter(matrix, lengths, discard, k)
        assert newest.tolist() == [self.alive[name].tokens[-1] for name in samples]
        assert counts.tolist() == [len(new_tokens) for new_tokens in samples.values()]
        assert torch.equal(lengths, old_lengths)
        for row, name in enumerate(samples):
            tokens = self.alive[name].tokens
            assert self.tokens[row, : len(tokens)].tolist() == tokens
        assert drafts.dtype == torch.int32
        assert (draft_lengths is None) == self.pads
        if draft_lengths is None:
            return [row.tolist() for row in drafts]
        assert (drafts < 0).sum(1).tolist() == (drafts.shape[1] - draft_lengths).tolist()
        return [row[:n].tolist() for row, n in zip(drafts, draft_lengths, strict=True)]


class Ascend(V1Async):
    """The asynchronous V1 runner of vLLM-Ascend, which passes all arguments in one call."""

    pads = False
    adapter_class = ascend.AscendNgramProposerNPU
    runner_class = NPUModelRunner

    def call_drafter(self, matrix: Any, lengths: Any, discard: Any, k: int) -> tuple[Any, ...]:
        batch = self.runner.input_batch.num_reqs
        newest, drafts, draft_lengths, counts = ascend.triton_ngram_spec_decode(
            *(self.tokens[:batch], lengths[:batch], matrix, discard[:batch], VOCABULARY),
            *(self.adapter.min_n, self.adapter.max_n, k),
        )
        return newest, counts, drafts, draft_lengths


class RequestState:
    """The part of vLLM's ``RequestState`` that the adapter reads."""

    def __init__(self, rows: int = ROWS, length: int = LENGTH) -> None:
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(rows, length, dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(rows, dtype=torch.int32))
        self.last_sampled_tokens = torch.zeros(rows, 1, dtype=torch.int64)
        self.req_id_to_index: dict[str, int] = {}
        self.free_indices = list(range(rows))
        self.max_model_len = length

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: list[int],
        num_computed_tokens: int,
        max_tokens: int,
    ) -> None:
        row = self.req_id_to_index[req_id] = self.free_indices.pop()
        self.total_len.gpu[row] = 0
        self.append_tokens(row, all_token_ids)

    def remove_request(self, req_id: str) -> int | None:
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self.free_indices.append(row)
        return row

    def append_tokens(self, row: int, tokens: list[int]) -> None:
        begin = int(self.total_len.gpu[row])
        end = begin + len(tokens)
        self.all_token_ids.gpu[row, begin:end] = torch.tensor(tokens, dtype=torch.int32)
        self.total_len.gpu[row] = end
        self.last_sampled_tokens[row] = tokens[-1]


def make_input_batch(rows: list[int], names: list[str] | None = None) -> Any:
    """Returns the V2 runner's input batch with the requests of these rows."""
    return SimpleNamespace(
        req_ids=names or ["request"] * len(rows),
        num_reqs=len(rows),
        idx_mapping=torch.tensor(rows, dtype=torch.int32),
        idx_mapping_np=np.array(rows, np.int32),
    )


def make_scheduler_output(*new_requests: Request, finished: Sequence[str] = ()) -> Any:
    """Returns the part of a ``SchedulerOutput`` that the adapter reads. Without requests, it is the
    one after the last request has ended."""
    return SimpleNamespace(
        scheduled_new_reqs=new_requests,
        finished_req_ids=finished,
        total_num_scheduled_tokens=len(new_requests) + len(finished),
    )


class V2(Engine):
    """The V2 runner, in which a request stays in its row. The plugin wraps ``add_requests`` of the
    real class ``GPUModelRunner``."""

    pads = True

    def __init__(self, *, length: int = LENGTH, **options: Any) -> None:
        super().__init__()
        self.req_states: Any = RequestState(length=length)
        self.speculator = self.make_speculator(make_config(length=length, **options))

    def make_speculator(self, vllm_config: Any) -> Any:
        return v2.NgramSpeculator(vllm_config, CPU, self.req_states)

    @property
    def adapter(self) -> Any:  # type: ignore[override]
        return self.speculator

    def begin_step(self, scheduler_output: Any) -> None:
        self.add_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            self.req_states.add_request(
                req_id=request.req_id,
                prompt_len=request.prompt_len,
                all_token_ids=request.tokens,
                num_computed_tokens=0,
                max_tokens=request.sampling_params.max_tokens,
            )

    def begin(self, *requests: Request) -> None:
        super().begin(*requests)
        self.add_requests(make_scheduler_output(*requests))

    def end(self, name: str) -> None:
        super().end(name)
        self.req_states.remove_request(name)

    def preempt(self, name: str) -> None:
        self.req_states.remove_request(name)

    def get_row(self, name: str) -> int:
        row: int = self.req_states.req_id_to_index[name]
        return row

    def step(
        self, samples: dict[str, list[int]], k: int = K, num_verified: int = K, **arguments: Any
    ) -> dict[str, list[int]]:
        """Runs a step that verified `num_verified` drafts of each request."""
        for name in samples:
            if name not in self.req_states.req_id_to_index:  # The request was preempted.
                self.add_requests(make_scheduler_output(self.alive[name]))
        for name, tokens in samples.items():
            self.alive[name].tokens += tokens
            if tokens:
                self.req_states.append_tokens(self.get_row(name), tokens)
        drafts = self.propose([*map(self.get_row, samples)], samples, num_verified, **arguments)
        return dict(zip(samples, drafts.tolist(), strict=True))

    def propose(
        self, rows: list[int], samples: dict[str, list[int]], num_verified: int = K, **kwargs: Any
    ) -> torch.Tensor:
        num_sampled = torch.tensor([*map(len, samples.values())], dtype=torch.int32)
        num_rejected = (num_verified + 1 - num_sampled) * (num_sampled > 0)
        batch = make_input_batch(rows, list(samples))
        step = batch, *[None] * 4, num_sampled, num_rejected
        state = self.req_states.last_sampled_tokens, *[None] * 3
        drafts: torch.Tensor = self.speculator.propose(*step, *state, **kwargs)
        assert drafts.dtype == torch.int64
        return drafts


class StandaloneARSpeculator:
    """A fake of vLLM's neural speculator for ``draft_model``. Tests set its drafts."""

    enable_adaptive_verification = False
    draft_watermarker = None

    def __init__(self, probabilistic: bool = False, vocabulary: int = VOCABULARY) -> None:
        self.drafts = torch.arange(ROWS * K).reshape(ROWS, K) + 1
        self.draft_logits = torch.zeros(ROWS, K, vocabulary) if probabilistic else None
        self.draft_token_confidence_probs = torch.full((ROWS, K), 0.5)
        self.observed_counts: list[tuple[list[int], list[int]]] = []
        self.num_speculative_tokens: int | None = None

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        self.num_speculative_tokens = num_speculative_tokens
        return self.drafts[: input_batch.num_reqs]

    def observe_verification(self, idx_mapping: Any, num_sampled: Any, num_rejected: Any) -> None:
        self.observed_counts.append((num_sampled.tolist(), num_rejected.tolist()))


class V2Neural(V2):
    """The V2 runner with a neural drafter and n-gram drafts."""

    def __init__(self, *, probabilistic: bool = False, **options: Any) -> None:
        self._neural: Any = StandaloneARSpeculator(probabilistic, 64)
        super().__init__(**{"method": "draft_model", "neural": True, "vocabulary": 64, **options})

    def make_speculator(self, vllm_config: Any) -> Any:
        speculative = vllm_config.speculative_config
        self._neural.enable_adaptive_verification = speculative.enable_adaptive_verification
        options = read_options(vllm_config, "neural")
        arguments = vllm_config, options, CPU, self.req_states, self._neural
        assert neural.attach_ngram_drafts(*arguments) == ""
        return self._neural


def run_random_steps(
    engine: Engine, seed: int, count: int = 60, vocabulary: int = 4, max_alive: int = 2 * ROWS
) -> Iterator[tuple[dict[str, list[int]], dict[str, list[int]]]]:
    """Runs steps in which requests begin, end, are preempted, resume and change their order. Yields
    the sampled tokens and the drafts of each step."""
    rng = random.Random(seed)
    running: list[str] = []
    for step in range(count):
        for name in list(engine.alive):
            if len(engine.alive[name].tokens) > LENGTH - 3 * K or rng.random() < 0.03:
                engine.end(name)
        running = [name for name in running if name in engine.alive]
        if running and rng.random() < 0.3:
            engine.preempt(running.pop(rng.randrange(len(running))))
        while len(running) < ROWS and rng.random() < 0.6:
            preempted = [name for name in engine.alive if name not in running]
            if preempted and (len(engine.alive) >= max_alive or rng.random() < 0.5):
                running.append(rng.choice(preempted))
            elif len(engine.alive) < max_alive:
                name = f"request {step} {len(running)}"
                prompt = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))]
                engine.begin(Request(name, prompt))
                running.append(name)
        rng.shuffle(running)
        samples = {}
        for name in running:
            num_sampled = rng.choice((0, 1, 1, 2, K + 1))
            samples[name] = [rng.randrange(vocabulary) for _ in range(num_sampled)]
        yield samples, engine.step(samples)


class OperatorRecorder(TorchDispatchMode):
    """Records the operators that torch runs, and their keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func).removesuffix(".default"), kwargs))
        return func(*args, **kwargs or {})
