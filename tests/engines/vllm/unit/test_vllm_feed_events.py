"""Tests how blocks of KV events are joined to texts, and which blocks are skipped."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from feed_publisher import BLOCK, VOCAB_SIZE, encode_batch, make_event, make_hash
from ngram_npu.engines.vllm.feed import events
from ngram_npu.engines.vllm.feed.events import EventError, TextJoiner, decode_event, split_batch
from ngram_npu.store import scope_of_request

PROMPT = list(range(100, 100 + 3 * BLOCK))
ANSWER = list(range(300, 300 + 3 * BLOCK))


def make_joiner(capacity: int = 1 << 12) -> TextJoiner:
    joiner = TextJoiner(VOCAB_SIZE)
    joiner.set_capacity(capacity)
    return joiner


def add_events(joiner: TextJoiner, *batch: dict[str, Any]) -> None:
    for raw in split_batch(encode_batch(*batch)):
        joiner.add_event(decode_event(raw), 0.0)


def take_texts(joiner: TextJoiner) -> list[tuple[int, int, list[int]]]:
    """Returns number, scope and tokens of all waiting texts."""
    texts = []
    while joiner.waiting:
        _, text = joiner.take(1 << 20)
        texts.append((text.chain, text.scope, text.tokens.tolist()))
    assert joiner.num_waiting == 0
    return texts


def test_blocks_of_one_text_are_joined() -> None:
    joiner, tokens = make_joiner(), PROMPT + ANSWER
    add_events(joiner, make_event(PROMPT))
    for end in range(len(PROMPT) + BLOCK, len(tokens) + 1, BLOCK):
        add_events(joiner, make_event(tokens[:end], end // BLOCK - 1))
    assert take_texts(joiner) == [(0, 0, tokens)]
    assert (joiner.num_texts, joiner.num_tokens) == (1, len(tokens))


def test_take_splits_long_text() -> None:
    joiner = make_joiner()
    add_events(joiner, make_event(PROMPT))
    parts = [joiner.take(20)[1] for _ in range(3)]
    assert [part.tokens.tolist() for part in parts] == [PROMPT[:20], PROMPT[20:40], PROMPT[40:]]
    assert {part.chain for part in parts} == {0}
    assert not joiner.waiting


def test_branch_begins_with_last_tokens_of_its_parent() -> None:
    joiner = make_joiner()
    first, second = make_event(PROMPT + ANSWER), make_event(PROMPT + ANSWER[::-1], name="other")
    second["block_hashes"][:3] = first["block_hashes"][:3]
    add_events(joiner, first, second)
    assert take_texts(joiner) == [
        (0, 0, PROMPT + ANSWER),
        (1, 0, PROMPT[-events.CONTEXT_TOKENS :] + ANSWER[::-1]),
    ]
    assert joiner.num_tokens == len(PROMPT) + 2 * len(ANSWER)


def test_context_of_short_blocks_spans_several_blocks() -> None:
    joiner, size = make_joiner(), 4
    fields = {"block_size": size, "token_ids": PROMPT[:24], "extra_keys": [None] * 6}
    hashes = [make_hash("short", i) for i in range(6)]
    add_events(joiner, make_event(PROMPT, **fields, block_hashes=hashes))
    branch = {"block_size": size, "token_ids": ANSWER[:4], "extra_keys": [None]}
    parent = {"block_hashes": [7], "parent_block_hash": hashes[4]}
    add_events(joiner, make_event(PROMPT, **branch, **parent))
    assert [tokens for *_, tokens in take_texts(joiner)] == [PROMPT[:24], PROMPT[4:20] + ANSWER[:4]]


def test_random_texts_with_common_prefixes_are_taken_once() -> None:
    rng = random.Random(5)
    joiner = make_joiner()
    texts = [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(BLOCK, 200))] for _ in range(40)
    ]
    texts += [rng.choice(texts)[: BLOCK * rng.randrange(1, 5)] + text for text in texts]
    pending = []
    for text in texts:
        # A block's hash depends on all tokens up to its end, as in vLLM.
        ends = range(BLOCK, len(text) + 1, BLOCK)
        pending.append((text, [hash(tuple(text[:end])) & (1 << 63) - 1 for end in ends]))
    progress = [0] * len(pending)
    taken: dict[int, list[int]] = {}
    while unfinished := [i for i, (_, h) in enumerate(pending) if progress[i] < len(h)]:
        i = rng.choice(unfinished)
        text, hashes = pending[i]
        start, end = progress[i], min(len(hashes), progress[i] + rng.randrange(1, 4))
        progress[i] = end
        event = make_event(text[: end * BLOCK], start, block_hashes=hashes[start:end])
        event["parent_block_hash"] = hashes[start - 1] if start else None
        add_events(joiner, event)
        if rng.random() < 0.3:
            for number, _, tokens in take_texts(joiner):
                taken.setdefault(number, []).extend(tokens)
    for number, _, tokens in take_texts(joiner):
        taken.setdefault(number, []).extend(tokens)
    different_blocks = {block for _, hashes in pending for block in hashes}
    assert joiner.num_tokens == BLOCK * len(different_blocks)
    assert (joiner.num_orphans, joiner.num_rejected) == (0, 0)
    published = ["".join(map(chr, text)) for text in texts]
    for tokens in taken.values():
        assert any("".join(map(chr, tokens)) in text for text in published)
    context = sum(map(len, taken.values())) - joiner.num_tokens
    assert 0 <= context <= events.CONTEXT_TOKENS * len(taken)


@pytest.mark.parametrize(
    ("adapter", "keys", "salt"),
    [
        (None, None, None),
        (None, ["tenant"], "tenant"),
        (None, ["None"], "None"),
        ("sql", ["sql"], None),
        ("sql", ["sql", "tenant"], "tenant"),
        ("sql", ["sql", "sql"], "sql"),
    ],
)
def test_scope_is_read_from_first_block(
    adapter: str | None, keys: list[str] | None, salt: str | None
) -> None:
    joiner = make_joiner()
    fields = {"lora_name": adapter, "lora_id": 3 if adapter else None}
    event = make_event(PROMPT, keys=keys, **fields)
    event["extra_keys"][1:] = [[adapter] if adapter else None] * 2
    following = make_event(PROMPT + ANSWER, 3, **fields)
    following["extra_keys"] = [[adapter] if adapter else None] * 3
    add_events(joiner, event, following)
    assert take_texts(joiner) == [(0, scope_of_request(salt, adapter), PROMPT + ANSWER)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"extra_keys": None}, "a publisher without keys publishes no salts"),
        ({"extra_keys": [None]}, "not one entry per block"),
        ({"extra_keys": [["a", "b"], None, None]}, "two names and no adapter"),
        ({"extra_keys": [["salt", "a", "b"], None, None]}, "three keys"),
        ({"extra_keys": [[["image", 3]], None, None]}, "an image"),
        ({"extra_keys": [["salt", b"digest"], None, None]}, "embeddings"),
        ({"extra_keys": [["x" * 1025], None, None]}, "a long salt"),
        ({"lora_name": "a" * 1025, "extra_keys": [["a" * 1025]] * 3}, "a long name"),
        ({"lora_name": "sql"}, "an adapter without its key"),
        ({"lora_name": "sql", "extra_keys": [["tenant", "sql"], ["sql"], ["sql"]]}, "other order"),
        ({"lora_id": 1}, "an adapter without a name"),
        ({"token_ids": PROMPT[:-1]}, "a block that is left out"),
        ({"block_size": 0}, "no block size"),
        ({"block_size": -16}, "a negative block size"),
        ({"block_hashes": [], "token_ids": [], "extra_keys": []}, "no blocks"),
    ],
)
def test_block_of_unknown_content_is_rejected_with_what_follows(
    fields: dict[str, Any], reason: str
) -> None:
    joiner = make_joiner()
    add_events(joiner, make_event(PROMPT, **fields))
    assert joiner.num_rejected > 0, reason
    add_events(joiner, make_event(PROMPT + ANSWER, 3))
    assert joiner.num_orphans == 3
    assert take_texts(joiner) == []


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31, 2**63 - 1, -(2**63)])
def test_text_ends_before_block_with_token_out_of_range(token: int) -> None:
    joiner, tokens = make_joiner(), list(PROMPT)
    tokens[BLOCK + 3] = token
    add_events(joiner, make_event(tokens), make_event(PROMPT + ANSWER, 3))
    assert take_texts(joiner) == [(0, 0, PROMPT[:BLOCK])]
    assert (joiner.num_rejected, joiner.num_orphans) == (2, 3)


def test_following_block_with_salt_is_rejected() -> None:
    joiner = make_joiner()
    following = make_event(PROMPT + ANSWER, 3, extra_keys=[["tenant"], None, None])
    add_events(joiner, make_event(PROMPT), following)
    assert take_texts(joiner) == [(0, 0, PROMPT)]
    assert joiner.num_rejected == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"medium": "CPU"},
        {"medium": "STORAGE"},
        {"locality": "REMOTE"},
        {"group_idx": 1},
        {"type": "BlockRemoved"},
        {"type": "UnknownEvent"},
    ],
)
def test_event_of_other_cache_or_type_is_ignored(fields: dict[str, Any]) -> None:
    joiner = make_joiner()
    add_events(joiner, make_event(PROMPT, **fields), make_event(ANSWER))
    assert take_texts(joiner) == [(0, 0, ANSWER)]
    assert (joiner.num_rejected, joiner.num_orphans) == (0, 0)


def test_cycle_of_parents_ends() -> None:
    joiner = make_joiner()
    cycle = make_event(PROMPT, parent_block_hash=make_hash("text", 2))
    add_events(joiner, cycle, make_event(PROMPT), cycle, cycle)
    assert take_texts(joiner) == [(0, 0, PROMPT)]
    assert joiner.num_orphans == 3
    repeated = make_event(ANSWER, block_hashes=[5, 5, 5], parent_block_hash=5)
    add_events(joiner, repeated, make_event(ANSWER, block_hashes=[5, 5, 5]), repeated)
    assert take_texts(joiner) == [(1, 0, ANSWER)]


def test_cleared_cache_forgets_blocks() -> None:
    joiner = make_joiner()
    add_events(joiner, make_event(PROMPT), {"type": "AllBlocksCleared"})
    add_events(joiner, make_event(PROMPT + ANSWER, 3), make_event(PROMPT))
    assert take_texts(joiner) == [(0, 0, PROMPT), (1, 0, PROMPT)]
    assert joiner.num_orphans == 3


def test_number_of_remembered_blocks_is_limited() -> None:
    joiner = make_joiner(capacity=256)
    for i in range(400):
        add_events(joiner, make_event(PROMPT, name=str(i)))
        assert len(joiner._blocks) <= 256
        assert len(joiner._blocks._unused) <= 3
    add_events(joiner, make_event(PROMPT + ANSWER, 3, name="0"))
    assert joiner.num_orphans == 3
    add_events(joiner, make_event(PROMPT + ANSWER, 3, name="399"))
    assert take_texts(joiner)[-1] == (399, 0, PROMPT + ANSWER)


def test_block_that_is_continued_again_and_again_is_remembered() -> None:
    joiner = make_joiner(capacity=256)
    add_events(joiner, make_event(PROMPT))
    for i in range(400):
        other = make_event(ANSWER, name=str(i), parent_block_hash=make_hash("text", 2))
        add_events(joiner, other)
    assert joiner.num_orphans == 0


def test_removed_blocks_are_those_remembered() -> None:
    joiner = make_joiner()
    add_events(joiner, make_event(PROMPT), make_event(ANSWER, name="answer"))
    assert sum(map(len, joiner.remove_blocks())) == 6
    assert joiner.remove_blocks() == []
    add_events(joiner, make_event(PROMPT + ANSWER, 3))
    assert joiner.num_orphans == 3


def test_text_that_is_not_open_any_more_continues_under_other_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "MAX_OPEN_TEXTS", 1)
    joiner = make_joiner()
    add_events(joiner, make_event(PROMPT, name="a"), make_event(PROMPT, name="b"))
    add_events(joiner, make_event(PROMPT + ANSWER, 3, name="a"))
    assert take_texts(joiner)[2] == (2, 0, PROMPT[-events.CONTEXT_TOKENS :] + ANSWER)


def test_text_after_dropped_tokens_has_other_number() -> None:
    joiner = make_joiner()
    add_events(joiner, make_event(PROMPT, name="a"), make_event(PROMPT, name="b"))
    assert joiner.drop_oldest() == len(PROMPT)
    add_events(joiner, make_event(PROMPT + ANSWER, 3, name="a"))
    assert take_texts(joiner) == [
        (1, 0, PROMPT),
        (2, 0, PROMPT[-events.CONTEXT_TOKENS :] + ANSWER),
    ]
    assert joiner.num_waiting == 0


MALFORMED_BATCHES = {
    "empty": b"",
    "not msgpack": b"\xc1\xc1\xc1",
    "truncated": encode_batch(make_event(PROMPT))[:-9],
    "a map": msgspec.msgpack.encode({"ts": 1.0, "events": []}),
    "no events": msgspec.msgpack.encode([1.0]),
    "events that are a string": msgspec.msgpack.encode([1.0, "events"]),
    "a time that is a string": encode_batch(make_event(PROMPT), timestamp="now"),
    "an array whose length is false": b"\x92\xcb" + 8 * b"\0" + b"\xdd\xff\xff\xff\xff",
    "deep nesting": b"\x92\xcb" + 8 * b"\0" + b"\x91" * 100_000,
    "too many events": encode_batch(*[None] * (events.MAX_EVENTS + 1)),
}


@pytest.mark.parametrize("payload", MALFORMED_BATCHES.values(), ids=MALFORMED_BATCHES)
def test_malformed_batch_raises(payload: bytes) -> None:
    with pytest.raises(EventError):
        split_batch(payload)


MALFORMED_EVENTS = {
    "nothing": None,
    "a number": 3,
    "an array": ["BlockStored", [1], None, PROMPT, BLOCK],
    "no type": {"block_hashes": [1]},
    "a type that is a number": {"type": 7},
    "a hash that is text": make_event(PROMPT, block_hashes=["a", "b", "c"]),
    "tokens that are text": make_event(PROMPT, token_ids=["a"] * len(PROMPT)),
    "tokens that are fractions": make_event(PROMPT, token_ids=[0.5] * len(PROMPT)),
    "a size that is text": make_event(PROMPT, block_size="16"),
    "keys that are a map": make_event(PROMPT, extra_keys={"a": 1}),
    "a name that is a number": make_event(PROMPT, lora_name=7),
    "a long hash": make_event(PROMPT, block_hashes=[b"x" * 65, 2, 3]),
    "too many blocks": make_event(PROMPT, block_hashes=[1] * (events.MAX_BLOCKS + 1)),
    "too many keys": make_event(PROMPT, extra_keys=[[1] * 9, None, None]),
    "too many lists of keys": make_event(PROMPT, extra_keys=[None] * (events.MAX_BLOCKS + 1)),
    "too many tokens": make_event(PROMPT, token_ids=[0] * (events.MAX_TOKENS + 1)),
}


@pytest.mark.parametrize("event", MALFORMED_EVENTS.values(), ids=MALFORMED_EVENTS)
def test_malformed_event_raises(event: Any) -> None:
    (raw,) = split_batch(encode_batch(event))
    with pytest.raises(EventError):
        decode_event(raw)


def test_deeply_nested_field_raises() -> None:
    nested = b"\x91" * 100_000 + b"\xc0"
    (raw,) = (msgspec.Raw(b"\x81\xaaextra_keys" + nested),)
    with pytest.raises(EventError):
        decode_event(raw)


def test_random_bytes_raise_only_event_error() -> None:
    rng = random.Random(6)
    sample = encode_batch(make_event(PROMPT, keys=["tenant"]), {"type": "AllBlocksCleared"})
    joiner, num_errors = make_joiner(), 0
    for _ in range(5_000):
        payload = bytearray(sample)
        for _ in range(rng.randrange(1, 6)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            for raw in split_batch(bytes(payload)):
                joiner.add_event(decode_event(raw), 0.0)
        except EventError:
            num_errors += 1
        assert all(max(text[2]) < VOCAB_SIZE and min(text[2]) >= 0 for text in take_texts(joiner))
    assert 0 < num_errors < 5_000
