"""Settings from defaults, profiles, YAML files, environment and command line, with sources."""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_origin

from pydantic import ValidationError

from ttrain.config import Section, Settings, flatten, other_names, rules, yaml_text
from ttrain.config.base import NONE, assign, sections_of, takes_numbers
from ttrain.config.data import PYTHON_DOCS, Data
from ttrain.config.model import sizes_of
from ttrain.config.settings import first_start
from ttrain.config.training import TRAINING_STAGES, TRAININGS
from ttrain.config.yaml_text import InvalidYaml, configs_directory, one_line, shown
from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.text import rule_of
from ttrain.errors import UsageError

ENVIRONMENT_PREFIX = "TTRAIN__"
COMMAND_LINE = "command line"  # the origin of its values
PRESET = "model.preset"
SHOWN_KEYS = 60  # more than these are not listed in a message
S = TypeVar("S", bound=Section)
IS_SET = " is set"  # ends the origin of a value that follows from another setting
BUDGETS = {"tokens": "epochs", "epochs": "tokens"}  # of a training stage: one of the two


class Override(NamedTuple):
    origin: str
    key: str
    value: Any


@dataclass(frozen=True)
class LoadedSettings:
    settings: Settings
    sources: Mapping[str, str]


def load(
    overrides: Sequence[str] | JsonObject = (),
    *,
    files: Sequence[Path] = (),
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    base: Sequence[Override] = (),
) -> LoadedSettings:
    """Merge defaults < base < profiles < YAML files < environment < overrides, and validate.

    `overrides`: texts `key=value`, or {key: value}. `base`: an earlier run's settings that are not
    defaults. Raises UsageError.
    """
    return settings_of(
        layers(overrides, files, profiles, os.environ if environment is None else environment), base
    )


# --- where values are set


def layers(
    overrides: Sequence[str] | JsonObject,
    files: Sequence[Path] = (),
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    root: type[Section] | None = Settings,
) -> list[Override]:
    """All overrides, the weakest first. Raises UsageError for unreadable ones.

    `root`: the section whose types parse texts; None: they stay texts. With `Settings` a file may
    be TinySeek's `model_config.json`.
    """
    if unknown := [name for name in profiles if name not in profile_names()]:
        raise UsageError(
            f"there is no profile '{one_line(unknown[0])}'; there are {', '.join(profile_names())}"
        )
    trees = [
        (f"profile {name}", read_yaml(configs_directory() / "profiles" / f"{name}.yaml"))
        for name in profiles
    ]
    for path in files:
        tree = read_yaml(path)
        trees.append(
            (str(path), other_names.from_tinyseek(tree, str(path)) if root is Settings else tree)
        )
    trees += [
        (variable, _of_variable(variable, environment[variable]))
        for variable in sorted(environment)
    ]
    if isinstance(overrides, Mapping):
        paths_as_texts = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in overrides.items()
        }
        trees.append(("overrides", paths_as_texts))
    else:
        trees += [(COMMAND_LINE, _assignment(text)) for text in overrides]
    flat = [
        Override(origin, key, value)
        for origin, tree in trees
        for key, value in _leaves(tree, origin)
    ]
    return with_types(root, flat) if root else flat


def _of_variable(variable: str, value: str) -> JsonObject:
    name = variable.removeprefix("TTRAIN_")
    if variable.startswith(ENVIRONMENT_PREFIX):
        return {name[1:].lower().replace("__", "."): value}
    if name != variable and "__" in name:
        raise UsageError(
            f"{variable} is set, but settings begin with TTRAIN__; write {ENVIRONMENT_PREFIX}{name}"
        )
    return {}


def _assignment(text: str) -> JsonObject:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(
            f"'{one_line(text)}' is not a setting; write key=value without spaces, for example "
            "sft.epochs=3; quote a "
            f"path with spaces, write commas between files, and -c FILE for a file of settings"
        )
    return {key.strip(): value}


def _leaves(tree: JsonObject, origin: str) -> list[tuple[str, Any]]:
    leaves = list(flatten(tree))
    keys = [key for key, _ in leaves]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UsageError(
            f"'{one_line(twice[0])}' is set twice in {origin}, with dots and by its section; "
            "remove one"
        )
    return leaves


