"""Converts conversations to token ids, by the model's tokenizer and chat template.

Nothing is downloaded: a tokenizer is a Hugging Face folder, a model in the hub's local cache, or
one of the package `mistral-common`. No tokenizer here adds special tokens.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
_MISTRAL_FILES = {
    "mistral-v1": "tokenizer.model.v1",
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
}
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
    """A function from text to token ids; `vocab` returns what a server's `get_vocab()` returns."""

    name: str
    encode: Callable[[str], list[int]]
    folder: Path | None = None
    vocab: Callable[[], Mapping[str, int]] | None = None


class Tokenization:
    """Converts conversations to requests. The tokenizer is loaded for the first text.

    Args:
        name: Name of the tokenizer; None: the default, with a note.
        chat_template: "auto": the template in the tokenizer's folder, or the default template if it
            has none; "default": the default template; "none": texts as they are.
    """

    def __init__(self, name: str | None = None, chat_template: str = "auto") -> None:
        self.tokenizer: Tokenizer | None = None
        self.is_guessed = False
        self._name, self._chat_template = name, chat_template
        self._template: ChatTemplate | None = None

    def load(self) -> Tokenizer:
        """Loads the tokenizer. Raises an InputError if there is none of this name."""
        if self.tokenizer is None:
            self.is_guessed = self._name is None
            self.tokenizer = load_tokenizer(self._name or DEFAULT_TOKENIZER)
            if self._chat_template == "auto" and self.tokenizer.folder is not None:
                self._template = load_chat_template(self.tokenizer.folder)
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
        encode = self.load().encode
        try:
            rendered = render_turns(conversation, self._template, self._chat_template == "none")
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
) -> Iterator[tuple[str, Conversation, list[TokenRequest]]]:
    """Yields the name of the input, each conversation, and its requests."""
    for name, conversation in reader:
        try:
            yield name, conversation, tokenization.tokenize(conversation)
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
    conversation: Conversation, template: ChatTemplate | None, as_is: bool = False
) -> list[list[tuple[str, str]]]:
    """Returns lists of pairs of texts: prompt and answer. A prompt is the text that a turn adds.

    Some templates change earlier turns, for example omit old reasoning. The next turn then begins a
    new list, with the complete context as its first prompt.

    Args:
        template: The model's template; None: `USER: {user} ASSISTANT:`.
        as_is: Whether no template is used.
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
        elif as_is:
            prompt = "".join(message["content"] for message in messages)
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
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Returns the template of a Hugging Face folder; None if the folder has no template."""
    settings: Any = {}
    with suppress(FileNotFoundError):
        try:
            settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{folder}/tokenizer_config.json: not JSON") from error
    settings = settings if isinstance(settings, dict) else {}
    source = settings.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        source = {item.get("name"): item.get("template") for item in source}.get("default")
    if (file := folder / "chat_template.jinja").is_file():
        source = file.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    # vLLM uses this renderer too. It runs templates, which are untrusted programs, in a sandbox.
    reason = f"{folder}: without --chat-template default, its chat template"
    renderer = import_optional("transformers.utils.chat_template_utils", reason, "replay")
    special = {name: settings.get(name) for name in ("bos_token", "eos_token")}
    special = {k: v.get("content") if isinstance(v, dict) else v or "" for k, v in special.items()}

    def render(messages: Sequence[Message], tools: Sequence[Any], is_answer_next: bool) -> str:
        try:
            texts, _ = renderer.render_jinja_template(
                [[_parse_arguments(message) for message in messages]],
                tools=list(tools) or None,
                chat_template=source,
                add_generation_prompt=is_answer_next,
                **special,
            )
        except Exception as error:  # a template may fail in any way
            raise RecordError(
                f"the chat template of {folder} rejects the conversation: "
                f"{to_one_line(error):.200}; --chat-template default uses another one"
            ) from error
        return str(texts[0])

    return render


def _parse_arguments(message: Message) -> Message:
    """Converts arguments of calls from JSON text, as in APIs, to objects for templates."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        with suppress(ValueError):  # a text that is not JSON is not changed
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


# Tokenizers


def load_tokenizer(name: str = DEFAULT_TOKENIZER) -> Tokenizer:
    """Loads a tokenizer: `mistral-v1`, `mistral-v3`, `bytes`, a Hugging Face folder, or a model
    ("org/name") in the hub's local cache.

    Raises:
        InputError: There is no such tokenizer, or a package is missing.
    """
    if name in _MISTRAL_FILES:
        return _load_mistral(name)
    if name == "bytes":
        return Tokenizer(name, lambda text: list(text.encode("utf-8")))
    path = Path(name)
    if path.is_dir():
        return _load_folder(name, path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        known = ", ".join((*_MISTRAL_FILES, "bytes"))
        raise InputError(f'tokenizer "{name}" is neither one of {known} nor an existing folder')
    hub = import_optional("huggingface_hub", f"tokenizer {name}", "replay")
    file = hub.try_to_load_from_cache(name, "tokenizer.json")
    if not isinstance(file, str):
        raise InputError(
            f'tokenizer "{name}" is neither a folder nor in the local cache; nothing is downloaded '
            f"here: hf download {name} --include 'tokenizer*'"
        )
    return _load_folder(name, Path(file).parent)


def _load_mistral(name: str) -> Tokenizer:
    try:
        package = importlib.import_module("mistral_common")
        importlib.import_module("sentencepiece")  # without which mistral-common has a NameError
        module = importlib.import_module("mistral_common.tokens.tokenizers.sentencepiece")
    except ImportError as error:
        raise InputError(
            f'tokenizer "{name}" needs the package {error.name or "mistral_common"}: '
            'pip install mistral-common sentencepiece (the extra "replay"); or choose --tokenizer '
            "FOLDER with your model's tokenizer.json"
        ) from error
    file = Path(str(package.__file__)).parent / "data" / _MISTRAL_FILES[name]
    if not file.is_file():
        raise InputError(f'tokenizer "{name}": {file} does not exist; update mistral-common')
    tokenizer = module.SentencePieceTokenizer(file)

    def vocab() -> dict[str, int]:
        """Returns the map that vLLM makes. A text with several ids has the lowest of these ids."""
        return {tokenizer.id_to_piece(i): i for i in reversed(range(tokenizer.n_words))}

    return Tokenizer(name, lambda text: tokenizer.encode(text, bos=False, eos=False), None, vocab)


def _load_folder(name: str, folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{folder}: expected a tokenizer.json; transformers writes it for other tokenizers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    package = import_optional("tokenizers", f"tokenizer {name}", "replay")
    try:
        tokenizer = package.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust binding raises bare Exception
        raise InputError(f"{file}: cannot be loaded: {to_one_line(error):.200}") from error
    # A tokenizer.json may contain truncation and padding settings from training.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return Tokenizer(name, encode, folder, tokenizer.get_vocab)
