"""Replay of recorded conversations: what drafting gives on real input.

The recorded completion takes the place of the target model's output, so no model is needed: a step
drafts, accepts the leading drafts that equal the recording, and yields one token more.

    >>> from ngram_npu_cli.replay import ReplayOptions, replay
    >>> report = replay(["conversations.jsonl"], ReplayOptions(k=5))  # doctest: +SKIP
    >>> report.total.tokens_per_step  # doctest: +SKIP
    1.69

Nothing here prints: results are data classes, progress goes to a callback.
"""

from ngram_npu.errors import InputError

from ngram_npu_cli.logs.formats import read_conversations
from ngram_npu_cli.logs.log_files import Progress
from ngram_npu_cli.logs.records import Conversation, Turn
from ngram_npu_cli.logs.stdlib_corpus import stdlib_conversations
from ngram_npu_cli.logs.tokenizers import ReplayTokenizer, load_tokenizer
from ngram_npu_cli.replay.figures import ReplayFigures
from ngram_npu_cli.replay.replay_report import ReplayReport, format_table
from ngram_npu_cli.replay.replaying import (
    ReplayInput,
    ReplayOptions,
    TokenizerLike,
    load_inputs,
    replay,
    tokenize,
)
from ngram_npu_cli.replay.simulation import Proposer, TokenRequest, TokenTurn, simulate

__all__ = [
    "Conversation",
    "InputError",
    "Progress",
    "Proposer",
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
