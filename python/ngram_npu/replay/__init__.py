"""Replay of recorded conversations: what drafting gives on real input.

The recorded completion takes the place of the target model's output, so no model is needed: a step
drafts, accepts the leading drafts that equal the recording, and yields one token more.

    >>> from ngram_npu.replay import ReplayOptions, replay
    >>> report = replay(["conversations.jsonl"], ReplayOptions(k=5))  # doctest: +SKIP
    >>> report.total.tokens_per_step  # doctest: +SKIP
    1.69

Nothing here prints: results are data classes, progress goes to a callback.
"""

from ngram_npu.errors import ReplayError
from ngram_npu.replay.figures import ReplayFigures
from ngram_npu.replay.formats import read_conversations
from ngram_npu.replay.log_files import Progress
from ngram_npu.replay.records import Conversation, Turn
from ngram_npu.replay.replay_report import ReplayReport, format_table
from ngram_npu.replay.replaying import (
    ReplayInput,
    ReplayOptions,
    TokenizerLike,
    load_inputs,
    replay,
    tokenize,
)
from ngram_npu.replay.simulation import Proposer, TokenRequest, TokenTurn, simulate
from ngram_npu.replay.stdlib_corpus import stdlib_conversations
from ngram_npu.replay.tokenizers import ReplayTokenizer, load_tokenizer

__all__ = [
    "Conversation",
    "Progress",
    "Proposer",
    "ReplayError",
    "ReplayFigures",
    "ReplayInput",
    "ReplayOptions",
    "ReplayReport",
    "ReplayTokenizer",
    "TokenRequest",
    "TokenTurn",
    "TokenizerLike",
    "Turn",
    "format_table",
    "load_inputs",
    "load_tokenizer",
    "read_conversations",
    "replay",
    "simulate",
    "stdlib_conversations",
    "tokenize",
]
