"""Converts conversations to token ids, by the model's tokenizer and chat template.

Nothing is downloaded: a tokenizer is a folder or a model in the hub's local cache, which
transformers loads, or that of the package `mistral-common`. No tokenizer adds special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError, RecordError, import_optional, to_one_line

from ngram_npu_cli.logs.reader import LogReader
from ngram_npu_cli.logs.values import Conversation, Message

Int32Array = npt.NDArray[np.int32]
ChatTemplate = Callable[[Sequence[Message], Sequence[Any], bool], str]
"""Function from messages, tools, and whether the assistant answers next, to the text."""

DEFAULT_TOKENIZER = "mistral-v1"
TOKENIZER_NOTE = (
    "the tokenizer is not your model's, and the figures depend on it: use --tokenizer FOLDER, or "
    "--tokenizer ORG/NAME from the local cache"
)
_LABELS = {"system": "", "developer": "", "user": "USER: ", "assistant": "ASSISTANT: "}


class TokenRequest(NamedTuple):
    """Turns as token ids: prompts and answers, int32. Each prompt is what its turn adds."""

    turns: tuple[tuple[Int32Array, Int32Array], ...]

    def tokens(self) -> Int32Array:
        """Returns the whole context."""
        parts = [part for turn in self.turns for part in turn]
        joined: Int32Array = np.concatenate([np.empty(0, np.int32), *parts])
        return joined

    def spans(self) -> list[tuple[int, int]]:
        """Returns start and end in `tokens()` of every answer that takes a step. Prefill generates
        an answer's first token, so an answer of one token takes none."""
        spans, offset = [], 0
        for prompt, answer in self.turns:
            start = offset + len(prompt)
            offset = start + len(answer)
            if len(answer) >= 2:
                spans.append((start, offset))
        return spans

    @property
    def num_generated(self) -> int:
        """Number of tokens that are generated in steps."""
        return sum(end - start - 1 for start, end in self.spans())


@dataclass(frozen=True)
class Tokenizer:
    """A function from text to token ids, the model's chat template, and a function that returns
    what a server's `get_vocab()` returns."""

    name: str
    encode: Callable[[str], list[int]]
    template: ChatTemplate | None = None
    vocab: Callable[[], Mapping[str, int]] | None = None


class Tokenization:
    """Converts conversations to requests. The tokenizer is loaded for the first text.

    Args:
        name: Name of the tokenizer; None: the default, with a note.
        chat_template: "auto": the tokenizer's template, or the default template if it has none;
            "default": the default template.
    """

    def __init__(self, name: str | None = None, chat_template: str = "auto") -> None:
        self.tokenizer: Tokenizer | None = None
        self.is_guessed = False
        self._name, self._chat_template = name, chat_template

    def load(self) -> Tokenizer:
        """Loads the tokenizer. Raises an InputError if there is none of this name."""
        if self.tokenizer is None:
            self.is_guessed = self._name is None
            self.tokenizer = load_tokenizer(self._name or DEFAULT_TOKENIZER)
        return self.tokenizer

    def describe(self) -> str:
        """Returns the name of the tokenizer that was used."""
        return "token ids as recorded" if self.tokenizer is None else self.tokenizer.name

    def tokenize(self, conversation: Conversation) -> list[TokenRequest]:
        """Returns one request, or several if the template changes earlier turns.

        Raises:
            RecordError: The template rejects the conversation, or a text is not valid.
        """
        if conversation.turns[0].answer is None:
            pairs = [
                (t.prompt_token_ids or (), t.answer_token_ids or ()) for t in conversation.turns
            ]
            return [_make_request(pairs)]
        tokenizer = self.load()
        encode = tokenizer.encode
        try:
            template = tokenizer.template if self._chat_template == "auto" else None
            rendered = render_turns(conversation, template)
            # Prompt and answer are tokenized separately, because a token that the model generates
            # never contains text of the prompt.
            return [
                _make_request(
                    [(encode(check_unicode(p)), encode(check_unicode(a))) for p, a in turns]
                )
                for turns in rendered
            ]
        except (InputError, RecursionError, TypeError) as error:
            raise RecordError(f"{conversation.where}: {to_one_line(error)}") from error


def read_requests(
    reader: LogReader, tokenization: Tokenization
) -> Iterator[tuple[Conversation, list[TokenRequest]]]:
    """Yields each conversation and its requests."""
    for conversation in reader:
        try:
            yield conversation, tokenization.tokenize(conversation)
        except RecordError as error:
            reader.skip(error)
    if tokenization.is_guessed and reader.paths:
        reader.other_notes.append(TOKENIZER_NOTE)


