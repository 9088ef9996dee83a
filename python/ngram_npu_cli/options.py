"""Contains the options of the commands. A field of a data class defines an option of the library
and an argument of the command line.

The docstring of the class contains the help text. `add_options` makes arguments of `argparse` from
fields and docstring. This module imports neither torch nor NumPy, so that `--help` stays fast.
"""

# ruff: noqa: RUF009 (fields are defined by calls of `option`, as by `dataclasses.field`)

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from ngram_npu.config import NgramConfig

Options = TypeVar("Options")

SAMPLE_SIZE = 10_000_000
"""Number of characters, for which measuring all settings takes two minutes on two cores."""


COMPLETE_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""`shtab.FILE`, by which shells complete the names of files."""


def make_parser(
    number_type: type, name: str, is_valid: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    """Returns a function that parses a number, for argparse, which shows `name` in error
    messages."""

    def parse(text: str) -> Any:
        value = number_type(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
        return value

    parse.__name__ = name
    return parse


parse_count = make_parser(int, "integer", lambda value: value >= 1, "at least 1")
parse_megabytes = make_parser(int, "integer", lambda value: value >= 0, "at least 0")
parse_probability = make_parser(
    float, "number", lambda value: 0 < value <= 1, "above 0 and at most 1"
)
parse_share = make_parser(float, "number", lambda value: 0 <= value < 10, "at least 0 and below 10")


def parse_counts(text: str) -> list[int]:
    """Parses integers of at least 1, separated by commas."""
    return sorted({parse_count(word) for word in text.split(",")})


def parse_sample(text: str) -> int | None:
    """Parses a number of millions of characters. 0 stands for all characters."""
    return parse_megabytes(text) * 1_000_000 or None


def parse_lookup(text: str) -> dict[str, Any]:
    """Parses n-gram sizes, such as 1-16, or "ladder", to keywords of `NgramConfig`."""
    if text == "ladder":
        return {"sizes": text}
    bounds = re.fullmatch("([1-9][0-9]*)-([1-9][0-9]*)", text)
    if bounds is None or int(bounds[1]) > int(bounds[2]):
        raise argparse.ArgumentTypeError(f"expected MIN-MAX, such as 1-16, or ladder, got {text}")
    return {"min_n": int(bounds[1]), "max_n": int(bounds[2])}


parse_counts.__name__ = "list of integers"
parse_sample.__name__ = "integer"


def option(default: Any = None, *flags: str, group: str = "", **argument: Any) -> Any:
    """Defines a field of an options class that is also an argument of the command line.

    Args:
        default: Default of the field. It is not printed, because the help text states it.
        flags: The spellings; by default the field's name as a long option.
        group: Heading of the group in the help.
        argument: Keywords for `argparse.ArgumentParser.add_argument`, in addition to those that
            `describe_type` returns for the field's type.
    """
    metadata = {"flags": flags, "group": group, "argument": argument}
    return field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, *classes: type) -> None:
    """Adds the fields of options classes to a parser, in groups, except those that `option` does
    not define."""
    groups: dict[str, Any] = {"": parser}
    for options_class in classes:
        help_texts = read_attribute_docs(options_class)
        types_of_fields = typing.get_type_hints(options_class)
        for option_field in dataclasses.fields(options_class):
            if not option_field.metadata:
                continue
            group = option_field.metadata["group"]
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            name = option_field.name
            flags = option_field.metadata["flags"] or ("--" + name.replace("_", "-"),)
            argument = describe_type(types_of_fields[name]) | option_field.metadata["argument"]
            if flags[0].startswith("-"):  # argparse sets both for positional arguments itself
                argument |= {"dest": name, "default": option_field.default}
            action = groups[group].add_argument(*flags, help=help_texts.get(name, ""), **argument)
            if action.metavar in ("FILE", "PATH"):
                action.complete = COMPLETE_FILES


def describe_type(field_type: Any) -> dict[str, Any]:
    """Returns the keywords of `add_argument` that follow from a field's type."""
    for part_type in (field_type, *typing.get_args(field_type)):  # itself, or the parts of a union
        if typing.get_origin(part_type) is Literal:
            return {"choices": typing.get_args(part_type)}
        if part_type is int:
            return {"type": parse_count, "metavar": "N"}
        if part_type is bool:
            return {"action": "store_true"}
        if part_type is Path:
            return {"type": Path, "metavar": "FILE"}
    return {}


