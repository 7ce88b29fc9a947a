"""Settings from defaults, profiles, YAML files, the environment and the command line, with the source of every value."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import ValidationError

from ttrain.config import Section, Settings, flatten, other_names, rules, text_values, yaml_text
from ttrain.config.base import NONE, PLAIN, WEIGHTED
from ttrain.config.data import LEARNT, PYTHON_DOCS, Data
from ttrain.config.model import sizes_of
from ttrain.config.other_names import Meaning
from ttrain.config.settings import OPTIONAL, existing_model_of, last_of, root_of
from ttrain.config.training import TRAINING_STAGES, TRAININGS
from ttrain.config.yaml_text import InvalidYaml, one_line, shown
from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.text import rule_of
from ttrain.errors import UsageError

ENVIRONMENT_PREFIX = "TTRAIN__"
COMMAND_LINE = "command line"  # the origin of its values
PRESET = "model.preset"
SHOWN_KEYS = 60  # more than these are not listed in a message
SHOWN_NEIGHBOURS = 8
S = TypeVar("S", bound=Section)
IS_NONE = " is none"
IS_SET = " is set"  # ends the origin of a value that follows from another setting
SENTENCES = {"missing": "needs the key '{key}'", "extra_forbidden": "there is no such setting"}
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


def settings_of(overrides: list[Override], base: Sequence[Override] = ()) -> LoadedSettings:
    """Merge the overrides, as `layers` returns them, into settings. Raises UsageError."""
    base = [*_data_that_is_not_named([*base, *overrides]), *base]
    base = [*base, *_starts_from_present_stages([*base, *overrides])]
    model, start = _existing_model([*base, *overrides])
    follows: list[Override] = []
    if model is not None:
        _refuse_sizes_of_new_models(overrides, model, start)
        if model != _existing_model(base)[0]:  # else the base has its own values of both
            names = {"tokenizer.existing": model, "tokenizer.template": "auto"}
            follows = [Override(f"{start}{IS_SET}", key, value) for key, value in names.items()]
    layers = [*base, *follows, *_with_preset(overrides)]
    strongest = {item.key: item.value for item in layers}
    automatic = {key for key in rules.KEYS if strongest.get(key) == rules.AUTO}
    settings, sources = merge(Settings, [*_by_rule(layers), *(item for item in layers if item.key not in automatic)])
    return LoadedSettings(settings, sources)


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
    trees = [(str(path), read_yaml(path)) for path in files]
    if root is Settings:
        trees = [(origin, other_names.from_tinyseek(tree, origin)) for origin, tree in trees]
    flat_overrides: list[Override] = []
    for origin, values in _layers(overrides, trees, profiles, environment):
        if root is not None and _is_typed(origin):
            values = {key: _value_of(text, key, origin, root) for key, text in values.items()}
        flat_values = list(flatten(values))
        if repeated := next((key for key, number in Counter(key for key, _ in flat_values).items() if number > 1), None):
            raise UsageError(f"'{one_line(repeated)}' is set twice in {origin}, with dots and by its section; remove one")
        flat_overrides += [Override(origin, key, value) for key, value in flat_values]
    return flat_overrides


def with_types(root: type[Section], overrides: Iterable[Override]) -> list[Override]:
    """The overrides, as `layers` returns them without a root, with the values that texts have in this tree."""
    typed: list[Override] = []
    for origin, key, value in overrides:
        if _is_typed(origin) and isinstance(value, str):
            value = _value_of(value, key, origin, root)
        typed += [Override(origin, name, leaf) for name, leaf in flatten({key: value})]
    return typed


def merge(root: type[S], overrides: Iterable[Override]) -> tuple[S, dict[str, str]]:
    """The defaults of a tree of settings with the overrides, validated once, and the source of what is not a default.

    Raises UsageError that names the setting, its value, where it came from and, for an unknown key, its nearest neighbour.
    """
    tree = defaults(root)  # so that one field of a section leaves the stage's own defaults of the others
    valid_keys, sources = settable_keys(root), dict[str, str]()
    for origin, key, value in overrides:
        if not _is_open(key, root):
            _check_key(Override(origin, key, value), valid_keys)
            if value in (None, {}) and key not in valid_keys:
                continue  # a section in which nothing is set
        if isinstance(value, bool) and text_values.takes_numbers(root, key):  # pydantic reads it as 1 or 0
            raise UsageError(f"{key} is {str(value).lower()} (from {origin}) but must be a number")
        for stale, _ in flatten(_assign(tree, key, value), f"{key}."):
            sources.pop(stale, None)
        sources[key] = origin
        _clear_other_budget(tree, sources, key, origin, valid_keys)
    try:
        return root.model_validate(tree), sources
    except ValidationError as error:
        raise UsageError(_explain(error, sources)) from None


def without_pipeline_settings(overrides: Iterable[Override], root: type[Section]) -> list[Override]:
    """The overrides without those from the environment that a pipeline has and this tree of settings lacks: they were set
    for other commands."""
    own = settable_keys(root)
    return [
        item
        for item in overrides
        if not item.origin.startswith(ENVIRONMENT_PREFIX) or item.key in own or not _is_known(item.key, Settings)
    ]


def configs_directory() -> Path:
    """The YAML files that ship with ttrain: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def profile_names() -> list[str]:
    """Names that `--profile` accepts."""
    return sorted(path.stem for path in (configs_directory() / "profiles").glob("*.yaml"))