def read_yaml(path: Path) -> JsonObject:
    """The mapping in a YAML file; {} if empty. Raises UsageError."""
    try:
        tree = yaml_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read settings from {path}: {error.strerror}; name a YAML file that exists"
        ) from None
    except (InvalidYaml, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if tree is not None and not (
        isinstance(tree, dict) and all(isinstance(key, str) for key in tree)
    ):
        raise UsageError(
            f"{path} must hold a mapping of settings at its top level, such as 'sft: {{epochs: 2}}'"
        )
    return tree or {}


def profile_names() -> list[str]:
    return sorted(path.stem for path in (configs_directory() / "profiles").glob("*.yaml"))


def settings_of_task(root: type[S], overrides: Iterable[Override]) -> S:
    """The settings of a task, whose types parse texts here. Raises UsageError.

    Variables of settings that only pipelines have are ignored.
    """
    own = [
        item
        for item in overrides
        if not item.origin.startswith(ENVIRONMENT_PREFIX)
        or type_of(root, item.key) is not None
        or type_of(Settings, item.key) is None
    ]
    return merge(root, with_types(root, own))[0]


def with_types(root: type[Section], overrides: Iterable[Override]) -> list[Override]:
    """Parse texts of command line and environment by their settings' types.

    Texts of unknown settings stay. Raises UsageError.
    """
    typed: list[Override] = []
    for origin, key, value in overrides:
        kind = type_of(root, key)
        if (
            kind is not None
            and isinstance(value, str)
            and origin.startswith((COMMAND_LINE, ENVIRONMENT_PREFIX))
        ):
            try:
                value = yaml_text.read(value, kind)
            except InvalidYaml as error:
                raise UsageError(
                    f"{key} is {shown(value)} (from {origin}), which is not valid YAML: {error}; "
                    f"write a list as [a, b], and put a text that has brackets between quotes"
                ) from None
        typed += [Override(origin, name, leaf) for name, leaf in flatten({key: value})]
    return typed


def type_of(root: type[Section], key: str) -> Any:
    """The type of a setting or section by its dotted name; None if unknown."""
    kinds = types_by_name(root)
    if key in kinds:
        return kinds[key]
    if any(get_origin(kind) is dict and key.startswith(f"{name}.") for name, kind in kinds.items()):
        return Any  # what an architecture alone knows
    return Section | None if any(name.startswith(f"{key}.") for name in kinds) else None


# --- values that follow from others


def settings_of(overrides: list[Override], base: Sequence[Override] = ()) -> LoadedSettings:
    """Merge overrides, as `layers` returns them, into settings. Raises UsageError."""
    given = [*base, *_following(base, overrides), *_with_preset(overrides)]
    values = {item.key: item.value for item in given}
    automatic = [key for key in rules.KEYS if values.get(key, rules.AUTO) == rules.AUTO]
    given = [item for item in given if item.key not in automatic]
    if rules.BATCH_KEY in automatic:  # the default may not fit the length of the rows
        given.append(Override(rules.AUTO, rules.BATCH_KEY, rules.AUTO))
    settings, sources = merge(Settings, given)
    values = dict(flatten(settings.model_dump())) | dict.fromkeys(automatic, rules.AUTO)
    origin = rules.AUTO if values[rules.START] == NONE else f"{rules.START}{IS_SET}"
    changes: JsonDict = {}
    for key, value in rules.automatic(values).items():
        if key in automatic:
            assign(changes, key, value)
            sources[key] = "" if value == flatten_defaults(Settings)[key] else origin
    return LoadedSettings(
        settings.replaced(changes), {key: source for key, source in sources.items() if source}
    )


# The sizes of the strongest preset come first in its layer, so that sizes set there win.
def _with_preset(overrides: list[Override]) -> list[Override]:
    presets = [item for item in overrides if item.key == PRESET]
    if not presets:
        return overrides
    origin, _, name = presets[-1]
    first = _first_of_layer(overrides, origin)
    of_preset = [
        Override(f"preset {name}", f"model.{key}", size)
        for key, size in ({} if name is None else sizes_of(name)).items()
    ]
    return [
        item for item in (*overrides[:first], *of_preset, *overrides[first:]) if item.key != PRESET
    ]


def _following(base: Sequence[Override], overrides: list[Override]) -> Iterator[Override]:
    """Settings that follow from others: unnamed data sets, starts of stages, the tokenizer."""
    values = {item.key: item.value for item in (*base, *overrides)}
    sources = {
        name: _sources(values.get(f"data.{name}", Data.model_fields[name].default))
        for name in TRAININGS
    }
    named = [name for name in TRAININGS if f"data.{name}" in values]
    own = next((name for name in named if sources[name] not in ([], [PYTHON_DOCS])), None)
    for name in TRAININGS:
        if own and name not in named and sources[name]:
            sources[name] = []
            yield Override(f"data.{own}{IS_SET}", f"data.{name}", ())
    present = [name for name in TRAINING_STAGES if sources[name]]
    starts = {}
    for name, row in TRAINING_STAGES.items():
        key = f"{name}.start_from"
        usual = row.settings.model_fields["start_from"].default
        starts[name] = str(values.get(key, usual))
        nearest = next(
            (start for start in row.starts if start in present),
            row.starts[-1] if row.starts else usual,
        )
        if name in present and key not in values and nearest != usual:
            starts[name] = nearest
            yield Override(rules.AUTO, key, nearest)
    first, model = first_start(starts, present)
    if model is None:
        return
    start = f"{first}.start_from"
    origin = next((item.origin for item in reversed(overrides) if item.key == start), None)
    # All overrides are stronger than the base.
    layer = 0 if origin is None else _first_of_layer(overrides, origin)
    # Pretraining gives a second head to any model.
    free = ("model.multi_token.",) if first == "pretrain" else ()
    shapes = [
        f"{item.key} (from {item.origin})"
        for item in overrides[layer:]
        if item.key.startswith("model.")
        and item.value is not None
        and not item.key.startswith(free)
    ]
    if shapes:
        raise UsageError(
            f"{', '.join(dict.fromkeys(shapes))} describes a new model, but {start} is {model}, "
            "which has its own shape; remove one of them"
        )
    # A base with the same start has its own values of both.
    if model != next((item.value for item in base if item.key == start), None):
        yield Override(f"{start}{IS_SET}", "tokenizer.existing", model)
        yield Override(f"{start}{IS_SET}", "tokenizer.template", "auto")


def _sources(value: Any) -> list[Any]:
    return [
        entry
        for entry in (value if isinstance(value, list | tuple) else [value])
        if entry not in (None, "", NONE)
    ]


# All variables are one layer.
def _first_of_layer(overrides: list[Override], origin: str) -> int:
    origins = [item.origin.partition(ENVIRONMENT_PREFIX)[1] or item.origin for item in overrides]
    return origins.index(origin.partition(ENVIRONMENT_PREFIX)[1] or origin)


# --- one tree, validated once


def merge(root: type[S], overrides: Iterable[Override]) -> tuple[S, dict[str, str]]:
    """Validate the defaults with overrides once; return settings and sources of their values.

    Raises UsageError with a line for each wrong setting: name, value, source, rule.
    """
    given: dict[str, Override] = {}
    keys = known_keys(root)
    for item in overrides:
        section = f"{item.key}."
        if item.value in (None, {}) and any(key.startswith(section) for key in keys):
            continue  # a section in which nothing is set
        given = {key: earlier for key, earlier in given.items() if not key.startswith(section)}
        given[item.key] = item
        name = item.key.rpartition(".")[2]
        other = f"{item.key.removesuffix(name)}{BUDGETS.get(name)}"
        if (
            item.value is not None
            and other in keys
            and (other not in given or given[other].origin != item.origin)
        ):
            given[other] = Override(f"{item.key}{IS_SET}", other, None)  # of a weaker layer
    # A section's other fields keep the stage's own defaults.
    tree = root.model_construct().model_dump()
    for item in given.values():
        assign(tree, item.key, item.value)
    sources = {key: item.origin for key, item in given.items()}
    wrong = {
        key: f"{key} is {shown(item.value)} (from {item.origin}) but must be a number"
        for key, item in given.items()
        if isinstance(item.value, bool)
        and takes_numbers(type_of(root, key))  # pydantic reads it as 1 or 0
    }
    try:
        settings = root.model_validate(tree)
    except ValidationError as error:
        wrong = _wrong_settings(error, tree, sources, root) | wrong
    if wrong:
        raise UsageError("\n".join(wrong.values()))
    return settings, sources


# One line by name, also where each form that a setting may have gives an error of its own.
def _wrong_settings(
    error: ValidationError, tree: JsonObject, sources: Mapping[str, str], root: type[Section]
) -> dict[str, str]:
    lines: dict[str, str] = {}
    names = [*types_by_name(root)]
    known = (
        f"there are {', '.join(names)}"
        if len(names) <= SHOWN_KEYS
        else "`ttrain config show` lists them all"
    )
    for item in error.errors(include_url=False):
        name = _name_in(tree, item["loc"])
        rule = rule_of(item)
        below = [key for key in sources if f"{key}.".startswith(f"{name}.")]
        is_known = item["type"] != "extra_forbidden" and (
            name in sources or item["type"] == "missing"
        )
        if item["type"] == "value_error" and not rule.startswith("must "):
            lines[name] = one_line(
                f"{name}: {rule}" if name and not rule.startswith(name) else rule
            )
        elif below and not is_known:
            for key in below:
                lines[key] = (
                    f"unknown setting '{one_line(key)}' (from {sources[key]}); "
                    f"{other_names.suggestion(key, names) or known}"
                )
        elif name in lines:
            lines[name] += f" or {rule.removeprefix('must be ')}"
        else:
            above = (source for key, source in sources.items() if f"{name}.".startswith(f"{key}."))
            origin = next(above, sources[below[0]] if below else "defaults")
            lines[name] = one_line(f"{name} is {shown(item['input'])} (from {origin}) but {rule}")
    return lines


def _name_in(tree: Any, location: Iterable[str | int]) -> str:
    steps = []
    for step in location:
        entries = dict(enumerate(tree)) if isinstance(tree, list | tuple) else tree
        if isinstance(entries, Mapping) and step in entries:
            steps.append(str(step))
            tree = entries[step]
    return ".".join(steps)


# --- the names of settings


@functools.cache
def flatten_defaults(root: type[Section]) -> JsonDict:
    return dict(flatten(root.model_construct().model_dump()))


def known_keys(root: type[Section] = Settings) -> list[str]:
    return [*flatten_defaults(root)]


@functools.cache
def types_by_name(root: type[Section]) -> dict[str, Any]:
    """Types of all settings by dotted names, also of sections absent by default."""
    kinds = {}
    for name, field in root.model_fields.items():
        sections = sections_of(field.annotation)
        if not sections or field.default is None:
            kinds[name] = field.annotation
        for section in sections:
            kinds |= {f"{name}.{inner}": kind for inner, kind in types_by_name(section).items()}
    return kinds
