"""Settings from defaults, profiles, YAML files, the environment and the command line, with the source of every value."""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import ValidationError

from ttrain.config import Section, Settings, flatten, other_names, rules, yaml_text
from ttrain.config.base import NONE, assign, types_of
from ttrain.config.data import LEARNT, PYTHON_DOCS, Data
from ttrain.config.model import sizes_of
from ttrain.config.settings import existing_model_of, last_of, root_of
from ttrain.config.training import TRAINING_STAGES
from ttrain.config.yaml_text import InvalidYaml, one_line, shown
from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.text import first_of, rule_of
from ttrain.errors import UsageError

ENVIRONMENT_PREFIX = "TTRAIN__"
COMMAND_LINE = "command line"  # the origin of its values
PRESET = "model.preset"
SHOWN_KEYS = 60  # more than these are not listed in a message
SHOWN_NAMES = 6  # of a section
S = TypeVar("S", bound=Section)
IS_SET = " is set"  # ends the origin of a value that follows from another setting
BUDGETS = {"tokens": "epochs", "epochs": "tokens"}  # of a training stage: one of the two


class Override(NamedTuple):
    """A value that a user set for a key, and where it was set."""

    origin: str
    key: str
    value: Any


@dataclass(frozen=True)
class LoadedSettings:
    """Settings with the source of every value that is not a default: {"sft.optim.lr": "command line"}."""

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
    """Merge defaults < base < profiles < YAML files < environment < overrides, validate once, freeze. Raises UsageError.

    `overrides`: texts `key=value`, or {key: value}.

    `base`: what the settings of an earlier run have that is not a default.
    """
    return settings_of(layers(overrides, files, profiles, os.environ if environment is None else environment), base)


# --- where values are set


def layers(
    overrides: Sequence[str] | JsonObject,
    files: Sequence[Path] = (),
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    root: type[Section] | None = Settings,
) -> list[Override]:
    """Every value that is set, the weakest first. Raises UsageError where one cannot be read.

    `root`: the tree whose types say what texts mean; None: they stay texts, for `with_types`. With `Settings` a file may be
    TinySeek's `model_config.json`, some of whose names are also settings of tasks.
    """
    trees = [(f"profile {name}", read_yaml(_profile(name))) for name in profiles]
    for path in files:
        tree = read_yaml(path)
        trees.append((str(path), other_names.from_tinyseek(tree, str(path)) if root is Settings else tree))
    trees += [(variable, {key: environment[variable]}) for variable, key in _variables(environment)]
    if isinstance(overrides, Mapping):
        paths_as_texts = {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}
        trees.append(("overrides", paths_as_texts))
    else:
        trees += [(COMMAND_LINE, _assignment(text)) for text in overrides]
    flat = [Override(origin, key, value) for origin, tree in trees for key, value in _leaves(tree, origin)]
    return with_types(root, flat) if root else flat


def _profile(name: str) -> Path:
    if name not in profile_names():
        raise UsageError(f"there is no profile '{one_line(name)}'; there are {', '.join(profile_names())}")
    return configs_directory() / "profiles" / f"{name}.yaml"


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable, key) of the settings in the environment."""
    for variable in sorted(environment):
        name = variable.removeprefix("TTRAIN_")
        if variable.startswith(ENVIRONMENT_PREFIX):
            yield variable, variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        elif name != variable and "__" in name:
            raise UsageError(f"{variable} is set, but settings begin with TTRAIN__; write {ENVIRONMENT_PREFIX}{name}")


def _assignment(text: str) -> JsonObject:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(
            f"'{one_line(text)}' is not a setting; write key=value without spaces, for example sft.epochs=3; quote a "
            f"path with spaces, write commas between files, and -c FILE for a file of settings"
        )
    return {key.strip(): value}


def _leaves(tree: JsonObject, origin: str) -> list[tuple[str, Any]]:
    leaves = list(flatten(tree))
    for key, number in Counter(key for key, _ in leaves).items():
        if number > 1:
            raise UsageError(f"'{one_line(key)}' is set twice in {origin}, with dots and by its section; remove one")
    return leaves


def read_yaml(path: Path) -> JsonObject:
    """The mapping in a YAML file; {} for an empty one. Raises UsageError where there is none."""
    try:
        tree = yaml_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read settings from {path}: {error.strerror}") from None
    except (InvalidYaml, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if tree is not None and not (isinstance(tree, dict) and all(isinstance(key, str) for key in tree)):
        raise UsageError(f"{path} must hold a mapping of settings at its top level, such as 'sft: {{epochs: 2}}'")
    return tree or {}


def configs_directory() -> Path:
    """The YAML files that ship with ttrain: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def profile_names() -> list[str]:
    """Names that `--profile` accepts."""
    return sorted(path.stem for path in (configs_directory() / "profiles").glob("*.yaml"))