def _layers(
    overrides: Sequence[str] | JsonObject,
    files: Sequence[tuple[str, JsonObject]],
    profiles: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[tuple[str, JsonObject]]:
    for name in profiles:
        path = configs_directory() / "profiles" / f"{name}.yaml"
        if name not in profile_names():
            near = difflib.get_close_matches(name, profile_names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"there is no profile '{one_line(name)}'; {hint}there are {', '.join(profile_names())}")
        yield f"profile {name}", read_yaml(path)
    yield from files
    for variable in sorted(environment):
        name = variable.removeprefix("TTRAIN_")
        if name != variable and "__" in name.lstrip("_") and not variable.startswith(ENVIRONMENT_PREFIX):
            raise UsageError(f"{variable} is set, but settings begin with TTRAIN__; write {ENVIRONMENT_PREFIX}{name}")
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield variable, {key: environment[variable]}
    if isinstance(overrides, Mapping):
        yield "overrides", {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}
        return
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"'{one_line(item)}' is not a setting; write key=value without spaces, for example sft.epochs=3; quote a "
                f"path with spaces, write commas between files, and -c FILE for a file of settings"
            )
        yield COMMAND_LINE, {key.strip(): value}


def read_yaml(path: Path) -> JsonObject:
    """The mapping in a YAML file; {} for an empty one. Raises UsageError where it cannot be read or is something else."""
    try:
        tree = yaml_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read settings from {path}: {error.strerror}") from None
    except (InvalidYaml, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"{path} must hold a mapping of settings at its top level, such as 'sft: {{epochs: 2}}'")
    return tree


def _is_typed(origin: str) -> bool:
    """Whether values of this origin are texts that somebody typed."""
    return origin == COMMAND_LINE or origin.startswith(ENVIRONMENT_PREFIX)


def _value_of(text: str, key: str, origin: str, root: type[Section]) -> Any:
    """The value of a text that was typed. Raises UsageError where it begins a list or mapping that cannot be read.

    That of an unknown setting stays a text, with which the error shows how the right one is written.
    """
    if not _is_known(key, root):
        return text
    try:
        return text_values.read(text, text_values.type_of(root, key))
    except InvalidYaml as error:
        raise UsageError(
            f"{one_line(key)} is {shown(text)} (from {origin}), which is not valid YAML: {error}; "
            f"write a list as [a, b], and put a text that has brackets between quotes"
        ) from None


def _is_known(key: str, root: type[Section]) -> bool:
    """Whether a key is a setting, a section or a name within a setting that takes any."""
    names = settable_keys(root)
    return key in names or _is_open(key, root) or any(name.startswith(f"{key}.") for name in names)