def read_attribute_docs(options_class: type) -> dict[str, str]:
    """Returns the texts of the "Attributes:" sections of a class and its bases by name."""
    docs: dict[str, str] = {}
    for base in reversed(options_class.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        for entry in re.split(r"\n(?=    \S)", section.partition("\n\n")[0]):
            name, _, text = entry.partition(":")
            docs[name.strip()] = " ".join(text.split()).replace("%", "%%")
    return docs


def make_options(options_class: Callable[..., Options], arguments: argparse.Namespace) -> Options:
    """Returns an object of an options class with the values of the command line."""
    fields = dataclasses.fields(options_class)  # type: ignore[arg-type]
    names = [field.name for field in fields if field.metadata]
    return options_class(**{name: getattr(arguments, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class LogCommandOptions:
    """Input and output of a command that reads logs.

    Attributes:
        paths: a file of conversations or a log (JSON, JSON Lines, CSV, Parquet, Arrow), a folder of
            them, either also as a URL such as s3://bucket/logs, or - for stdin, which is the
            default if it is a pipe
        demo: use sources of Python's standard library as input, to see how it works
        json: write the result as JSON; - for stdout (the text then goes to stderr)
    """

    paths: Any = option((), "paths", nargs="*", metavar="PATH")
    demo: bool = option(False)
    json: str | None = option(group="output", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options for reading logs.

    Attributes:
        limit: only the first N conversations of each input
        map: a preset, or fields with JMESPath expressions, such as 'prompt=input.question,
            answer=output.text' (default: the first preset that matches each record)
        strict: stop with an error at a record that is not a conversation, or that the chat template
            rejects (default: skip it and count it)
        tokenizer: your model's tokenizer: a local Hugging Face folder, or ORG/NAME from the hub's
            local cache; or mistral-v1, mistral-v3, bytes; ids: use only recorded token ids
            (default: mistral-v1, with a warning)
        chat_template: auto: the template in the tokenizer's folder, or the default template if it
            has none; default: always the default template; none: use texts without a template
            (default: auto)
        jobs: number of processes that parse and tokenize the input (default: 1)
        shard: read only share I of N of the files, such as 1/4: consecutive files of the list of
            all files (default: all files)
    """

    limit: int | None = option(group="input")
    map: str | None = option(group="input", metavar="PRESET|FIELD=EXPRESSION,...")
    strict: bool = option(False, group="input")
    tokenizer: str | None = option(group="input", metavar="NAME|FOLDER")
    chat_template: Literal["auto", "default", "none"] = option("auto", group="input")
    jobs: int | None = option(group="input")
    shard: str | None = option(group="input", metavar="I/N")


CONFIG_FIELDS = (
    "min_n",
    "max_n",
    "k",
    "match_policy",
    "overlap",
    "max_len",
    "sizes",
    "min_draft_probability",
    "store",
    "store_tokens",
)
"""Fields that `ReplayOptions` has in common with `NgramConfig`."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(ReadingOptions):
    """Options for replaying. Where a default is None, the default of `NgramConfig` applies.

    Attributes:
        min_n: shortest n-gram looked up (default: 2)
        max_n: longest n-gram looked up (default: 5)
        sizes: look up n-grams of min_n to max_n tokens, or of 1, 2, 4, 8 and 16 tokens (default:
            consecutive; a ladder with a min_draft_probability)
        k: draft tokens per step (default: 5; 8 with a ladder)
        match_policy: which of equally long matches to follow (default: earliest; latest with a
            ladder)
        overlap: let a draft that reaches the end of the context continue with its own first tokens
            (default: only with a ladder)
        max_len: no draft reaches beyond this context length (default: no limit)
        min_draft_probability: end a draft where the probability that all of it is accepted falls
            below P; 0.177 is a good value (default: draft K tokens)
        costs: costs fitted on your logs (a file of ngram_npu.Costs), for a min_draft_probability
            (default: the package's)
        store: with a min_draft_probability, draft also from other requests' text, at once or after
            they have finished (default: only from each request's own text). Each input has its own
            store, which is empty at first
        store_tokens: capacity of the store in tokens (default: 1000000)
        drafts: what the runner verifies: the drafted tokens (trimmed: V1's ngram and custom_class)
            or always K tokens, filled up with the newest token (padded: V2, V1's ngram_gpu)
            (default: trimmed)
        generated_only: with a store, replay each turn as a request, so that only completions are
            stored
        batch_size: conversations replayed together (default: 32; 1 with a store)
    """

    min_n: int | None = None
    max_n: int | None = None
    sizes: Literal["consecutive", "ladder"] | None = None
    k: int | None = option(group="drafting", metavar="K")
    match_policy: Literal["earliest", "latest"] | None = option(group="drafting")
    overlap: bool | None = option(group="drafting", action=argparse.BooleanOptionalAction)
    max_len: int | None = option(group="drafting", metavar="LEN")
    min_draft_probability: float | None = option(
        group="drafting", type=parse_probability, metavar="P"
    )
    costs: str | PathLike[str] | None = option(
        None, "--draft-costs", group="drafting", metavar="FILE"
    )
    store: Literal["live", "finish"] | None = option(group="drafting")
    store_tokens: int = option(1_000_000, group="drafting")
    drafts: Literal["padded", "trimmed"] = option("trimmed", group="drafting")
    generated_only: bool = option(False, group="drafting")
    batch_size: int | None = option(group="input", metavar="B")

    def __post_init__(self) -> None:
        if self.drafts not in ("padded", "trimmed"):
            raise ValueError(f"drafts: expected 'padded' or 'trimmed', got {self.drafts!r}")
        for name in ("batch_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    def config(self) -> NgramConfig:
        """Returns the drafting settings.

        Raises:
            InputError: An option is out of its range or contradicts another, or the file of costs
                cannot be read.
        """
        from ngram_npu.config import NgramConfig
        from ngram_npu.errors import InputError

        has_probability = self.min_draft_probability is not None
        if self.costs is not None and not has_probability:
            raise InputError("costs: expected none without min_draft_probability")
        if self.generated_only and self.store is None:
            raise InputError("generated_only: expected False without a store")
        settings = {name: getattr(self, name) for name in CONFIG_FIELDS}
        settings["sizes"] = self.sizes or ("ladder" if has_probability else "consecutive")
        try:
            return NgramConfig(**settings, costs=self.costs)
        except ValueError as error:
            raise InputError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ReadingOptions):
    """Options for tuning.

    Attributes:
        sample: replay a sample of at most this many million characters; 0: replay all (default: 10)
        jobs: number of processes that parse the input and replay settings (default: one per core)
        runner: where vLLM drafts: on its GPU (ngram_gpu), on the host (custom_class), or on the
            host with vLLM-Ascend (ngram); this determines what is verified (default: gpu and host,
            one recommendation each)
        synchronous: time that a step takes longer without asynchronous scheduling, which the
            runners host and ascend do not support, as a share of a step; 0 on a CPU (default: 0.1,
            an assumption; 0 with step times of your own server)
        store: also search stores, from which requests draft other requests' text
    """

    sample: int | None = option(SAMPLE_SIZE, group="search", type=parse_sample, metavar="MB")
    runner: Literal["gpu", "host", "ascend"] | None = option(group="search")
    synchronous: float | None = option(group="search", type=parse_share, metavar="SHARE")
    store: bool = option(False, group="search")


@dataclass(frozen=True, kw_only=True)
class LearnOptions(ReadingOptions):
    """Options for learning.

    Attributes:
        scope_field: field of each record, such as request.user, with dots between the keys; only
            requests with the same value share text, and a record without it is skipped (default:
            all requests share text)
        store_tokens: capacity of the store in tokens (default: the smallest power of two that
            holds everything, at most 64 Mi)
        k: draft tokens per step (default: 8); the learning curve is also replayed with 8, 16 and 32
        min_draft_probability: as for replay (default: 0.177)
        cost: cost of verifying one draft token as a fraction of a step (default: 0.05)
    """

    scope_field: str | None = option(group="store", metavar="KEY[.KEY...]")
    store_tokens: int | None = option(group="store")
    k: int = option(8, group="learning curve", metavar="K")
    min_draft_probability: float = option(
        0.177, group="learning curve", type=parse_probability, metavar="P"
    )
    cost: float = option(
        0.05, "-c", "--cost", group="learning curve", type=parse_share, metavar="C"
    )


LOOKUP_METAVAR = "MIN-MAX|ladder"


@dataclass(frozen=True, kw_only=True)
class ReplayCommandOptions(LogCommandOptions):
    """Options that only the command `replay` has.

    Attributes:
        lookup: look up n-grams of MIN to MAX tokens, such as 1-16, or of 1, 2, 4, 8 and 16 tokens
            (default: 2-5; ladder with a min_draft_probability)
    """

    lookup: Any = option(group="drafting", type=parse_lookup, metavar=LOOKUP_METAVAR)


@dataclass(frozen=True, kw_only=True)
class TuneCommandOptions(LogCommandOptions):
    """Options that only the command `tune` has.

    Attributes:
        cost: cost of verifying one draft token as a fraction of a step, such as 0.05; step times of
            `ngram-npu measure-cost`; or an example: example-8b-h100, example-8b-l4,
            example-70b-4xh100 (default: example-8b-h100)
        batch_size: use only these batch sizes of the cost
        lookup: search only n-grams of MIN to MAX tokens, such as 1-16, or only ladders (default:
            several ranges, and ladders)
        against: a setting to compare with, as fields of NgramConfig, such as '{"min_n": 2, "max_n":
            4, "k": 3}' (default: n-grams of 2 to 5, k = 5)
        html: write a report for a browser (needs the extra html)
        beside: instead of searching settings, estimate what n-grams add to a neural drafter (EAGLE,
            MTP, a draft model) of which MEAN_ACCEPTED draft tokens per step are accepted (vLLM's
            mean acceptance length - 1)
        k: draft tokens per step of this drafter, with --beside (default: 4)
    """

    cost: str = option(
        "example-8b-h100", "-c", "--cost", group="verification cost", metavar="C|FILE|EXAMPLE"
    )
    batch_size: Any = option(group="search", type=parse_counts, metavar="B,...")
    lookup: Any = option(group="search", type=parse_lookup, metavar=LOOKUP_METAVAR)
    against: str | None = option(group="search", metavar="JSON")
    html: Path | None = option(group="output")
    beside: float | None = option(group="neural drafter", type=float, metavar="MEAN_ACCEPTED")
    k: int | None = option(group="neural drafter", metavar="K")


@dataclass(frozen=True, kw_only=True)
class LearnCommandOptions(LogCommandOptions):
    """Options that only the command `learn` has.

    Attributes:
        output: the file of the store, replaced atomically (default: none, only the report)
        plot: draw the learning curve (needs matplotlib)
    """

    output: Path | None = option(None, "-o", "--output", group="store")
    plot: Path | None = option(group="output")


@dataclass(frozen=True, kw_only=True)
class MeasureCostOptions:
    """Options for measuring step times.

    Attributes:
        output: JSON file to add the times to
        url: the server, without /v1 (default: http://localhost:8000)
        model: model name (default: the first that the server lists)
        batch_sizes: batch sizes to measure (default: 1,4,16,64)
        prompt_tokens: approximate length of each prompt (default: 1024)
        max_tokens: length of each answer (default: 128)
        rounds: rounds per batch size, of which the median is used (default: 3)
    """

    output: Path = option(None, "output")
    url: str = option("http://localhost:8000")
    model: str | None = option()
    batch_sizes: Any = option((1, 4, 16, 64), "--batch-size", type=parse_counts, metavar="B,...")
    prompt_tokens: int = option(1024)
    max_tokens: int = option(128)
    rounds: int = option(3)


@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    """Options for printing a result.

    Attributes:
        json: print JSON
    """

    json: bool = option(False)


@dataclass(frozen=True, kw_only=True)
class StoreInfoOptions(PrintOptions):
    """Options of the command that describes a store.

    Attributes:
        file: the file of the store
    """

    file: Path = option(None, "file")
