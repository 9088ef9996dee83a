"""Checks the settings of the plugin for vLLM in the environment and the command of a process."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLUGIN = "ngram_npu"
PREFIX = "NGRAM_NPU_"
_ENABLE, _NEURAL, _FEED = (f"{PREFIX}VLLM{name}" for name in ("", "_NEURAL", "_STORE_FEED"))
_OTHER_VARIABLES = (_ENABLE, f"{PREFIX}VLLM_CORRECTION", f"{PREFIX}INSTRUCTION_SET")
"""Variables that are not options."""
_VLLM_VARIABLES = ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER")
"""vLLM's variables that affect the plugin."""
_TRUE_VALUES = ("1", "true")
"""Values that turn on an option of the plugin, in any case of letters."""
_MIN_SIMILARITY = 0.8
"""Ratio of ``difflib`` from which an unknown variable is a misspelling of a known one."""


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of a process that loads the plugin, or of this process."""

    variables: Mapping[str, str]
    """The environment."""
    additional_config: Any = None
    """The parsed argument ``--additional-config``; None: there is none."""

    @property
    def has_section(self) -> bool:
        """Whether ``--additional-config`` has options of the plugin."""
        return isinstance(self.additional_config, Mapping) and PLUGIN in self.additional_config

    def list_variables(self) -> dict[str, str]:
        """Returns the variables that affect ngram_npu, in alphabetical order."""
        return {
            name: value
            for name, value in sorted(self.variables.items())
            if name.startswith(PREFIX) or name in _VLLM_VARIABLES
        }


def read_settings(pid: int | None) -> ProcessSettings:
    """Reads the settings of a process; None: this one.

    Raises:
        ValueError: There is no such process, or its settings cannot be read.
    """
    if pid is None:
        return ProcessSettings(os.environ)
    folder = Path(f"/proc/{pid}")
    try:
        lines, arguments = (
            (folder / name).read_bytes().decode(errors="replace").split("\0")
            for name in ("environ", "cmdline")
        )
    except OSError as error:
        raise ValueError(
            f"--pid: expected a process of this user, got {pid}: {error.strerror}"
        ) from error
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    return ProcessSettings(variables, _find_additional_config(arguments))


def _find_additional_config(arguments: Sequence[str]) -> Any:
    """Returns the parsed value; the text itself if it is not JSON, which vLLM rejects. Options that
    are given one by one (``--additional-config.ngram_npu.store``) are not read."""
    text = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == "--additional-config":
            text = value or following  # the last one counts
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def check_plugin(settings: ProcessSettings, *, has_vllm: bool) -> tuple[str, list[str]]:
    """Returns whether vLLM finds the plugin and the plugin is on, and the problems of settings."""
    import importlib.metadata  # takes a sixth of the package's import

    variables = settings.variables
    plugin, neural = variables.get(_ENABLE, ""), variables.get(_NEURAL, "")
    # With NGRAM_NPU_VLLM_NEURAL=1, n-grams draft in addition to a neural drafter.
    is_neural = neural.lower() in _TRUE_VALUES
    is_on = plugin == "1" or (not plugin and is_neural)
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN)
    listed_plugins = variables.get("VLLM_PLUGINS")
    is_loaded = False
    if not any(True for _ in entry_points):
        state = "not found: the package is not installed with its entry points"
    elif listed_plugins is not None and PLUGIN not in listed_plugins.split(","):
        state = f"off: VLLM_PLUGINS does not list {PLUGIN}"
    else:
        is_loaded = True
        state = "on" if is_on else f"off: set {_ENABLE}=1 in the server's environment"
    problems = []
    if plugin not in ("", "0", "1"):
        problems.append(f"{_ENABLE}={plugin}: expected 0 or 1, so the plugin is off")
    if is_neural and plugin == "0":
        problems.append(f"{_NEURAL}=1: off, because of {_ENABLE}=0")
    if is_on:
        if not has_vllm:
            problems.append(f"{_ENABLE}=1: vLLM is not installed here")
        if not is_loaded:
            problems.append(f"{_ENABLE}=1: the plugin is {state}")
        if is_neural and variables.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
            problems.append(f"{_NEURAL}=1: the V1 runner does not combine n-gram and neural drafts")
    elif settings.has_section and not plugin:  # NGRAM_NPU_VLLM=0 is deliberate
        problems.append(f"--additional-config: {_describe_no_effect(state)}")
    return state, problems


def _describe_no_effect(plugin_state: str) -> str:
    return f"no effect (except on the method custom_class), because the plugin is {plugin_state}"


def check_feed(settings: ProcessSettings, plugin_state: str) -> tuple[str | None, list[str]]:
    """Returns what the publishers of ``NGRAM_NPU_VLLM_STORE_FEED`` need, and the problems of the
    variable."""
    if not settings.variables.get(_FEED):
        return None, []
    needs = "publishers need prefix caching and enable_kv_cache_events; a reader needs neither"
    problems = []
    if plugin_state != "on":
        problems.append(f"{_FEED}: no effect, because the plugin is {plugin_state}")
    for package in ("msgspec", "zmq"):
        if importlib.util.find_spec(package) is None:
            problems.append(f"{_FEED}: not installed: {package}")
    # The variable is not needed if additional_config has the option.
    store = settings.variables.get(f"{PREFIX}VLLM_STORE")
    if store is not None and store.lower() not in _TRUE_VALUES:
        problems.append(f"{_FEED}: expected {PREFIX}VLLM_STORE=1, got {store}")
    return needs, problems


def check_options(settings: ProcessSettings, plugin_state: str) -> list[str]:
    """Returns the problems of options, and the variables that are misspelled or have no effect.
    Nothing is checked without torch, because there is no plugin then."""
    try:
        from ngram_npu.engines.vllm import options
    except Exception:  # the report contains why torch does not import
        return []
    problems = []
    for read, source in (
        (options.read_environment, settings.variables),
        (options.read_section, settings.additional_config),
    ):
        try:
            for name, value in read(source).items():
                options.check_value(name, value)
        except ValueError as error:
            problems.append(str(error))
    variables = {name: f"{options.PREFIX}{name.upper()}" for name in options.OPTION_TYPES}
    if plugin_state != "on" and not settings.variables.get(_ENABLE):
        # The other checks report these two. NGRAM_NPU_VLLM=0 is deliberate.
        unused = settings.variables.keys() & {*variables.values()} - {_NEURAL, _FEED}
        if unused:
            names = ", ".join(sorted(unused))
            problems.append(f"{names}: {_describe_no_effect(plugin_state)}")
    known = [*_OTHER_VARIABLES, *variables.values()]
    former = (f"{options.PREFIX}{name.upper()}" for name in options.REMOVED_OPTIONS)
    for name in sorted(settings.variables.keys() - {*known, *former}):
        hint = _suggest_variable(name, known) if name.startswith(PREFIX) else ""
        if (hint or name.startswith(options.PREFIX)) and not _is_of_kubernetes(name):
            problems.append(f"{name}: unknown variable{hint}")
    return problems


def _suggest_variable(name: str, known: Sequence[str]) -> str:
    """Returns the end of a message that suggests a known variable; empty if none is similar."""
    words = {variable.removeprefix(PREFIX): variable for variable in known}
    word = name.removeprefix(PREFIX)
    similar = difflib.get_close_matches(word, words, n=1, cutoff=_MIN_SIMILARITY)
    if f"VLLM_{word}" in words:
        similar = [f"VLLM_{word}"]
    return "".join(f"; did you mean {words[match]}?" for match in similar)


def _is_of_kubernetes(name: str) -> bool:
    """Kubernetes sets such variables for a service whose name begins with ngram-npu-vllm."""
    return re.search(r"_(SERVICE_(HOST|PORT)\w*|PORT(_\d+_\w+)?)$", name) is not None