def _is_open(key: str, root: type[Section]) -> bool:
    """Whether a key is a name within a setting that takes any, which an architecture alone knows."""
    return any(key.startswith(f"{name}.") for name in _open_keys(root))


@functools.cache
def _open_keys(root: type[Section]) -> list[str]:
    return [name for name, kind in leaf_fields(root) if get_origin(kind) is dict]


def _assign(tree: JsonDict, key: str, value: Any) -> JsonObject:
    """Put the value into the tree; returns the section that stood in its place, {} for none."""
    *parents, leaf = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            child = tree[parent] = {}
        tree = child
    replaced = tree.get(leaf)
    tree[leaf] = value
    return replaced if isinstance(replaced, dict) else {}


def _with_preset(overrides: list[Override]) -> list[Override]:
    """Put the sizes of the strongest `model.preset` first in its layer, so that sizes set beside it win."""
    presets = [item for item in overrides if item.key == PRESET]
    if not presets:
        return overrides
    origin, _, name = presets[-1]
    sizes = (
        [] if name is None else [Override(f"preset {name}", f"model.{key}", size) for key, size in sizes_of(name).items()]
    )
    first = _first_of_layer(overrides, origin)
    return [item for item in (*overrides[:first], *sizes, *overrides[first:]) if item.key != PRESET]


def _data_that_is_not_named(overrides: Sequence[Override]) -> list[Override]:
    """`none` for the data sets that nobody names, where another one is the user's: what is not named is not trained on."""
    values = {item.key: item.value for item in overrides}
    named = [name for name in LEARNT if f"data.{name}" in values]
    own = next((name for name in named if _sources(values, name) not in ((), (PYTHON_DOCS,))), None)
    if own is None:
        return []
    not_named = [name for name in LEARNT if name not in named and _sources({}, name)]
    return [Override(f"data.{own}{IS_SET}", f"data.{name}", ()) for name in not_named]


def _sources(values: JsonObject, dataset: str) -> tuple[Any, ...]:
    """The sources of a data set, as far as the values that are set are valid."""
    value = values.get(f"data.{dataset}", Data.model_fields[dataset].default)
    if not value or value in (NONE, [NONE], (NONE,)):
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _starts_from_present_stages(overrides: Sequence[Override]) -> list[Override]:
    """`start_from` of the stages for which nothing sets it: the nearest stage before them that has data."""
    values = {item.key: item.value for item in overrides}
    present = [name for name, row in TRAINING_STAGES.items() if _sources(values, row.dataset)]
    starts = []
    for name, row in TRAINING_STAGES.items():
        usual = row.settings.model_fields["start_from"].default
        if f"{name}.start_from" in values or name not in present or (name in OPTIONAL and usual in present):
            continue
        nearest = next((start for start in row.starts if start in present), row.starts[-1] if row.starts else usual)
        if nearest != usual:
            reason = f"data.{TRAINING_STAGES[nearest].dataset}{IS_SET}"
            if usual not in present:
                reason = f"data.{TRAINING_STAGES[usual].dataset}{IS_NONE}"
            starts.append(Override(reason, f"{name}.start_from", nearest))
    return starts


def _by_rule(overrides: Sequence[Override]) -> list[Override]:
    """The settings that are `auto` and follow from others, where their value is not the default."""
    usual = _default_values()
    values = {**usual, **dict.fromkeys(rules.KEYS, rules.AUTO), **{item.key: item.value for item in overrides}}
    origin = "auto" if values[rules.START] == rules.NEW else f"{rules.START} is set"
    return [Override(origin, key, value) for key, value in rules.automatic(values).items() if value != usual[key]]


@functools.cache
def _default_values() -> JsonDict:
    return dict(flatten(defaults(Settings)))


