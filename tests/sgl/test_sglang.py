"""The drafter for SGLang: its rows against the definition of a draft; and, where SGLang is
installed, its registration and its worker under SGLang's own classes."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import sglang
from reference.drafting import LATEST, draft_for

N = 6
CAPACITY = 200
REQUESTS = 5


class Request:
    """As much of SGLang's request as the worker reads, and the text that its model would make."""

    def __init__(self, name: str, draw: random.Random) -> None:
        self.rid = name
        span = [draw.randrange(6) for _ in range(draw.randint(1, 9))]
        self.origin_input_ids_unpadded = (span * 5)[: draw.randint(1, 30)]
        self.output_ids: list[int] = []
        self.late: list[int] = []
        """Accepted in the last step, not in ``output_ids`` yet."""
        self.text = self.origin_input_ids_unpadded + [
            token if draw.random() < 0.85 else draw.randrange(6) for token in span * 20
        ]

    @property
    def tokens(self) -> list[int]:
        return self.origin_input_ids_unpadded + self.output_ids + self.late

    def expected(self) -> list[int]:
        draft, _ = draft_for(self.tokens, *sglang.LOOKUP, N - 1, LATEST, True, CAPACITY + N)
        return [self.tokens[-1], *draft] + [(draft or self.tokens)[-1]] * (N - 1 - len(draft))

    def verify(self, draft: list[int]) -> list[int]:
        """What a step samples: the accepted tokens and one more."""
        following = self.text[len(self.tokens) :]
        count = 0
        while count < N - 1 and draft[1 + count] == following[count]:
            count += 1
        return following[: count + 1]


class Schedule:
    """Requests that come, go, and are retracted for some steps."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.reqs: list[Request] = []
        self.waiting: list[Request] = []
        self.made = self.retracted = 0

    def begin(self) -> list[str]:
        """The next step's batch; returns the names of those that have left it."""
        left = []
        for request in list(self.reqs):
            ended = len(request.tokens) + N >= len(request.text)
            if ended or self.draw.random() < 0.1:
                self.reqs.remove(request)
                left.append(request.rid)
                if not ended:  # what was accepted last is lost, and made again
                    request.late = []
                    self.waiting.append(request)
                    self.retracted += 1
        while len(self.reqs) < REQUESTS and (not self.reqs or self.draw.random() < 0.5):
            if self.waiting and self.draw.random() < 0.7:
                self.reqs.append(self.waiting.pop(0))
            else:
                self.reqs.append(Request(str(self.made), self.draw))
                self.made += 1
        self.draw.shuffle(self.reqs)
        return left

    def end(self, drafts: list[list[int]], *, overlap: bool) -> int:
        """Verifies; returns the number of accepted draft tokens."""
        accepted = 0
        for request, draft in zip(self.reqs, drafts, strict=True):
            sampled = request.verify(draft)
            accepted += len(sampled) - 1
            request.output_ids += request.late
            request.late = sampled
            if not overlap:
                request.output_ids, request.late = request.output_ids + sampled, []
        return accepted


def _draft(contexts: sglang.Contexts, schedule: Schedule, *, late: bool = True) -> list[list[int]]:
    reqs = schedule.reqs
    tokens, mask = contexts.draft(
        [r.rid for r in reqs],
        [r.origin_input_ids_unpadded for r in reqs],
        [r.output_ids for r in reqs],
        [r.late if late else [] for r in reqs],
    )
    assert tokens.dtype == np.int64
    assert mask.dtype == np.bool_
    assert np.array_equal(mask.reshape(-1, N, N), [np.tri(N)] * len(reqs))
    return tokens.reshape(-1, N).tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_chain_is_the_draft_of_the_request_s_own_context(overlap: bool) -> None:
    accepted = retracted = 0
    for seed in range(20):
        schedule = Schedule(seed)
        contexts = sglang.Contexts(REQUESTS, CAPACITY, N)
        for _ in range(40):
            contexts.erase_match_state(schedule.begin())
            drafts = _draft(contexts, schedule)
            assert drafts == [request.expected() for request in schedule.reqs]
            accepted += schedule.end(drafts, overlap=overlap)
        retracted += schedule.retracted
        contexts.reset()
        assert sorted(contexts._free) == list(range(2 * REQUESTS))
    assert accepted > 1000
    assert retracted > 100


def test_drafts_without_the_newest_tokens_are_noticed() -> None:
    schedule, contexts = Schedule(0), sglang.Contexts(REQUESTS, CAPACITY, N)
    wrong = 0
    for _ in range(40):
        contexts.erase_match_state(schedule.begin())
        drafts = _draft(contexts, schedule, late=False)
        wrong += drafts != [request.expected() for request in schedule.reqs]
        schedule.end(drafts, overlap=True)
    assert wrong > 20


needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
)


@pytest.fixture(scope="module")
def real() -> Any:
    from real_sglang import worker_module

    module = worker_module()
    sglang.register()
    return module


@pytest.fixture
def algorithm(real: Any) -> Any:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string("ngram_npu")


