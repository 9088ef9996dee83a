"""Runs vLLM engines whose model predicts recorded text, each in a process of its own, for
`tools/bench/ops/vllm_fleet.py`.

The scheduler, the prefix cache and its events, the runner and the rejection sampler are vLLM's.
Only the forward pass is replaced. An engine runs one request at a time, so the position of a token
determines the recorded token that follows it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ngram_npu.engines.vllm.metrics import FOLDER_VARIABLE
from ngram_npu_cli.replay import TokenRequest
from ngram_npu_cli.replay.walks import Counts
from prometheus_client import REGISTRY

FEED_METRIC = "ngram_npu_feed_"


class RecordedEngine:
    """An engine in another process."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        # Engines are forked from a process that has imported this module and vLLM, so they share
        # most of their memory.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "vllm", "vllm.v1.worker.cpu_worker"])
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_run, args=(child_pipe, arguments), daemon=True)
        self._process.start()
        child_pipe.close()

    def send(self, request: TokenRequest | None) -> None:
        """Begins to replay a conversation, turn by turn; None: begins to read the metrics."""
        self._pipe.send(request)

    def receive(self) -> Any:
        """Waits, and returns the counts of a conversation, or the feed's metrics by name.

        Raises:
            EOFError: The engine's process has ended.
        """
        return self._pipe.recv()

    @staticmethod
    def stop_all(engines: Sequence[RecordedEngine]) -> None:
        for engine in engines:
            engine._pipe.close()
        for engine in engines:
            engine._process.join()


def _run(pipe: Any, arguments: Mapping[str, Any]) -> None:
    from vllm import LLM

    torch.set_num_threads(1)
    os.environ.pop(FOLDER_VARIABLE, None)  # the metrics of an engine that the parent has started
    llm: Any = LLM(**arguments)
    core = llm.llm_engine.engine_core.engine_core
    model = RecordedModel(core.model_executor.driver_worker.worker.model_runner)
    try:
        while True:
            request = pipe.recv()
            pipe.send(read_feed_metrics() if request is None else model.replay(llm, request))
    except EOFError:
        core.shutdown()


class RecordedModel:
    """Replaces the forward pass of a V1 runner, and counts decoding steps."""

    def __init__(self, runner: Any) -> None:
        self._vocab_size: int = runner.model_config.get_vocab_size()
        self._tokens, self._prompt_length = torch.empty(0, dtype=torch.int64), 0
        self._num_steps = self._num_drafted = 0
        runner._model_forward = self._forward
        runner.model.compute_logits = self._compute_logits

    def replay(self, llm: Any, request: TokenRequest) -> Counts:
        """Generates the completions of a conversation. As in ``ngram-npu replay``, the prefill
        yields the first token of each, which takes no step."""
        from vllm import SamplingParams

        self._num_steps = self._num_drafted = num_tokens = 0
        for turn in request.split_turns():
            ((prompt, completion),) = ((part.prompt, part.completion) for part in turn.turns)
            if len(completion) == 0:
                continue
            self._tokens = torch.from_numpy(turn.tokens().astype("int64"))
            self._prompt_length = len(prompt)
            params = SamplingParams(temperature=0, max_tokens=len(completion), ignore_eos=True)
            inputs = {"prompt_token_ids": prompt.tolist()}
            (output,) = llm.generate([inputs], params, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == completion.tolist()
            num_tokens += len(completion) - 1
        return Counts(num_tokens, self._num_steps, self._num_drafted)

    def _forward(self, *, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Returns the positions in place of hidden states."""
        if positions[0] >= self._prompt_length:
            self._num_steps += 1
            self._num_drafted += len(positions) - 1
        return positions.unsqueeze(1)

    def _compute_logits(self, positions: torch.Tensor) -> torch.Tensor:
        # Behind the text are the predictions of drafts beyond the last token, which are not used.
        following = (positions + 1).clamp(max=len(self._tokens) - 1)
        logits = torch.zeros(len(positions), self._vocab_size)
        return logits.scatter_(1, self._tokens[following], 1.0)


def read_feed_metrics() -> dict[str, float]:
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return {
        sample.name.removeprefix(FEED_METRIC): sample.value
        for sample in samples
        if sample.name.startswith(FEED_METRIC) and not sample.name.endswith("_created")
    }