def _refuse_sizes_of_new_models(overrides: list[Override], model: str, start: str) -> None:
    """Raise UsageError where `model.*` is set beside an existing model to start from, in the same layer or a stronger one.

    It describes new models only. Values of it in a weaker layer, such as a profile, are replaced by the start.
    """
    origin = next((item.origin for item in reversed(overrides) if item.key == start), None)
    first = 0 if origin is None else _first_of_layer(overrides, origin)  # the base is weaker than all of them
    is_pretrained = start.startswith("pretrain.")  # which gives a second head to any model
    meant = [
        f"{key} (from {source})"
        for source, key, value in overrides[first:]
        if key.startswith("model.") and value is not None and not (is_pretrained and key.startswith("model.multi_token."))
    ]
    if meant:
        raise UsageError(
            f"{', '.join(dict.fromkeys(meant))} describes a new model, but {start} is {model}, which has its own shape; "
            f"remove one of them"
        )


def _existing_model(overrides: Sequence[Override]) -> tuple[str | None, str]:
    """(the model that is started from, or None; the setting that the first stage which trains has for it)."""
    starts = {f"{name}.start_from": row.settings.model_fields["start_from"].default for name, row in TRAINING_STAGES.items()}
    starts |= {key: str(value) for _, key, value in overrides if key in starts}
    by_stage = {key.partition(".")[0]: start for key, start in starts.items()}
    values = {item.key: item.value for item in overrides}
    last = last_of([name for name, row in TRAINING_STAGES.items() if _sources(values, row.dataset)])
    return existing_model_of(by_stage, last), f"{root_of(last, by_stage)[0]}.start_from"


def _first_of_layer(overrides: list[Override], origin: str) -> int:
    """The index at which the layer of the origin begins."""
    return next(n for n, item in enumerate(overrides) if _layer(item.origin) == _layer(origin))


def _layer(origin: str) -> str:
    """The layer of an origin; all variables of the environment are one."""
    return ENVIRONMENT_PREFIX if origin.startswith(ENVIRONMENT_PREFIX) else origin


def _check_key(override: Override, valid_keys: Sequence[str]) -> None:
    """Raise UsageError for an unknown key, with the settings that it may mean, before validation."""
    origin, key, value = override
    is_section = any(name.startswith(f"{key}.") for name in valid_keys)
    if key in valid_keys or (is_section and not isinstance(value, str)):
        return
    near, meaning = _suggested(key, valid_keys)
    problem = f"unknown setting '{one_line(key)}' (from {origin})"
    if is_section:
        if meaning is None:
            return  # the validation names the rule
        problem = f"{key} is {shown(value)} (from {origin}) but must be a group of names with values"
    if near:
        meant = " or ".join(f"'{name}'" for name in near)
        written = _as_written(Override(origin, near[0], value), meaning)
        raise UsageError(f"{problem}; did you mean {meant}? Write {'for example ' * (len(near) > 1)}{written}")
    if meaning and meaning.note:
        raise UsageError(f"{problem}; {meaning.note}")
    others = "`ttrain config show` lists them all"
    if len(valid_keys) <= SHOWN_KEYS:
        others = f"there are {', '.join(valid_keys)}"
    raise UsageError(f"{problem}; {others}")


def written_setting(name: str, value: str) -> str:
    """The setting that a name means, also one of another library, as it is typed; "" for none."""
    near, meaning = _suggested(name, settable_keys(Settings), cutoff=0.8)
    return _as_written(Override(COMMAND_LINE, near[0], value), meaning) if near else ""


def _suggested(key: str, valid_keys: Sequence[str], cutoff: float = 0.4) -> tuple[list[str], Meaning | None]:
    """The settings that a name of another library means, else those that end as the key does, else those of the most
    similar name; with what that name means.

    A section of the key may be left out, as in `lr` and `sft.lr`, or be another one, as in `train.optim.lr`.
    """
    meaning = other_names.meaning_of(key)
    near = _meant(key, meaning, valid_keys)
    if near or (meaning and meaning.note):
        return near, meaning
    parts = key.lower().split(".")
    for place in range(len(parts)):
        end = ".".join(parts[place:])
        near = _in_section(key, [name for name in valid_keys if f".{name}".endswith(f".{end}")])
        if 1 <= len(near) <= SHOWN_NEIGHBOURS:
            return near, None
    similar = other_names.similar_meaning(key)
    if near := _meant(key, similar, valid_keys):
        return near, similar
    return difflib.get_close_matches(key.lower(), valid_keys, n=1, cutoff=cutoff), None


