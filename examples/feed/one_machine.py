"""Shows the feed on one machine in a minute, without vLLM and without a model.

Process A publishes its text as vLLM publishes it. Process B reads the text into its store, and then
replays requests with and without that text. Run it with

    python -m examples.feed.one_machine

It needs the extra ngram-npu[replay], pyzmq and msgspec. The text is source code of Python's
standard library.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import zmq
from ngram_npu import NgramConfig, NgramProposer, NgramStore, Scope
from ngram_npu.engines.vllm.feed.addresses import parse_publishers
from ngram_npu.engines.vllm.feed.reader import FeedReader
from ngram_npu.engines.vllm.feed.texts import FedText, FeedCounters
from ngram_npu_cli.demo import list_demo_conversations
from ngram_npu_cli.replay import simulate
from ngram_npu_cli.tokenization import Tokenization, TokenRequest

BLOCK_TOKENS = 16
VOCAB_SIZE = 32_768
STEP_TOKENS = 4096
STORE_TOKENS = 1 << 20
NUM_REQUESTS = 12
K = 8


def load_requests() -> tuple[list[TokenRequest], list[TokenRequest]]:
    """Returns the requests of A, and as many with other files."""
    conversations = list_demo_conversations()[: 2 * NUM_REQUESTS]
    tokenization = Tokenization()
    requests = [r for c in conversations for r in tokenization.tokenize(c)]
    return requests[::2], requests[1::2]


def make_batches(request: TokenRequest) -> list[bytes]:
    """Returns a request's full blocks as vLLM publishes them: one batch of events per step."""
    tokens, batches = request.tokens().tolist(), []
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    hashes = [hashlib.sha256(str(tokens[:end]).encode()).digest() for end in ends]
    for first in range(0, len(hashes), STEP_TOKENS // BLOCK_TOKENS):
        last = min(len(hashes), first + STEP_TOKENS // BLOCK_TOKENS)
        event = {
            "type": "BlockStored",
            "block_hashes": hashes[first:last],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": tokens[first * BLOCK_TOKENS : last * BLOCK_TOKENS],
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "lora_name": None,
            "medium": "GPU",
            "group_idx": 0,
            # One entry per block. It would contain the adapter's name and the request's cache_salt.
            "extra_keys": [None] * (last - first),
        }
        batches.append(msgspec.msgpack.encode([time.time(), [event], 0]))
    return batches


def run_replica_a(pipe: Connection) -> None:
    """Publishes the text of A's requests when a reader has subscribed."""
    requests, _ = load_requests()
    socket = zmq.Context().socket(zmq.XPUB)
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    socket.recv()
    number = 0
    for request in requests:
        for batch in make_batches(request):
            socket.send_multipart((b"", number.to_bytes(8, "big"), batch))
            number += 1
    pipe.send(sum(len(request.tokens()) // BLOCK_TOKENS * BLOCK_TOKENS for request in requests))
    pipe.recv()  # keeps the connection until B has read all text


def receive_texts(pipe: Connection, texts: list[FedText]) -> FeedCounters:
    """Appends what A publishes to ``texts``, in steps like those of an engine."""
    publishers = parse_publishers([f"tcp://127.0.0.1:{pipe.recv()}"])
    reader = FeedReader(publishers, vocab_size=VOCAB_SIZE)
    num_published: int | None = None
    while num_published is None or reader.get_counters().tokens < num_published:
        if num_published is None and pipe.poll():
            num_published = pipe.recv()
        # An engine's scheduler takes texts in each step and sends them to all ranks.
        texts += reader.take_texts(4096)
        time.sleep(0.01)
    while new_texts := reader.take_texts(4096):
        texts += new_texts
    counters = reader.get_counters()
    reader.close()
    pipe.send(None)
    return counters


def replay(requests: Sequence[TokenRequest], texts: Sequence[FedText]) -> float:
    """Returns the tokens per step of requests of B, whose store begins with these texts."""
    store = NgramStore(STORE_TOKENS)
    for text in texts:
        store.warm([text.tokens], scope=Scope(text.scope))
    proposer = NgramProposer(NgramConfig(k=K, min_draft_probability=0.12), store=store)
    figures = simulate(requests, proposer, k=K, batch_size=1, padded=False)
    return figures.num_tokens / figures.num_steps


def main() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, pipe_of_a = context.Pipe()
    replica_a = context.Process(target=run_replica_a, args=(pipe_of_a,), daemon=True)
    replica_a.start()
    requests_of_a, other_requests = load_requests()
    texts: list[FedText] = []
    print("B received", receive_texts(pipe, texts))
    replica_a.join()
    for name, requests in (
        ("other requests than A", other_requests),
        ("the same requests as A, as in evaluations and RL rollouts", requests_of_a),
    ):
        without, fed = replay(requests, []), replay(requests, texts)
        print(f"B, {name}: {without:.2f} tokens per step without the feed, {fed:.2f} with it")


if __name__ == "__main__":
    main()
