"""Settings from defaults, profiles, YAML files, the environment and the command line, with the source of every value."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ttrain.config import Settings, flatten
from ttrain.errors import UsageError

ENVIRONMENT_PREFIX = "TTRAIN__"
BUDGETS = {"tokens": "epochs", "epochs": "tokens"}  # of a training stage: one of the two


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
) -> Loaded:
    """Merge defaults < profiles < YAML files < environment < `key=value`, validate once, freeze.

    Raises UsageError that names the setting, its value, where it came from and, for an unknown key, its nearest neighbour.
    """
    tree = Settings().model_dump()  # so that one field of a section leaves the stage's own defaults of the others
    sources: dict[str, str] = {}
    for origin, values in _layers(overrides, files, profiles, os.environ if environment is None else environment):
        for key, value in flatten(values):
            _check_key(key, origin)
            if value in (None, {}) and key not in known_keys():
                continue  # a section of which nothing is said
            _assign(tree, key, value)
            for stale in [known for known in sources if known.startswith(f"{key}.")]:
                del sources[stale]
            sources[key] = origin
            _clear_other_budget(tree, sources, key, origin)
    try:
        return Loaded(Settings.model_validate(tree), sources)
    except ValidationError as error:
        raise UsageError(_explain(error, sources)) from None


def configs_directory() -> Path:
    """The YAML files that ship with ttrain: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


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
        yield f"profile {name}", _read_yaml(path)
    for path in files:
        yield str(path), _read_yaml(path)
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield variable, _nested(key, _scalar(environment[variable], variable))
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"'{item}' is not a setting; write key=value, for example sft.optim.lr=2e-4")
        yield "command line", _nested(key.strip(), _scalar(value, item))


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _NoDuplicates)
    except OSError as error:
        raise UsageError(f"cannot read settings from {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"{path} must hold a mapping of settings at its top level, such as 'sft: {{epochs: 2}}'")
    return tree


class _NoDuplicates(yaml.SafeLoader):
    """A safe loader to which a key that is given twice is an error, not the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(problem=f"'{key.value}' is given twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def _scalar(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"the value in '{origin}' is not valid YAML; quote it") from None


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            child = tree[parent] = {}
        tree = child
    tree[leaf] = value


def _check_key(key: str, origin: str) -> None:
    """Unknown keys are refused before validation, with their nearest neighbour."""
    known = known_keys()
    if key in known or any(name.startswith(f"{key}.") for name in known):
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"; did you mean '{near[0]}'?" if near else "; `ttrain config show` lists them all"
    raise UsageError(f"unknown setting '{key}' (from {origin}){hint}")


@functools.cache
def known_keys() -> list[str]:
    """Dotted names of every setting."""
    return [key for key, _ in flatten(Settings().model_dump())]


def _clear_other_budget(tree: dict[str, Any], sources: dict[str, str], key: str, origin: str) -> None:
    """A budget in `tokens` takes away a weaker layer's in `epochs`, and the other way round."""
    stage, _, name = key.partition(".")
    if name not in BUDGETS or tree[stage].get(name) is None:
        return
    other = BUDGETS[name]
    if sources.get(f"{stage}.{other}") != origin:
        tree[stage][other] = None
        sources[f"{stage}.{other}"] = f"{key} is set"


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """One line per wrong setting: name, value, rule, origin."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            lines.append(f"{name}: {message}" if name and not message.startswith(name) else message)
            continue
        origin = sources.get(name) or next((sources[key] for key in sources if name.startswith(key)), "defaults")
        lines.append(f"{name} is {item['input']!r} (from {origin}) but: {message[0].lower()}{message[1:]}")
    return "\n".join(lines)
