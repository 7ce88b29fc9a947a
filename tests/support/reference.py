"""docs/reference.md, written from the code: settings with their defaults, commands with options."""

import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from support.paths import ROOT
from typer.core import TyperGroup
from typer.main import get_command

from ttrain.cli.main import app
from ttrain.config import Settings

PAGE = ROOT / "docs" / "reference.md"
SETTINGS_HEAD = """\
# Reference

Generated from the code by `tests/test_reference.py` (`TTRAIN_WRITE_REFERENCE=1` rewrites it).

## Settings

Write `SECTION.NAME=value`, YAML for `-c`, or `TTRAIN__SECTION__NAME=value` in the environment.
`ttrain config show` prints values and their origin, with `--schema` the JSON schema.
`runtime`, `tracking`, `notify` and `servers` count in no key; of `nightly` and `promotion` only
what shapes the weights of a night does, such as `nightly.replay`.
"""
COMMANDS_HEAD = """\
## Commands

Exit codes: 0 done; 1 a stage or check failed; 2 a mistake in the command or a setting; 129, 130,
143 interrupted by SIGHUP, Ctrl-C, SIGTERM after saving. KEY=VALUE is a setting; commands that take
settings also take `--config` (`-c`) and `--profile`. Most commands take `--json`; `--help` explains
the options.
"""
WITH_SETTINGS_OF_PRETRAIN = ("sft", "dpo", "lora")
UNLISTED_OPTIONS = ("--json", "--config", "--profile", "--help")
NAME_WIDTH = 36
WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


def page() -> str:
    defaults = Settings()
    sections: dict[str, dict[str, str]] = {"name": {}}
    for name, field in Settings.model_fields.items():
        section = _settings_class(field.annotation)
        if section is None:
            sections["name"][name] = _setting(name, getattr(defaults, name), field)
        else:
            sections[name] = dict(_section_settings(section, getattr(defaults, name)))
    parts = [SETTINGS_HEAD]
    for name, settings in sections.items():
        note = ""
        if name in WITH_SETTINGS_OF_PRETRAIN:
            common = sections["pretrain"].items()
            settings = {key: text for key, text in settings.items() if (key, text) not in common}
            note = "As `pretrain`, but:\n\n"
        parts.append(f"### {name}\n\n{note}```text\n" + "\n".join(settings.values()) + "\n```\n")
    commands = [_command_item(name, command) for name, command in leaf_commands()]
    return "\n".join([*parts, COMMANDS_HEAD, "\n".join(commands) + "\n"])


def _section_settings(
    section: type[BaseModel], defaults: Any, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """(name, lines) of each setting of a section; those of a part with the part's name before."""
    for name, field in section.model_fields.items():
        default = getattr(defaults, name, None)
        if defaults is None:
            default = field.get_default(call_default_factory=True)
        part = _settings_class(field.annotation)
        if part is None or default is None:
            yield prefix + name, _setting(prefix + name, default, field)
        if part is not None:
            yield from _section_settings(part, default, f"{prefix}{name}.")


def _setting(name: str, default: Any, field: Any) -> str:
    written = default if isinstance(default, str) else json.dumps(default, default=str)
    value = "" if written in ("null", "[]", "{}", "") else f"={written}"
    is_choice = typing.get_origin(field.annotation) is typing.Literal
    choices = "|".join(map(str, typing.get_args(field.annotation))) if is_choice else ""
    meaning = " ".join(filter(None, (choices and f"({choices})", field.description)))
    lines = textwrap.wrap(meaning, 100 - NAME_WIDTH, **WHOLE_WORDS) or [""]
    first = f"{name}{value}".ljust(NAME_WIDTH - 1)
    if len(first) >= NAME_WIDTH:
        lines = ["", *lines]
    lines[0] = f"{first} {lines[0]}".rstrip()
    return f"\n{' ' * NAME_WIDTH}".join(lines)


def _settings_class(annotation: Any) -> type[BaseModel] | None:
    is_union = isinstance(annotation, types.UnionType)
    options = set(typing.get_args(annotation) if is_union else [annotation]) - {type(None)}
    [option] = options if len(options) == 1 else [None]
    return option if isinstance(option, type) and issubclass(option, BaseModel) else None


def leaf_commands(name: str = "ttrain", command: Any = None) -> Iterator[tuple[str, Any]]:
    """(name, command) of all commands that are not hidden, without groups."""
    command = command or get_command(app)
    if not isinstance(command, TyperGroup):
        yield name, command
        return
    context = command.make_context(name, [next(iter(command.commands))], resilient_parsing=True)
    for word in command.list_commands(context):
        child = command.get_command(context, word)
        if child is not None and not child.hidden:
            yield from leaf_commands(f"{name} {word}", child)


def _command_item(name: str, command: Any) -> str:
    words = [name]
    options = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            word = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
            words.append(word + ("..." if parameter.nargs == -1 else ""))
        elif not parameter.hidden:
            options.append(max(parameter.opts, key=len))
    listed = [option for option in options if option not in UNLISTED_OPTIONS]
    purpose = re.split(r"[.;:] |\n|\.$", (command.help or "").replace("\n", " ").strip())[0]
    item = f"- `{' '.join(words)}`: {purpose}" + (f". `{' '.join(listed)}`" if listed else "")
    return textwrap.fill(item, 100, subsequent_indent="  ", **WHOLE_WORDS)