def _arguments(**given: Any) -> Any:
    names = ("max_running_requests", "speculative_num_draft_tokens", "speculative_num_steps")
    fixed = {"device": "cuda", "disable_overlap_schedule": False, "enable_dp_attention": False}
    return SimpleNamespace(**{**dict.fromkeys(names), **fixed, **given})


@needs_sglang
def test_sglang_knows_the_algorithm(real: Any, algorithm: Any) -> None:
    assert algorithm.name == sglang.ALGORITHM
    assert algorithm.is_ngram()
    assert not algorithm.has_draft_kv()
    arguments = _arguments()
    algorithm.handle_server_args(arguments)
    assert arguments.speculative_num_draft_tokens == N
    assert arguments.speculative_eagle_topk == 1
    assert not arguments.disable_overlap_schedule
    assert issubclass(algorithm.create_worker(arguments), real.NGRAMWorker)
    on_cpu = _arguments(device="cpu", speculative_num_draft_tokens=3)
    algorithm.handle_server_args(on_cpu)
    assert on_cpu.disable_overlap_schedule
    assert on_cpu.speculative_num_draft_tokens == 3
    for wrong in ({"device": "npu"}, {"enable_dp_attention": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            algorithm.handle_server_args(_arguments(**wrong))


def _reconstruct(
    tree_mask: torch.Tensor, lengths: Any, positions: Any, index: Any, token: Any, sibling: Any,
    batch: int, n: int,
) -> None:  # fmt: skip
    """For SGLang's compiled function: positions in the tree, and its links, made by SGLang's host
    version."""
    mask = tree_mask.reshape(batch, n, n)
    positions.copy_((mask.sum(-1) - 1 + lengths[:, None]).flatten())
    index.copy_(torch.arange(batch * n).reshape(batch, n))
    links = _module.links(mask.numpy(), batch, n)
    token.copy_(links[0])
    sibling.copy_(links[1])


_module = SimpleNamespace(links=None)


@needs_sglang
@pytest.mark.parametrize("overlap", [True, False])
def test_the_worker_prepares_the_verification_of_a_chain(
    real: Any, algorithm: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Under SGLang's methods, over a random schedule, with the relay's own class."""
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    monkeypatch.setattr(_module, "links", real._derive_tree_links)
    monkeypatch.setattr(real, "reconstruct_indices_from_tree_mask_func", _reconstruct)
    monkeypatch.setattr(real, "assign_extend_cache_locs_func", lambda **_: "locations")
    monkeypatch.setattr(real, "prepare_mamba_track_for_verify", lambda batch: None)
    worker = object.__new__(algorithm.create_worker(_arguments()))
    worker.enable_overlap, worker.draft_token_num, worker.device = overlap, N, "cpu"
    worker._target_worker = SimpleNamespace(get_memory_pool=lambda: (None, None))
    worker.model_runner = SimpleNamespace(
        max_running_requests=REQUESTS, model_config=SimpleNamespace(context_len=CAPACITY)
    )
    worker.alloc_memory_pool()
    schedule, accepted = Schedule(3), 0
    for _ in range(60):
        worker.ngram_corpus.erase_match_state(schedule.begin())
        reqs, batch = schedule.reqs, len(schedule.reqs)
        relayed = torch.full((batch, N), 7, dtype=torch.int32)
        for row, request in zip(relayed, reqs, strict=True):
            row[: len(request.late)] = torch.tensor(request.late)
        lengths = torch.tensor([len(request.tokens) - 1 for request in reqs])
        step = SimpleNamespace(
            reqs=reqs,
            forward_mode=real.ForwardMode.DECODE,
            grammar_needs_sync=lambda: False,
            has_grammar=False,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            req_pool_indices=None,
            req_to_token_pool=SimpleNamespace(req_to_token=None),
            spec_info=NgramVerifyInput(
                draft_token_num=N,
                new_seq_lens=lengths,
                accept_tokens=relayed.flatten(),
                accept_lens=torch.tensor([len(request.late) for request in reqs]),
            ),
        )
        worker._prepare_for_speculative_decoding(step)
        assert step.forward_mode == real.ForwardMode.TARGET_VERIFY
        drafts = step.spec_info.draft_token.reshape(batch, N).tolist()
        assert drafts == [request.expected() for request in reqs]
        chain = [*range(1, N), -1]
        assert step.spec_info.retrieve_next_token.tolist() == [chain] * batch
        assert step.spec_info.retrieve_next_sibling.eq(-1).all()
        expected = lengths[:, None] + torch.arange(N)
        assert torch.equal(step.spec_info.positions, expected.flatten())
        worker._update_ngram_corpus(step)
        accepted += schedule.end(drafts, overlap=overlap)
    assert accepted > 100


@needs_sglang
def test_external_corpora_are_refused(algorithm: Any) -> None:
    worker = object.__new__(algorithm.create_worker(_arguments()))
    with pytest.raises(ValueError, match="external corpora belong to SGLang's NGRAM"):
        worker.add_external_corpus("name", [[1]])