def with_types(root: type[Section], overrides: Iterable[Override]) -> list[Override]:
    """The overrides, with the values that the texts which somebody typed have in this tree.

    The text of an unknown setting stays one. Raises UsageError for what cannot be read.
    """
    typed: list[Override] = []
    for origin, key, value in overrides:
        if isinstance(value, str) and (origin == COMMAND_LINE or origin.startswith(ENVIRONMENT_PREFIX)):
            try:
                typed += [Override(origin, name, leaf) for name, leaf in flatten({key: _read(value, key, root)})]
            except InvalidYaml as error:
                raise UsageError(
                    f"{one_line(key)} is {shown(value)} (from {origin}), which is not valid YAML: {error}; "
                    f"write a list as [a, b], and put a text that has brackets between quotes"
                ) from None
        else:
            typed.append(Override(origin, key, value))
    return typed


def _read(text: str, key: str, root: type[Section]) -> Any:
    kind = type_of(root, key)
    if kind is Section and text.startswith("{"):
        texts = flatten(yaml_text.parse(text, yaml_text.WordLoader))
        return {name: _read(leaf, f"{key}.{name}", root) if isinstance(leaf, str) else leaf for name, leaf in texts}
    return text if kind is None else yaml_text.read(text, kind | None if kind is Section else kind)


def type_of(root: type[Section], key: str) -> Any:
    """The type of a setting by its dotted name; Section for the name of a section, None for no setting."""
    kinds = _kinds(root)
    if key in kinds:
        return kinds[key]
    if any(get_origin(kind) is dict and key.startswith(f"{name}.") for name, kind in kinds.items()):
        return Any  # what an architecture alone knows
    return Section if any(name.startswith(f"{key}.") for name in kinds) else None


@functools.cache
def _kinds(root: type[Section]) -> dict[str, Any]:
    return dict(leaf_fields(root))


def without_pipeline_settings(overrides: Iterable[Override], root: type[Section]) -> list[Override]:
    """The overrides without the variables that set what only a pipeline has: they are for other commands."""
    return [
        item
        for item in overrides
        if not item.origin.startswith(ENVIRONMENT_PREFIX)
        or type_of(root, item.key) is not None
        or type_of(Settings, item.key) is None
    ]


# --- values that follow from others


def settings_of(overrides: list[Override], base: Sequence[Override] = ()) -> LoadedSettings:
    """Merge the overrides, as `layers` returns them, into settings. Raises UsageError."""
    base = [*_data_that_is_not_named([*base, *overrides]), *base]
    base = [*_starts_from_present_stages([*base, *overrides]), *base]
    model, start = _existing_model([*base, *overrides])
    if model is not None:
        _refuse_sizes_of_new_models(overrides, model, start)
        if model != _existing_model(base)[0]:  # else the base has its own values of both
            names = {"tokenizer.existing": model, "tokenizer.template": "auto"}
            base += [Override(f"{start}{IS_SET}", key, value) for key, value in names.items()]
    given = [*base, *_with_preset(overrides)]
    values = {item.key: item.value for item in given}
    automatic = [key for key in rules.KEYS if values.get(key, rules.AUTO) == rules.AUTO]
    given = [item for item in given if item.key not in automatic]
    if rules.BATCH_KEY in automatic:  # the default may not fit the length of the rows
        given.append(Override(rules.AUTO, rules.BATCH_KEY, rules.AUTO))
    settings, sources = merge(Settings, given)
    values = {**dict(flatten(settings.model_dump())), **dict.fromkeys(automatic, rules.AUTO)}
    by_rule, changes = rules.automatic(values), JsonDict()
    for key in automatic:
        usual = default_values()[key]
        assign(changes, key, by_rule.get(key, usual))
        sources[key] = rules.AUTO if values[rules.START] == rules.NEW else f"{rules.START}{IS_SET}"
        if by_rule.get(key, usual) == usual:
            del sources[key]
    return LoadedSettings(settings.replaced(changes), sources)


@functools.cache
def default_values() -> JsonDict:
    """All settings by their dotted names, as they are where nothing is set."""
    return dict(flatten(defaults(Settings)))


