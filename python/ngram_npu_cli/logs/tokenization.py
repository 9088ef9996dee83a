"""Converts conversations to requests of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from ngram_npu.errors import InputError, RecordError, to_one_line

from ngram_npu_cli.logs.answers import check_text
from ngram_npu_cli.logs.chat_template import ChatTemplate, load_chat_template, render_turns
from ngram_npu_cli.logs.conversations import Conversation, TokenRequest, TokenTurn
from ngram_npu_cli.logs.tokenizers import DEFAULT_TOKENIZER, ReplayTokenizer, load_tokenizer

IDS_ONLY = "ids"
"""Value of --tokenizer for no tokenizer: only conversations with token ids are read."""


class TokenizedConversation(NamedTuple):
    """A conversation as requests of token ids: several if the template changes earlier turns.

    `has_text` is whether it was recorded as text, which needs a tokenizer.
    """

    scope: str | int | None
    requests: list[TokenRequest]
    has_text: bool


class Tokenization:
    """Converts conversations to requests of token ids.

    A copy in another process, which `pickle` makes, loads the tokenizer itself.

    Attributes:
        tokenizer: The tokenizer; None until `load` or the first text loads it.
        is_guessed: Whether the default tokenizer was loaded because none was chosen.
        is_needed: Whether `load` was called, for example because a conversation has text.
    """

    def __init__(
        self,
        name: str | None = None,
        chat_template: str = "auto",
        tokenizer: ReplayTokenizer | None = None,
    ) -> None:
        self.tokenizer: ReplayTokenizer | None = None
        self.is_guessed = False
        self.is_needed = False
        self._name = name
        self._chat_template = chat_template
        self._template: ChatTemplate | None = None
        self._is_given = tokenizer is not None
        if tokenizer is not None:
            self._set_tokenizer(tokenizer)

    @property
    def digest(self) -> str:
        """Digest of the tokenizer's vocabulary; empty if the tokenizer is not loaded."""
        return "" if self.tokenizer is None else self.tokenizer.digest

    def load(self) -> None:
        """Loads the tokenizer, unless only token ids are accepted.

        Raises:
            InputError: There is no such tokenizer, or its chat template cannot be read.
        """
        self.is_needed = True
        if self.tokenizer is None and self._name != IDS_ONLY:
            self.is_guessed = self._name is None
            self._set_tokenizer(load_tokenizer(self._name or DEFAULT_TOKENIZER))

    def _set_tokenizer(self, tokenizer: ReplayTokenizer) -> None:
        self.tokenizer = tokenizer
        if self._chat_template == "auto" and tokenizer.folder is not None:
            self._template = load_chat_template(tokenizer.folder)

    def __getstate__(self) -> dict[str, Any]:
        if self._is_given:
            raise InputError("jobs: expected 1 with a tokenizer that is an object")
        return {**vars(self), "tokenizer": None, "_template": None}

    def tokenize(self, conversation: Conversation) -> TokenizedConversation:
        """Returns the conversation as requests. Raises the errors of `make_requests`."""
        requests = self.make_requests(conversation)
        return TokenizedConversation(conversation.scope, requests, not conversation.has_token_ids)

    def make_requests(self, conversation: Conversation) -> list[TokenRequest]:
        """Returns one request, or several if the template changes earlier turns.

        Raises:
            RecordError: The template rejects the conversation, or a text has no tokenizer.
        """
        if conversation.has_token_ids:
            turns = conversation.turns
            ids = [(t.prompt_token_ids or (), t.completion_token_ids or ()) for t in turns]
            return [_make_request(conversation.id, ids)]
        self.load()
        if self.tokenizer is None:
            raise RecordError(f'{conversation.where}: missing key "prompt_token_ids"')
        # Prompt and answer are tokenized separately, because a token that the model generates
        # never contains text of the prompt.
        encode = self.tokenizer.encode
        return [
            _make_request(conversation.id, ((encode(p), encode(c)) for p, c in turns))
            for turns in self._render(conversation)
        ]

    def _render(self, conversation: Conversation) -> list[list[tuple[str, str]]]:
        """Returns the texts of the requests, which a tokenizer accepts."""
        try:
            as_is = self._chat_template == "none"
            requests = render_turns(conversation, self._template, as_is=as_is)
            for text in chain.from_iterable(chain.from_iterable(requests)):
                check_text(text, "the text in its template")
        except (InputError, RecursionError) as error:
            raise RecordError(f"{conversation.where}: {to_one_line(error)}") from error
        return requests


def _make_request(ident: str, turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> TokenRequest:
    pairs = [(np.asarray(prompt, np.int32), np.asarray(c, np.int32)) for prompt, c in turns]
    return TokenRequest(ident, tuple(TokenTurn(prompt, completion) for prompt, completion in pairs))
