"""Settings from defaults, profiles, YAML files, the environment and the command line, with the source of every value."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import ValidationError

from ttrain.config import Section, Settings, flatten, yaml_text
from ttrain.config.model_presets import sizes_of
from ttrain.config.settings import existing_model_of, trainings_of
from ttrain.config.yaml_text import VALUE_CHARACTERS, InvalidYaml, one_line, shown
from ttrain.errors import UsageError

ENVIRONMENT_PREFIX = "TTRAIN__"
PRESET = "model.preset"
SHOWN_KEYS = 60  # more than these are not listed in a message
SHOWN_NEIGHBOURS = 8
SHOWN_ERRORS = 20
KEY_CHARACTERS, KEY_PARTS = 200, 16
S = TypeVar("S", bound=Section)
BUDGETS = {"tokens": "epochs", "epochs": "tokens"}  # of a training stage: one of the two


class Given(NamedTuple):
    """A value that somebody set, and where."""

    origin: str
    key: str
    value: Any


@dataclass(frozen=True)
class Loaded:
    """Settings with the source of every value that is not a default: {"sft.optim.lr": "command line"}."""

    settings: Settings
    sources: Mapping[str, str]


def load(
    overrides: Sequence[str] = (),
    *,
    files: Sequence[Path] = (),
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    base: Sequence[Given] = (),
) -> Loaded:
    """Merge defaults < base < profiles < YAML files < environment < `key=value`, validate once, freeze. Raises UsageError.

    `base`: what the settings of an earlier run have that is not a default.
    """
    return settings_of(layers(overrides, files, profiles, os.environ if environment is None else environment), base)


def settings_of(given: list[Given], base: Sequence[Given] = ()) -> Loaded:
    """The settings of what is given, as `layers` tells it. Raises UsageError."""
    _refuse_sizes_of_new_models(given, base)
    settings, sources = merge(Settings, [*base, *_of_existing_model(given, base), *_with_preset(given)])
    return Loaded(settings, sources)


def layers(
    overrides: Sequence[str],
    files: Sequence[Path] = (),
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Given]:
    """Every value that is given, the weakest first. Raises UsageError where one cannot be read."""
    given = _layers(overrides, files, profiles, environment)
    found = [Given(origin, key, value) for origin, values in given for key, value in flatten(values)]
    for origin, key, _ in found:
        if len(key) > KEY_CHARACTERS or key.count(".") >= KEY_PARTS:
            raise UsageError(
                f"unknown setting '{one_line(key, KEY_CHARACTERS)}' (from {origin}): no setting has such a name"
            )
    return found


def merge(root: type[S], given: Iterable[Given]) -> tuple[S, dict[str, str]]:
    """The defaults of a tree of settings with what is given, validated once, and the source of what is no default.

    Raises UsageError that names the setting, its value, where it came from and, for an unknown key, its nearest neighbour.
    """
    tree = defaults(root)  # so that one field of a section leaves the stage's own defaults of the others
    known, sources = settable_keys(root), dict[str, str]()
    for origin, key, value in given:
        is_field = _is_field(key, root)
        if not is_field:
            _check_key(key, origin, known)
        if value in (None, {}) and key not in known and not is_field:
            continue  # a section of which nothing is said
        for stale, _ in flatten(_assign(tree, key, value), f"{key}."):
            sources.pop(stale, None)
        sources[key] = origin
        _clear_other_budget(tree, sources, key, origin, known)
    try:
        return root.model_validate(tree), sources
    except ValidationError as error:
        raise UsageError(_explain(error, sources)) from None


def configs_directory() -> Path:
    """The YAML files that ship with ttrain: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def profile_names() -> list[str]:
    """Names that `--profile` accepts."""
    return sorted(path.stem for path in (configs_directory() / "profiles").glob("*.yaml"))