def check_unicode(text: str) -> str:
    """Returns the text if a tokenizer accepts it. JSON allows half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError("a text contains half of a surrogate pair") from error
    return text


def _make_request(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TokenRequest:
    pairs = [(np.asarray(prompt, np.int32), np.asarray(a, np.int32)) for prompt, a in turns]
    return TokenRequest(tuple(pairs))


# Templates


def render_turns(
    conversation: Conversation, template: ChatTemplate | None
) -> list[list[tuple[str, str]]]:
    """Returns lists of pairs of texts: prompt and answer. A prompt is the text that a turn adds.

    Some templates change earlier turns, for example omit old reasoning. The next turn then begins a
    new list, with the complete context as its first prompt.

    Args:
        template: The model's template; None: `USER: {user} ASSISTANT:`.
    """
    requests: list[list[tuple[str, str]]] = []
    messages: list[Message] = []
    context = ""
    for turn in conversation.turns:
        answer: Message = turn.answer or {"role": "assistant", "content": ""}
        messages += turn.messages
        text = render_answer(answer)
        if turn.prompt is not None:
            prompt = turn.prompt
        elif template is None:
            prompt = _render_default(messages, conversation.tools)
        else:
            prompt = template(messages, conversation.tools, True)
            text = _render_with_template(template, messages, answer, conversation.tools, prompt)
        if requests and prompt.startswith(context):
            requests[-1].append((prompt[len(context) :], text))
        else:
            requests.append([(prompt, text)])
        messages.append(answer)
        context = prompt + text
    return requests


def _render_default(messages: Sequence[Message], tools: Sequence[Any]) -> str:
    parts = [json.dumps(tools, ensure_ascii=False) + " "] if tools else []
    for message in messages:
        label = _LABELS.get(message["role"], "TOOL: ")
        text = _render_without_reasoning(message)
        # The model generates its answer directly after the label, and ends it without a space.
        is_answer = message["role"] == "assistant"
        parts.append(label.rstrip() + text if is_answer else f"{label}{text} ")
    return "".join([*parts, "ASSISTANT:"])


def _render_with_template(
    template: ChatTemplate,
    messages: Sequence[Message],
    answer: Message,
    tools: Sequence[Any],
    prompt: str,
) -> str:
    """Returns what the model generates: the answer, and what the template adds to it, except the
    last line end."""
    text = render_answer(answer)
    with_answer = template([*messages, answer], tools, False)
    if with_answer.startswith(prompt):
        text = with_answer[len(prompt) :].rstrip("\n")
        if answer.get("reasoning_content", "") not in text:  # the template omits the reasoning
            text = _render_reasoning(answer) + text
    return text.removeprefix("<think>\n") if prompt.endswith("<think>\n") else text


def render_answer(message: Message) -> str:
    """Returns the text that the model generated: its reasoning, its text, its tool calls."""
    return _render_reasoning(message) + _render_without_reasoning(message)


def _render_reasoning(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""


def _render_without_reasoning(message: Message) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):  # a text is JSON that is not complete
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def make_chat_template(tokenizer: Any) -> ChatTemplate | None:
    """Returns the chat template of a tokenizer of transformers; None if it has none."""
    if not tokenizer.chat_template:
        return None

    def render(messages: Sequence[Message], tools: Sequence[Any], is_answer_next: bool) -> str:
        try:
            # vLLM uses this renderer too. It runs templates, untrusted programs, in a sandbox.
            text = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=is_answer_next,
                tokenize=False,
            )
        except Exception as error:  # a template may fail in any way
            raise RecordError(
                f"the chat template of {tokenizer.name_or_path} rejects the conversation: "
                f"{to_one_line(error):.200}; --chat-template default uses another one"
            ) from error
        return str(text)

    return render


# Tokenizers


def load_tokenizer(name: str = DEFAULT_TOKENIZER) -> Tokenizer:
    """Loads a tokenizer: `mistral-v1`, `bytes`, or what transformers' `AutoTokenizer` finds without
    the network: a folder, or a model ("org/name") in the hub's local cache.

    Raises:
        InputError: There is no such tokenizer, or a package is missing.
    """
    if name == DEFAULT_TOKENIZER:
        return _load_mistral()
    if name == "bytes":
        return Tokenizer(name, lambda text: list(text.encode("utf-8")))
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise InputError(f'tokenizer "{name}": there is no such folder')
    transformers = import_optional("transformers", f"tokenizer {name}", "replay")
    transformers.logging.set_verbosity_error()  # no warning about texts longer than the model's
    try:
        # Otherwise transformers asks whether to execute code from the folder.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a file may be damaged in any way
        raise InputError(
            f'tokenizer "{name}": expected {DEFAULT_TOKENIZER}, bytes, or a folder or a model in '
            f"the local cache (hf download {name} --include '*token*' 'config.json') that "
            f"transformers' AutoTokenizer loads: {to_one_line(error):.200}"
        ) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return Tokenizer(name, encode, make_chat_template(tokenizer), tokenizer.get_vocab)


def _load_mistral() -> Tokenizer:
    """Loads Mistral's first tokenizer, which is a part of the package `mistral-common`."""
    reason = f'tokenizer "{DEFAULT_TOKENIZER}"'
    package = import_optional("mistral_common", reason, "replay", "mistral-common")
    file = Path(str(package.__file__)).parent / "data" / "tokenizer.model.v1"
    if not file.is_file():
        raise InputError(f"{reason}: {file} does not exist; update mistral-common")
    model = import_optional("sentencepiece", reason, "replay").SentencePieceProcessor(str(file))

    def vocab() -> dict[str, int]:
        """Returns the map that vLLM makes. A text with several ids has the lowest of these ids."""
        return {model.id_to_piece(i): i for i in reversed(range(model.vocab_size()))}

    return Tokenizer(DEFAULT_TOKENIZER, model.encode, None, vocab)
