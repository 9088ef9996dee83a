"""Tests how the blocks of KV events become texts in the feed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from kv_events import BlockStored
from ngram_npu.engines.vllm.feed import texts
from ngram_npu.engines.vllm.feed.texts import TextJoiner
from ngram_npu.store import scope_of_request

BLOCK, VOCABULARY = 16, 1000
CONTEXT, PIECE = 16, 256
PROMPT = list(range(100, 100 + 3 * BLOCK))
ANSWER = list(range(300, 300 + 3 * BLOCK))
LATER = 2 * texts.PAUSE_S


def make_text(seed: int, num_blocks: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(num_blocks * BLOCK)]


def make_event(
    tokens: Sequence[int],
    first_block: int = 0,
    *,
    name: str = "text",
    keys: Sequence[Any] | None = None,
    **fields: Any,
) -> BlockStored:
    """Returns the event about the full blocks of a text from ``first_block`` on. The hash of a
    block is made of the text's ``name`` and the block's number. ``keys`` are those of the text's
    first block."""
    hashes = [make_hash(name, i) for i in range(first_block, len(tokens) // BLOCK)]
    values: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": make_hash(name, first_block - 1) if first_block else None,
        "token_ids": list(tokens[first_block * BLOCK : len(tokens) // BLOCK * BLOCK]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [keys if i == first_block == 0 else None for i in range(len(hashes))],
        "group_idx": 0,
    }
    return BlockStored(**{**values, **fields})


def make_hash(name: str, block: int) -> int:
    return int.from_bytes(f"{name}:{block}".encode()[-8:], "big")


class Joiner(TextJoiner):
    """A joiner whose pieces are collected."""

    def __init__(self, *, is_private: bool = False) -> None:
        self.counters: Counter[str] = Counter()
        self.pieces: list[tuple[int, list[int]]] = []
        super().__init__(VOCABULARY, is_private, self.collect, self.counters)

    def collect(self, scope: int, tokens: bytes) -> None:
        self.pieces.append((scope, np.frombuffer(tokens, np.int32).tolist()))

    def add(self, *events: BlockStored) -> None:
        for event in events:
            self.add_event(event, 0.0)

    def take_pieces(self) -> list[tuple[int, list[int]]]:
        self.deliver_paused_texts(LATER)
        pieces, self.pieces = self.pieces, []
        return pieces


@pytest.mark.parametrize("num_blocks", [1, 15, 16, 17, 31, 32, 100])
def test_blocks_of_one_text_become_pieces(num_blocks: int) -> None:
    joiner, text = Joiner(), make_text(1, num_blocks)
    joiner.add(make_event(text[:BLOCK]))
    for block in range(1, num_blocks):
        joiner.add(make_event(text[: (block + 1) * BLOCK], block))
    pieces = [tokens for _, tokens in joiner.take_pieces()]
    assert all(len(piece) == PIECE for piece in pieces[:-1])
    assert all(p[-CONTEXT:] == q[:CONTEXT] for p, q in pairwise(pieces))
    assert pieces[0] + [token for piece in pieces[1:] for token in piece[CONTEXT:]] == text
    assert joiner.counters == {"tokens": len(text)}


def test_text_is_delivered_when_it_pauses() -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT))
    joiner.deliver_paused_texts(texts.PAUSE_S - 0.01)
    assert joiner.pieces == []
    joiner.add_event(make_event(PROMPT + ANSWER[:BLOCK], 3), 1.0)
    joiner.deliver_paused_texts(texts.PAUSE_S)
    assert joiner.pieces == []
    joiner.deliver_paused_texts(texts.PAUSE_S + 1.0)
    assert joiner.take_pieces() == [(0, PROMPT + ANSWER[:BLOCK])]
    joiner.add(make_event(PROMPT + ANSWER, 4))
    assert joiner.take_pieces() == [(0, ANSWER)]  # its first block is the context of the others


def test_context_of_short_blocks_spans_several_blocks() -> None:
    joiner, fields = Joiner(), {"block_size": 4, "extra_keys": [None] * 6}
    joiner.add(make_event([], block_hashes=[*range(6)], token_ids=PROMPT[:24], **fields))
    branch = {"block_size": 4, "token_ids": ANSWER[:4], "extra_keys": [None]}
    joiner.add(make_event([], block_hashes=[7], parent_block_hash=4, **branch))
    assert joiner.take_pieces() == [(0, PROMPT[:24]), (0, PROMPT[4:20] + ANSWER[:4])]


def test_random_texts_with_common_prefixes_are_delivered_once() -> None:
    rng, joiner = random.Random(5), Joiner()
    published = [make_text(i, rng.randrange(1, 40)) for i in range(40)]
    published += [rng.choice(published)[: BLOCK * rng.randrange(1, 5)] + t for t in published]
    pending = []
    for text in published:
        # A block's hash depends on all tokens up to its end, as in vLLM.
        ends = range(BLOCK, len(text) + 1, BLOCK)
        pending.append((text, [hash(tuple(text[:end])) & (1 << 63) - 1 for end in ends]))
    progress, pieces = [0] * len(pending), []
    while unfinished := [i for i, (_, h) in enumerate(pending) if progress[i] < len(h)]:
        i = rng.choice(unfinished)
        text, hashes = pending[i]
        start, end = progress[i], min(len(hashes), progress[i] + rng.randrange(1, 4))
        progress[i] = end
        parent = hashes[start - 1] if start else None
        event = make_event(text[: end * BLOCK], start, block_hashes=hashes[start:end])
        event.parent_block_hash = parent
        joiner.add(event)
        if rng.random() < 0.05:
            pieces += joiner.take_pieces()
    pieces += joiner.take_pieces()
    different_blocks = {block for _, hashes in pending for block in hashes}
    assert joiner.counters == {"tokens": BLOCK * len(different_blocks)}
    strings = ["".join(map(chr, text)) for text in published]
    for _, tokens in pieces:
        assert len(tokens) <= PIECE
        assert any("".join(map(chr, tokens)) in text for text in strings)
    repeated = sum(len(tokens) for _, tokens in pieces) - joiner.counters["tokens"]
    assert 0 <= repeated <= CONTEXT * len(pieces)


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
@pytest.mark.parametrize("is_private", [False, True])
def test_scope_is_read_from_first_block(
    adapter: str | None, keys: list[str] | None, salt: str | None, is_private: bool
) -> None:
    joiner = Joiner(is_private=is_private)
    fields = {"lora_name": adapter, "lora_id": 3 if adapter else None}
    following_keys = [[adapter] if adapter else None] * 3
    event = make_event(PROMPT, **fields, extra_keys=[keys, *following_keys[1:]])
    joiner.add(event, make_event(PROMPT + ANSWER, 3, **fields, extra_keys=following_keys))
    is_stored = not is_private or keys is not None
    expected = [(scope_of_request(salt, adapter), PROMPT + ANSWER)] if is_stored else []
    assert joiner.take_pieces() == expected
    # Text that is private is no error.
    assert joiner.counters["rejected"] == joiner.counters["orphans"] == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"extra_keys": None}, "a publisher without keys publishes no salts"),
        ({"extra_keys": [None]}, "not one entry per block"),
        ({"extra_keys": [["a", "b"], None, None]}, "two names and no adapter"),
        ({"extra_keys": [[["image", 3]], None, None]}, "an image"),
        ({"extra_keys": [["salt", b"digest"], None, None]}, "embeddings"),
        ({"lora_name": "sql"}, "an adapter without its key"),
        ({"lora_name": "sql", "extra_keys": [["tenant", "sql"], ["sql"], ["sql"]]}, "other order"),
        ({"lora_id": 1}, "an adapter without a name"),
        ({"token_ids": PROMPT[:-1]}, "a block that is left out"),
        ({"block_size": 0, "token_ids": []}, "no block size"),
        ({"block_size": -16}, "a negative block size"),
        ({"block_hashes": [], "token_ids": [], "extra_keys": []}, "no blocks"),
    ],
)
def test_block_of_unknown_content_is_rejected_with_what_follows(
    fields: dict[str, Any], reason: str
) -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT, **fields))
    assert joiner.counters["rejected"] > 0, reason
    joiner.add(make_event(PROMPT + ANSWER, 3))
    assert joiner.counters["orphans"] == 3
    assert joiner.take_pieces() == []


def test_following_block_with_other_keys_is_rejected() -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT), make_event(PROMPT + ANSWER, 3, extra_keys=[["x"], None, None]))
    assert joiner.take_pieces() == [(0, PROMPT)]
    assert joiner.counters["rejected"] == 3


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31, 2**63 - 1, -(2**63)])
def test_text_ends_before_block_with_token_out_of_range(token: int) -> None:
    joiner, tokens = Joiner(), list(PROMPT)
    tokens[BLOCK + 3] = token
    joiner.add(make_event(tokens), make_event(PROMPT + ANSWER, 3))
    assert joiner.take_pieces() == [(0, PROMPT[:BLOCK])]
    assert (joiner.counters["rejected"], joiner.counters["orphans"]) == (2, 3)


@pytest.mark.parametrize("position", [0, 1])
def test_known_hash_in_another_scope_is_rejected(position: int) -> None:
    """The tokens before the block would otherwise become the context of another scope's text."""
    joiner, hashes = Joiner(), [7, 8, 9]
    joiner.add(make_event(PROMPT, keys=["a"]))
    hashes[position] = make_hash("text", position)
    joiner.add(make_event(ANSWER, keys=["b"], block_hashes=hashes))
    joiner.add(make_event(ANSWER + PROMPT, 3, keys=["b"], parent_block_hash=9))
    pieces = dict(joiner.take_pieces())
    assert pieces.pop(scope_of_request("a")) == PROMPT
    assert pieces == ({scope_of_request("b"): ANSWER[:BLOCK]} if position else {})
    assert joiner.counters["rejected"] == 3 - position


