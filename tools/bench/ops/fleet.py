"""Counts tokens per step of several replicas of an engine, whose stores contain only their own text
or also the text that the others publish as KV events."""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
from ngram_npu import NgramConfig, NgramProposer, NgramStore
from ngram_npu.engines.vllm.feed.events import TextJoiner, decode_event, split_batch
from ngram_npu.engines.vllm.feed.texts import FedText
from ngram_npu_cli.logs.tokenizers import load_tokenizer
from ngram_npu_cli.replay import TokenRequest
from ngram_npu_cli.replay.walks import Counts

from tools.bench.data import VOCAB_SIZE, find_data
from tools.bench.ops.acceptance import (
    DEFAULT_LIMIT,
    VERIFICATION_COST,
    K,
    replay_drafts,
    round_per_step,
)
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.options import Options
from tools.fit_draft_costs import load_sets

NUM_REPLICAS = (1, 4, 16)
STORE_TOKENS = 1 << 22
BLOCK_TOKENS = 16
STEP_TOKENS = 4096
"""Tokens of a conversation whose blocks are published in one batch."""
Feed = Literal["none", "silo", "fed"]


class Replica:
    """An engine with a store, and the publisher of its prefix cache, which keeps all blocks."""

    def __init__(self, *, has_store: bool, block_tokens: int, split_turns: bool) -> None:
        self._block_tokens, self._split_turns = block_tokens, split_turns
        probability = 2 ** (-DEFAULT_LIMIT / 16)
        sizes: Any = {"sizes": "ladder", "k": K[0], "min_draft_probability": probability}
        self._make_proposer = functools.partial(NgramProposer, NgramConfig(**sizes), "index")
        self.store: NgramStore | None = None
        if has_store:
            self.store = NgramStore(1, STORE_TOKENS)
            config = NgramConfig(**sizes, store="live", store_tokens=STORE_TOKENS)
            self._make_proposer = functools.partial(
                NgramProposer, config, "index", store=self.store
            )
        self._cached_blocks: set[int] = set()
        self._joiner = TextJoiner(VOCAB_SIZE)
        self._joiner.set_capacity(1 << 20)

    def replay(self, request: TokenRequest) -> Counts:
        requests = request.split_turns() if self._split_turns else [request]
        return replay_drafts(requests, self._make_proposer(), K[0], batch_size=1)

    def publish(self, request: TokenRequest) -> list[FedText]:
        """Publishes a conversation, including its prompts, without its last partial block, and
        returns the texts that a reader makes of it."""
        tokens, block_tokens = request.tokens(), self._block_tokens
        ends = range(block_tokens, len(tokens) + 1, block_tokens)
        hashes = [hash_tokens(tokens[:end]) for end in ends]
        num_cached = next(
            (i for i, block in enumerate(hashes) if block not in self._cached_blocks), len(hashes)
        )
        self._cached_blocks.update(hashes)
        blocks_per_step = STEP_TOKENS // block_tokens
        borders = [*range(num_cached, len(hashes), blocks_per_step), len(hashes)]
        for first, last in pairwise(borders):
            event = {
                "type": "BlockStored",
                "block_hashes": hashes[first:last],
                "parent_block_hash": hashes[first - 1] if first else None,
                "token_ids": tokens[first * block_tokens : last * block_tokens].tolist(),
                "block_size": block_tokens,
                "extra_keys": [None] * (last - first),
            }
            for raw in split_batch(msgspec.msgpack.encode([0.0, [event]])):
                self._joiner.add_event(decode_event(raw), 0.0)
        texts = []
        while self._joiner.waiting:
            texts.append(self._joiner.take(STORE_TOKENS)[1])
        return texts

    def append(self, texts: Sequence[FedText]) -> None:
        assert self.store is not None
        for text in texts:
            self.store.warm([text.tokens], scope=text.scope)


def hash_tokens(tokens: Any) -> int:
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def replay_fleet(
    requests: Sequence[TokenRequest],
    num_replicas: int,
    feed: Feed,
    block_tokens: int = BLOCK_TOKENS,
    *,
    split_turns: bool = False,
) -> tuple[Counts, Counts]:
    """Replays the conversations in turn on the replicas. Returns the counts of all conversations
    and of the second half of them.

    A conversation's text reaches the other replicas after one more conversation of each of them.

    Args:
        block_tokens: Size of the blocks that are published.
        split_turns: Each turn is a request, so prompts after the first are not stored either.
    """
    replicas = [
        Replica(has_store=feed != "none", block_tokens=block_tokens, split_turns=split_turns)
        for _ in range(num_replicas)
    ]
    published: deque[tuple[int, list[FedText]]] = deque()
    counts: list[Counts] = []
    for i, request in enumerate(requests):
        counts.append(replicas[i % num_replicas].replay(request))
        if feed == "fed":
            published.append((i % num_replicas, replicas[i % num_replicas].publish(request)))
            if len(published) > num_replicas:
                source, texts = published.popleft()
                for number, replica in enumerate(replicas):
                    if number != source:
                        replica.append(texts)
    second_half = sum(counts[len(counts) // 2 :], Counts())
    return sum(counts[: len(counts) // 2], second_half), second_half


class Fleet(Op):
    name = "fleet"
    help = "tokens per step of replicas with separate stores, and with stores fed by KV events"
    sizes = ()
    assumptions: Mapping[str, Any] = {
        "drafts": f"a ladder by cost, k={K[0]}, limit {DEFAULT_LIMIT} sixteenths of a bit",
        "replicas": "conversations are assigned in turn; each replica has one request at a time "
        f"and a live store of {STORE_TOKENS} tokens",
        "silo": "a replica's store contains the answers of this replica",
        "fed": f"and what the others publish: prompts and answers in full blocks of {BLOCK_TOKENS} "
        "tokens, each prefix once per replica, joined as the reader does; text arrives after one "
        "more conversation per replica",
        "none": "no store",
        "speedup": f"tokens per step / (1 + {VERIFICATION_COST:g} * drafted tokens per step)",
        "target": "recorded completions replace the target model; a conversation is one row",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        folder = options.data or find_data(None).with_name("traffic")
        for name, requests in load_sets([folder], load_tokenizer()).items():
            result: Result = {"set": name, "conversations": len(requests)}
            result["tokens"] = sum(request.num_tokens for request in requests)
            result["none"] = make_figures(*replay_fleet(requests, 1, "none"))
            for number in NUM_REPLICAS:
                feeds: tuple[Feed, ...] = ("silo",) if number == 1 else ("silo", "fed")
                result[f"replicas_{number}"] = {
                    feed: make_figures(*replay_fleet(requests, number, feed)) for feed in feeds
                }
            yield result


def make_figures(counts: Counts, second_half: Counts) -> dict[str, Any]:
    return {
        **round_per_step(counts),
        "speedup": round(counts.compute_speedup(VERIFICATION_COST), 4),
        "second_half": {
            **round_per_step(second_half),
            "speedup": round(second_half.compute_speedup(VERIFICATION_COST), 4),
        },
    }