def _layers(
    overrides: Sequence[str], files: Sequence[Path], profiles: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in profiles:
        path = configs_directory() / "profiles" / f"{name}.yaml"
        if name not in profile_names():
            raise UsageError(f"--profile {name} does not exist; there are: {', '.join(profile_names())}")
        yield f"profile {name}", read_yaml(path)
    for path in files:
        yield str(path), read_yaml(path)
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield variable, {key: _scalar(environment[variable], variable)}
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"'{one_line(item)}' is not a setting; write key=value, for example sft.optim.lr=2e-4")
        yield "command line", {key.strip(): _scalar(value, item)}


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file; {} for an empty one. Raises UsageError where it cannot be read or is something else."""
    try:
        tree = yaml_text.read(path)
    except OSError as error:
        raise UsageError(f"cannot read settings from {path}: {error.strerror}") from None
    except InvalidYaml as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"{path} must hold a mapping of settings at its top level, such as 'sft: {{epochs: 2}}'")
    return tree


def _scalar(text: str, origin: str) -> Any:
    try:
        return yaml_text.parse(text)
    except InvalidYaml as error:
        raise UsageError(
            f"the value in '{one_line(origin, VALUE_CHARACTERS)}' is not valid YAML: {error}; quote it"
        ) from None


def _assign(tree: dict[str, Any], key: str, value: Any) -> Mapping[str, Any]:
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


def _with_preset(given: list[Given]) -> list[Given]:
    """The sizes of the strongest `model.preset` stand first in its layer, so that what is given beside it wins."""
    asked = [item for item in given if item.key == PRESET]
    if not asked:
        return given
    origin, _, name = asked[-1]
    sizes = [] if name is None else [Given(f"preset {name}", f"model.{key}", size) for key, size in sizes_of(name).items()]
    first = _first_of_layer(given, origin)
    return [item for item in (*given[:first], *sizes, *given[first:]) if item.key != PRESET]


def _of_existing_model(given: list[Given], base: Sequence[Given]) -> list[Given]:
    """What a model that is started from brings, unless something else is given: its tokenizer and its chat template.

    A base whose start is not changed says of both itself.
    """
    model, start = _existing_model([*base, *given])
    if model is None or model == _existing_model(base)[0]:
        return []
    origin = f"{start} is set"
    return [Given(origin, "tokenizer.existing", model), Given(origin, "tokenizer.template", "auto")]


def _refuse_sizes_of_new_models(given: list[Given], base: Sequence[Given]) -> None:
    """Raise UsageError where `model.*` is given beside the model that is started from, in the same layer or a stronger one.

    It describes new models only. What a weaker layer says of them, such as a profile, the start stands in for.
    """
    model, start = _existing_model([*base, *given])
    if model is None:
        return
    origin = next((item.origin for item in reversed(given) if item.key == start), None)
    first = 0 if origin is None else _first_of_layer(given, origin)  # the base is weaker than all of them
    is_pretrained = start.startswith("pretrain.")  # which gives a second head to any model
    meant = [
        f"{key} (from {source})"
        for source, key, value in given[first:]
        if key.startswith("model.") and value is not None and not (is_pretrained and key.startswith("model.multi_token."))
    ]
    if meant:
        raise UsageError(
            f"{', '.join(dict.fromkeys(meant))} describes a new model, but {start} is {model}, which has its own shape; "
            f"leave out the one or the other"
        )


def _existing_model(given: Sequence[Given]) -> tuple[str | None, str]:
    """(the model that is started from, or None; the setting that the first stage which trains has for it)."""
    starts = {f"{stage}.start_from": start for stage, start in Settings().starts.items()}
    starts |= {key: str(value) for _, key, value in given if key in starts}
    by_stage = {key.partition(".")[0]: start for key, start in starts.items()}
    return existing_model_of(by_stage), f"{trainings_of(by_stage)[0]}.start_from"


def _first_of_layer(given: list[Given], origin: str) -> int:
    """Where the layer begins that the origin belongs to."""
    return next(n for n, item in enumerate(given) if _layer(item.origin) == _layer(origin))


def _layer(origin: str) -> str:
    """All variables of the environment are one layer."""
    return ENVIRONMENT_PREFIX if origin.startswith(ENVIRONMENT_PREFIX) else origin


def _is_field(key: str, root: type[Section]) -> bool:
    """Whether it is within a setting that takes names which only an architecture knows, as `model.fields` does."""
    return any(key.startswith(f"{name}.") for name in open_keys(root))


def _check_key(key: str, origin: str, known: Sequence[str]) -> None:
    """Unknown keys are refused before validation, with their nearest neighbour."""
    if key in known or any(name.startswith(f"{key}.") for name in known):
        return
    near = [name for name in known if name.endswith(f".{key}")]  # a section was left out: lr, optim.lr
    if not 1 <= len(near) <= SHOWN_NEIGHBOURS:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    all_of_them = "; `ttrain config show` lists them all" if len(known) > SHOWN_KEYS else f"; there are {', '.join(known)}"
    meant = " or ".join(f"'{name}'" for name in near)
    raise UsageError(
        f"unknown setting '{one_line(key)}' (from {origin})" + (f"; did you mean {meant}?" if near else all_of_them)
    )


@functools.cache
def known_keys(root: type[Section] = Settings) -> list[str]:
    """Dotted names of every setting of a tree that has a default, as it is shown."""
    return [key for key, _ in flatten(defaults(root))]


@functools.cache
def settable_keys(root: type[Section]) -> list[str]:
    """The same, with what must be given and what is in sections that are absent unless something of them is given."""
    return list(dict.fromkeys([*known_keys(root), *(key for key, _ in _fields(root))]))


@functools.cache
def open_keys(root: type[Section]) -> list[str]:
    """Dotted names of the settings that are mappings from any name, checked by whoever knows the names."""
    return [key for key, annotation in _fields(root) if get_origin(annotation) is dict]


def _fields(root: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of all fields of a tree that are no sections, with their types."""
    for name, field in root.model_fields.items():
        key, *values = get_args(field.annotation) or (None,)
        if get_origin(field.annotation) is dict and get_origin(key) is Literal:  # a section for each of these names
            for part in get_args(key):
                yield from _fields(values[0], f"{prefix}{name}.{part}.")
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        sections = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)]
        if not sections:
            yield f"{prefix}{name}", field.annotation
        for section in sections:
            yield from _fields(section, f"{prefix}{name}.")