@pytest.mark.parametrize(
    "fields", [{"medium": "CPU"}, {"medium": "STORAGE"}, {"locality": "REMOTE"}, {"group_idx": 1}]
)
def test_event_of_other_cache_is_ignored(fields: dict[str, Any]) -> None:
    joiner = Joiner()
    joiner.add(make_event(PROMPT, **fields), make_event(ANSWER))
    assert joiner.take_pieces() == [(0, ANSWER)]
    assert joiner.counters == {"tokens": len(ANSWER)}


def test_number_of_remembered_blocks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_BLOCKS", 20)
    joiner = Joiner()
    for i in range(40):
        joiner.add(make_event(PROMPT, name=f"{i}"), make_event(PROMPT + ANSWER, 3, name="39"))
        joiner.add(make_event(ANSWER, name="used", keys=["a"]))
        assert len(joiner._blocks) <= 20
    joiner.take_pieces()
    joiner.counters.clear()
    joiner.add(make_event(PROMPT + ANSWER, 3, name="0"))
    assert joiner.counters == {"orphans": 3}
    joiner.add(make_event(ANSWER + PROMPT, 3, name="used"))  # used again and again
    assert joiner.take_pieces() == [(scope_of_request("a"), ANSWER[-CONTEXT:] + PROMPT)]
