"""docs/reference.md is what the code says; TTRAIN_WRITE_REFERENCE=1 rewrites it."""

import json
import os
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from support.paths import ROOT
from typer.core import TyperGroup
from typer.main import get_command

from ttrain.cli.main import app
from ttrain.config import TRAININGS, Settings

PAGE = ROOT / "docs" / "reference.md"
SETTINGS_HEAD = """\
# Reference

Generated from the code by `tests/test_reference.py` (`TTRAIN_WRITE_REFERENCE=1` rewrites it).

## Settings

Write `SECTION.NAME=value`, YAML for `-c`, or `TTRAIN__SECTION__NAME=value` in the environment.
`ttrain config show` prints values and their origin, `ttrain config show --schema --json` the
complete texts. A setting without a text is described further up. `runtime`, `tracking`, `notify`
and `servers` count in no key; of `nightly` and `promotion` only what shapes the weights of a night
does, such as `nightly.replay`.
"""
COMMANDS_HEAD = """\
## Commands

`ttrain --help` says what each does, `ttrain COMMAND --help` explains its options; most take
`--json`. Commands that take settings as KEY=VALUE also take `--config` (`-c`) and `--profile`. Exit
codes: 0 done; 1 a stage or check failed; 2 a mistake in the command or a setting; 129, 130, 143
stopped by SIGHUP, Ctrl-C, SIGTERM after saving.
"""
NAME_WIDTH = 36
WIDTH = 100 - NAME_WIDTH


class Setting(NamedTuple):
    name: str
    value: str
    meaning: str

    def lines(self, *, described: bool) -> str:
        """Name, default and meaning; of what is no choice only the clauses that fit into a line."""
        summary, *clauses = self.meaning.split("; ")
        for clause in clauses:
            longer = f"{summary}; {clause}"
            if self.meaning.startswith("(") or len(longer) <= WIDTH:
                summary = longer
        text = "" if described else summary
        texts = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
        first = f"{self.name}{self.value}".ljust(NAME_WIDTH - 1)
        if len(first) >= NAME_WIDTH or not texts:
            texts = ["", *texts]
        texts[0] = f"{first} {texts[0]}".rstrip()
        return f"\n{' ' * NAME_WIDTH}".join(texts)


def page() -> str:
    defaults = Settings()
    sections: dict[str, list[Setting]] = {"name": []}
    for name, field in Settings.model_fields.items():
        section = settings_class(field.annotation)
        if section is None:
            sections["name"].append(setting_of(name, getattr(defaults, name), field))
        else:
            sections[name] = list(section_settings(section, getattr(defaults, name)))
    parts, described = [SETTINGS_HEAD], set[tuple[str, str]]()
    for name, settings in sections.items():
        note, listed = "", settings
        if name in TRAININGS[1:]:
            note = "As `pretrain`, but:\n\n"
            listed = [setting for setting in settings if setting not in sections["pretrain"]]
        lines = [setting.lines(described=setting[::2] in described) for setting in listed]
        if name in TRAININGS:
            described |= {setting[::2] for setting in settings}
        parts.append(f"### {name}\n\n{note}```text\n" + "\n".join(lines) + "\n```\n")
    # A line for the commands without a group, and one for each group
    names_by_group: dict[str, list[str]] = {}
    for name, _ in leaf_commands():
        group, _, word = name.rpartition(" ")
        names_by_group.setdefault(group, []).append(f"`{word}`")
    commands = [
        textwrap.fill(f"- `{group}`: {', '.join(words)}", 100, subsequent_indent="  ")
        for group, words in names_by_group.items()
    ]
    return "\n".join([*parts, COMMANDS_HEAD, *commands, ""])


def section_settings(
    section: type[BaseModel], defaults: Any, prefix: str = ""
) -> Iterator[Setting]:
    """The settings of a section, those of optional parts with the part's name before."""
    for name, field in section.model_fields.items():
        default = getattr(defaults, name, None)
        if defaults is None:
            default = field.get_default(call_default_factory=True)
        part = settings_class(field.annotation)
        if part is None or default is None:
            yield setting_of(prefix + name, default, field)
        if part is not None:
            yield from section_settings(part, default, f"{prefix}{name}.")


def setting_of(name: str, default: Any, field: Any) -> Setting:
    written = default if isinstance(default, str) else json.dumps(default, default=str)
    value = "" if written in ("null", "[]", "{}", "") else f"={written}"
    is_choice = typing.get_origin(field.annotation) is typing.Literal
    choices = "|".join(map(str, typing.get_args(field.annotation))) if is_choice else ""
    meaning = " ".join(filter(None, (choices and f"({choices})", field.description)))
    return Setting(name, value, meaning)


def settings_class(annotation: Any) -> type[BaseModel] | None:
    is_union = isinstance(annotation, types.UnionType)
    options = {*typing.get_args(annotation)} - {type(None)} if is_union else {annotation}
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


def test_the_reference_is_that_of_the_code() -> None:
    text = page()
    if os.environ.get("TTRAIN_WRITE_REFERENCE"):
        PAGE.write_text(text, encoding="utf-8")
    written = PAGE.read_text(encoding="utf-8")
    assert written == text, "docs/reference.md is out of date; write it as above"