def _meant(key: str, meaning: Meaning | None, valid_keys: Sequence[str]) -> list[str]:
    """The settings that a name of another library means, those of the key's own section if that has one."""
    names: list[str] = []
    for target in meaning.keys if meaning else ():
        name = target.removeprefix(other_names.STAGE)
        names.append(name)
        if name != target:
            names += [f"{stage}.{name}" for stage in TRAININGS]
    return _in_section(key, [name for name in names if name in valid_keys])


def _in_section(key: str, names: list[str]) -> list[str]:
    """The names in the first section of the key, or all if none is."""
    section = f"{key.lower().partition('.')[0]}."
    return [name for name in names if name.startswith(section)] or names


def _as_written(override: Override, meaning: Meaning | None) -> str:
    """How the setting is written where it was set by a name of this meaning."""
    origin, key, value = override
    text = one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    note = ""
    if meaning:
        text = meaning.value(text)
        note = f" ({meaning.note})" if meaning.note else ""
    if origin.startswith(ENVIRONMENT_PREFIX):
        return f"{ENVIRONMENT_PREFIX}{key.upper().replace('.', '__')}={shlex.quote(text)}{note}"
    if origin == COMMAND_LINE:
        return f"{shlex.quote(f'{key}={text}')}{note}"
    return f"{key}: {text}{note}"


@functools.cache
def known_keys(root: type[Section] = Settings) -> list[str]:
    """Dotted names of every setting of a tree that has a default, as it is shown."""
    return [key for key, _ in flatten(defaults(root))]


@functools.cache
def settable_keys(root: type[Section]) -> list[str]:
    """`known_keys` and the settings without a default, also those of sections that are absent unless one of them is set."""
    return list(dict.fromkeys([*known_keys(root), *(key for key, _ in leaf_fields(root))]))


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


def _clear_other_budget(tree: JsonDict, sources: dict[str, str], key: str, origin: str, valid_keys: Sequence[str]) -> None:
    """Let a budget in `tokens` clear a weaker layer's in `epochs`, and the other way round."""
    stage, _, name = key.partition(".")
    other_budget = BUDGETS.get(name)
    if other_budget is None or f"{stage}.{other_budget}" not in valid_keys or tree[stage].get(name) is None:
        return
    if sources.get(f"{stage}.{other_budget}") != origin:
        tree[stage][other_budget] = None
        sources[f"{stage}.{other_budget}"] = f"{key} is set"


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """One line per wrong setting: name, value, rule, origin."""
    lines: list[str] = []
    several: dict[str, int] = {}  # line of a setting that may have one of several forms, of which each has an error
    errors: list[Any] = list(error.errors(include_url=False))
    for item in errors:
        item["loc"] = tuple(step for step in item["loc"] if step not in (PLAIN, WEIGHTED))
        if item["type"] == "missing":
            item["ctx"], item["loc"] = {"key": item["loc"][-1]}, item["loc"][:-1]
    for item in errors:
        name = ".".join(str(step) for step in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error" and not message.startswith("must "):
            lines.append(one_line(f"{name}: {message}" if name and not message.startswith(name) else message))
            continue
        *steps, last = item["loc"] or ("",)
        if name not in sources and isinstance(last, str) and (parent := ".".join(map(str, steps))) in sources:
            if parent in several:
                lines[several[parent]] += f" or {rule_of(item).removeprefix('must be ')}"
                continue
            several[parent], name = len(lines), parent
        origin = sources.get(name) or next((sources[key] for key in sources if name.startswith(key)), "defaults")
        lines.append(one_line(f"{name} is {shown(item['input'])} (from {origin}) but {rule_of(item, SENTENCES)}"))
    return "\n".join(lines)