def _with_preset(overrides: list[Override]) -> list[Override]:
    """Put the sizes of the strongest `model.preset` first in its layer, so that sizes set beside it win."""
    presets = [item for item in overrides if item.key == PRESET]
    if not presets:
        return overrides
    origin, _, name = presets[-1]
    sizes = {} if name is None else sizes_of(name)
    first = _first_of_layer(overrides, origin)
    of_preset = [Override(f"preset {name}", f"model.{key}", size) for key, size in sizes.items()]
    return [item for item in (*overrides[:first], *of_preset, *overrides[first:]) if item.key != PRESET]


def _data_that_is_not_named(overrides: Sequence[Override]) -> list[Override]:
    """`none` for the data sets that nobody names, where another one is the user's: what is not named is not trained on."""
    values = {item.key: item.value for item in overrides}
    named = [name for name in LEARNT if f"data.{name}" in values]
    own = next((name for name in named if _sources(values, name) not in ([], [PYTHON_DOCS])), None)
    not_named = [name for name in LEARNT if own and name not in named and _sources({}, name)]
    return [Override(f"data.{own}{IS_SET}", f"data.{name}", ()) for name in not_named]


def _sources(values: JsonObject, dataset: str) -> list[Any]:
    """The sources of a data set, as far as the values that are set are valid."""
    value = values.get(f"data.{dataset}", Data.model_fields[dataset].default)
    entries = [*value] if isinstance(value, (list, tuple)) else [value]
    return [entry for entry in entries if entry not in (None, "", NONE)]


def _starts_from_present_stages(overrides: Sequence[Override]) -> list[Override]:
    """`start_from` of the stages for which nothing sets it: the nearest stage before them that has data."""
    values = {item.key: item.value for item in overrides}
    present = [name for name, row in TRAINING_STAGES.items() if _sources(values, row.dataset)]
    starts = []
    for name in present:
        row = TRAINING_STAGES[name]
        usual = row.settings.model_fields["start_from"].default
        nearest = next((start for start in row.starts if start in present), row.starts[-1] if row.starts else usual)
        if nearest != usual and f"{name}.start_from" not in values:
            starts.append(Override(rules.AUTO, f"{name}.start_from", nearest))
    return starts


def _existing_model(overrides: Sequence[Override]) -> tuple[str | None, str]:
    """(the model that is started from, or None; the setting by which the first stage names it)."""
    values = {item.key: item.value for item in overrides}
    starts = {}
    for name, row in TRAINING_STAGES.items():
        starts[name] = str(values.get(f"{name}.start_from", row.settings.model_fields["start_from"].default))
    last = last_of([name for name, row in TRAINING_STAGES.items() if _sources(values, row.dataset)])
    return existing_model_of(starts, last), f"{root_of(last, starts)[0]}.start_from"


def _refuse_sizes_of_new_models(overrides: list[Override], model: str, start: str) -> None:
    """Raise UsageError where `model.*` is set beside an existing model to start from, in the same layer or a stronger one.

    It describes new models only. Values of it in a weaker layer, such as a profile, are replaced by the start.
    """
    origin = next((item.origin for item in reversed(overrides) if item.key == start), None)
    first = 0 if origin is None else _first_of_layer(overrides, origin)  # the base is weaker than all of them
    keeps_head = start.startswith("pretrain.")  # which gives a second head to any model
    meant = [
        f"{key} (from {source})"
        for source, key, value in overrides[first:]
        if key.startswith("model.") and value is not None and not (keeps_head and key.startswith("model.multi_token."))
    ]
    if meant:
        raise UsageError(
            f"{', '.join(dict.fromkeys(meant))} describes a new model, but {start} is {model}, which has its own shape; "
            f"remove one of them"
        )


def _first_of_layer(overrides: list[Override], origin: str) -> int:
    """The index at which the layer of the origin begins; all variables are one layer."""
    layer = ENVIRONMENT_PREFIX if origin.startswith(ENVIRONMENT_PREFIX) else ""
    return next(n for n, item in enumerate(overrides) if item.origin == origin or (layer and item.origin.startswith(layer)))


# --- one tree, validated once