def defaults(root: type[Section]) -> dict[str, Any]:
    """The tree as it is where nothing is given; what has no default is not in it."""
    return root.model_construct().model_dump()


def _clear_other_budget(tree: dict[str, Any], sources: dict[str, str], key: str, origin: str, known: Sequence[str]) -> None:
    """A budget in `tokens` takes away a weaker layer's in `epochs`, and the other way round."""
    stage, _, name = key.partition(".")
    other = BUDGETS.get(name)
    if other is None or f"{stage}.{other}" not in known or tree[stage].get(name) is None:
        return
    if sources.get(f"{stage}.{other}") != origin:
        tree[stage][other] = None
        sources[f"{stage}.{other}"] = f"{key} is set"


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """One line per wrong setting: name, value, rule, origin."""
    lines = []
    errors = error.errors(include_url=False)
    for item in errors[:SHOWN_ERRORS]:
        name = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            lines.append(one_line(f"{name}: {message}" if name and not message.startswith(name) else message))
            continue
        origin = sources.get(name) or next((sources[key] for key in sources if name.startswith(key)), "defaults")
        lines.append(one_line(f"{name} is {shown(item['input'])} (from {origin}) but: {message[0].lower()}{message[1:]}"))
    if len(errors) > SHOWN_ERRORS:
        lines.append(f"and {len(errors) - SHOWN_ERRORS:,} more wrong settings")
    return "\n".join(lines)
