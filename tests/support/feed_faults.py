"""Faults of a publisher, each with a condition on the counters of its reader."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from feed_publisher import BLOCK, VOCAB_SIZE, Publisher, encode_batch, make_event
from ngram_npu.engines.vllm.feed.texts import FeedCounters


def make_text(seed: int, num_blocks: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_blocks * BLOCK)]


# Functions that cause a fault.


def restart(source: Publisher) -> None:
    source.restart()
    source.wait_for_subscription()


def send_false_data(source: Publisher) -> None:
    unknown_tokens = make_event([1 << 20] * BLOCK, name="unknown tokens")
    false_size = make_event(make_text(90), name="false size", block_size=3)
    no_scope = make_event(make_text(91), name="no scope", extra_keys=None)
    source.publish(unknown_tokens, false_size, no_scope)
    source.publish(make_event(make_text(92), 3, name="unknown tokens"))


def send_without_end(source: Publisher) -> None:
    for i in range(300):
        events = (make_event(make_text(i, 4), name=f"{i}.{j}") for j in range(40))
        source.publish(*events)


def send_malformed_messages(source: Publisher) -> None:
    for payload in (b"", b"\xc1", b"\x91" * 1000, encode_batch(make_event(make_text(90)))[:-5]):
        source.batches.append((source.next_number, payload))
        source.send(*source.batches[-1])
        source.next_number += 1
    source.send_frames(b"only one frame")
    source.send_frames(b"", b"7", b"short number")
    source.send_frames(b"", b"\xff" * 8, b"a number out of range")
    source.send_frames(*[b""] * 500)


def send_huge_batch(source: Publisher) -> None:
    # The reader ends the connection, also when a replay contains the batch.
    source.publish(make_event(make_text(90), name="before"))
    source.publish(make_event(make_text(91, 30_000), name="huge"))
    source.wait_for_subscription()
    source.publish(make_event(make_text(92), name="after"))


def send_too_many_events(source: Publisher) -> None:
    source.publish(*[{"type": "AllBlocksCleared"}] * 20_000)


def send_wrong_types(source: Publisher) -> None:
    text = make_text(90)
    source.publish(7, None, [], "BlockStored", {"type": 1}, {}, {"type": "BlockStored"})
    source.publish(make_event(text, token_ids="tokens"), make_event(text, block_size=None))
    source.publish(make_event(text, extra_keys=[{}] * 6), make_event(text, lora_name=["sql"]))
    source.publish(make_event(text, block_hashes=[[1]] * 6), make_event(text, medium=3))


def disappear(source: Publisher) -> None:
    source.close()


def lose_batches(source: Publisher) -> None:
    for i in range(5):
        source.publish(make_event(make_text(90 + i), name=f"lost {i}"), is_lost=True)
        source.publish(make_event(make_text(80 + i), name=f"kept {i}"))


def repeat_and_reorder_batches(source: Publisher) -> None:
    for i in range(5):
        source.publish(make_event(make_text(90 + i), name=f"text {i}"))
    for number, payload in [*source.batches[::-1], *source.batches]:
        if number > 0:  # batch 0 would be that of a new process
            source.send(number, payload)


def send_unknown_parents(source: Publisher) -> None:
    unknown = make_event(make_text(90), 2, name="unknown")
    itself = make_event(make_text(91), block_hashes=[8] * 6, parent_block_hash=8)
    there, back = (make_event(make_text(92), name=name) for name in ("there", "back"))
    there["parent_block_hash"] = back["block_hashes"][-1]
    back["parent_block_hash"] = there["block_hashes"][-1]
    source.publish(unknown, itself, there, back, there)


def has_counted(*names: str) -> Callable[[FeedCounters, FeedCounters], bool]:
    return lambda before, after: all(getattr(after, n) > getattr(before, n) for n in names)


def has_fewer_publishers(before: FeedCounters, after: FeedCounters) -> bool:
    return after.publishers < before.publishers


def has_as_many_publishers(before: FeedCounters, after: FeedCounters) -> bool:
    return after.publishers == before.publishers


@dataclass(frozen=True)
class Fault:
    """A fault of a publisher, and how its reader shows that it has handled it."""

    cause: Callable[[Publisher], None]
    is_counted: Callable[[FeedCounters, FeedCounters], bool]
    """Compares the counters of a reader before and after the fault."""
    state: str = "is connected"
    """What the reader logs about the publisher."""


MALFORMED = "sends malformed events"
FAULTS = {
    "restarts": Fault(restart, has_as_many_publishers, "is disconnected"),
    "sends false data": Fault(send_false_data, has_counted("rejected", "orphans")),
    "sends without end": Fault(
        send_without_end, has_counted("dropped", "tokens"), "sends more text than this engine takes"
    ),
    "sends malformed messages": Fault(send_malformed_messages, has_counted("rejected"), MALFORMED),
    "sends a huge batch": Fault(send_huge_batch, has_counted("gaps"), "is disconnected"),
    "sends too many events": Fault(send_too_many_events, has_counted("rejected"), MALFORMED),
    "sends wrong types": Fault(send_wrong_types, has_counted("rejected"), MALFORMED),
    "disappears": Fault(disappear, has_fewer_publishers, "is disconnected"),
    "does not answer replay requests": Fault(
        lose_batches, has_counted("gaps"), "does not answer replay requests"
    ),
    "repeats and reorders batches": Fault(
        repeat_and_reorder_batches, has_counted("rejected"), "repeats or reorders batches"
    ),
    "sends unknown parents and cycles": Fault(send_unknown_parents, has_counted("orphans")),
}