def merge(root: type[S], overrides: Iterable[Override]) -> tuple[S, dict[str, str]]:
    """The defaults of a tree with the overrides, validated once, and the source of what is not a default.

    Raises UsageError with a line for each wrong setting: its name, its value, its source, the rule.
    """
    given: dict[str, Override] = {}
    for item in overrides:
        section, name = f"{item.key}.", item.key.rpartition(".")[2]
        if item.value in (None, {}) and any(key.startswith(section) for key in known_keys(root)):
            continue  # a section in which nothing is set
        given = {key: earlier for key, earlier in given.items() if not key.startswith(section)}
        given[item.key] = item
        other = f"{item.key.removesuffix(name)}{BUDGETS.get(name)}"
        is_budget = item.value is not None and other in known_keys(root)
        if is_budget and (other not in given or given[other].origin != item.origin):
            given[other] = Override(f"{item.key}{IS_SET}", other, None)  # of a weaker layer
    tree = defaults(root)  # so that one field of a section leaves the stage's own defaults of the others
    for item in given.values():
        assign(tree, item.key, item.value)
    wrong = {
        key: f"{key} is {shown(item.value)} (from {item.origin}) but must be a number"
        for key, item in given.items()
        if isinstance(item.value, bool) and _takes_numbers(type_of(root, key))  # pydantic reads it as 1 or 0
    }
    sources = {key: item.origin for key, item in given.items()}
    try:
        settings = root.model_validate(tree)
    except ValidationError as error:
        wrong = _wrong_settings(error, tree, sources, root) | wrong
    if wrong:
        raise UsageError("\n".join(wrong.values()))
    return settings, sources


def _takes_numbers(kind: Any) -> bool:
    forms = types_of(kind)
    return bool not in forms and not {int, float}.isdisjoint(forms)


def _wrong_settings(
    error: ValidationError, tree: JsonObject, sources: Mapping[str, str], root: type[Section]
) -> dict[str, str]:
    """A line by the name of each wrong setting. Each form that it may have gives an error of its own."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        name, rule = _name_in(tree, item["loc"]), rule_of(item)
        below = [key for key in sources if f"{key}.".startswith(f"{name}.")]
        is_known = item["type"] != "extra_forbidden" and (name in sources or item["type"] == "missing")
        if item["type"] == "value_error" and not rule.startswith("must "):
            lines[name] = one_line(f"{name}: {rule}" if name and not rule.startswith(name) else rule)
        elif below and not is_known:
            lines |= {key: _unknown(key, sources[key], root) for key in below}
        elif name in lines:
            lines[name] += f" or {rule.removeprefix('must be ')}"
        else:
            origins = (source for key, source in sources.items() if f"{name}.".startswith(f"{key}."))
            origin = next(origins, sources[below[0]] if below else "defaults")
            lines[name] = one_line(f"{name} is {shown(item['input'])} (from {origin}) but {rule}")
            if names := [key for key in known_keys(root) if key.startswith(f"{name}.")]:
                lines[name] += f"; set {first_of(names, SHOWN_NAMES)}"
    return lines


def _name_in(tree: Any, location: Iterable[str | int]) -> str:
    """The dotted name of the place of an error: its steps without those that name a form."""
    steps = []
    for step in location:
        entries = dict(enumerate(tree)) if isinstance(tree, list | tuple) else tree
        if isinstance(entries, Mapping) and step in entries:
            steps.append(str(step))
            tree = entries[step]
    return ".".join(steps)


def _unknown(key: str, origin: str, root: type[Section]) -> str:
    names = settable_keys(root)
    others = f"there are {', '.join(names)}" if len(names) <= SHOWN_KEYS else "`ttrain config show` lists them all"
    return f"unknown setting '{one_line(key)}' (from {origin}); {other_names.suggestion(key, names) or others}"


# --- the names of settings


@functools.cache
def known_keys(root: type[Section] = Settings) -> list[str]:
    """Dotted names of every setting of a tree that has a default, as it is shown."""
    return [key for key, _ in flatten(defaults(root))]


@functools.cache
def settable_keys(root: type[Section]) -> list[str]:
    """`known_keys` and the settings without a default, also those of sections that are absent unless one of them is set."""
    return list(dict.fromkeys([*known_keys(root), *_kinds(root)]))


def leaf_fields(root: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of all fields of a tree that are not sections, with their types."""
    for name, field in root.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        sections = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)]
        if not sections:
            yield f"{prefix}{name}", field.annotation
        for section in sections:
            yield from leaf_fields(section, f"{prefix}{name}.")


def defaults(root: type[Section]) -> JsonDict:
    """The tree as it is where nothing is set; settings without a default are not in it."""
    return root.model_construct().model_dump()
