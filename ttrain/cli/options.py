"""The root of the command line, its decorators, shared options, and loading of settings."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from typer import Argument, Exit, Option, Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.terminal import print_escaped, print_json, print_spans, table
from ttrain.errors import UsageError
from ttrain.store import layout
from ttrain.store.model_files import Reference

if TYPE_CHECKING:
    from ttrain.api import Plan
    from ttrain.config import Settings
    from ttrain.config.loading import LoadedSettings, Override
    from ttrain.data.inspect import Span

Command = TypeVar("Command", bound=Callable[..., Any])

Panel = Literal["Train", "Look", "Use", "Data", "Models", "Servers"]  # of the help
# Of the help; last in their panel are tasks of one's own, which a newcomer takes for the way
ORDER = (
    "init run plan pipeline doctor sweep stage config train "
    "status logs report compare lineage reproduce artifacts "
    "chat generate eval export gate data models serve up down track"
)
OTHER_WORDS = {  # that other programs have for these commands
    "pipeline run full": "start resume continue fit",
    "stage run sft": "finetune fine-tune",
    "eval": "evaluate test",
    "generate": "predict infer complete",
    "up": "ui dashboard mlflow prefect",
    "down": "stop",
    "pipeline status": "runs ls ps",
    "pipeline logs": "log tail",
    "config show": "settings options",
    "init": "new setup create",
    "compare": "diff",
    "pipeline run full --until shards-sft": "preprocess prepare tokenize shard",
    "doctor": "check",
}
SHOWN_COMMANDS = 4
OWN_SETTINGS = Path("my.yaml")  # as `ttrain init` writes it
ADVISED_RUN = re.compile(
    r"`ttrain (pipeline run full|sweep full)(?! -c)"
    r"|(?<=did you mean )`ttrain stage run [a-z-]+(?! -c)"
)
MAY_BE_EMPTY = ("--note", "--system", "--text")  # options whose empty value means what it says
SETTINGS_HELP = "settings as key=value, for example sft.epochs=3"
MODEL_HELP = (
    "a run, a stage such as sft, a registered model (NAME@ALIAS, NAME/VERSION), or a directory"
)


class _Help:
    """Help without types of flags, whose names suffice."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param.metavar = "" if getattr(param, "is_flag", False) else param.metavar
        return params


class _Command(_Help, TyperCommand):
    pass


class CommandGroup(_Help, TyperGroup):
    """Answers an unknown word with commands of that name in any group."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word.startswith("-") or self.get_command(ctx, word):
            return super().resolve_command(ctx, args)
        if meant := commands_named(word, args[1:]):
            raise UsageError(
                f"there is no command '{ctx.command_path} {word}'; did you mean {meant}?"
            )
        return super().resolve_command(ctx, args)


def commands_named(word: str, words_after: Sequence[str] = ()) -> str:
    """Suggestions for an unknown word: "`ttrain a` or `ttrain b`", or ""."""
    commands = [shlex.join(words) for words in _commands_named(word, words_after)]
    return " or ".join(f"`ttrain {name}`" for name in commands[:SHOWN_COMMANDS])


def _commands_named(word: str, words_after: Sequence[str]) -> Iterator[Sequence[str]]:
    from ttrain.flows import NAMES
    from ttrain.tasks import STAGES

    run = ("pipeline", "run")
    suffix = Path(word).suffix
    if "=" in word:
        yield *run, "full", word, *words_after
    elif suffix in (".yaml", ".yml"):
        yield *run, "full", "-c", word, *words_after
    elif suffix and Path(word).exists():
        yield "init", word
    elif word in NAMES:
        yield *run, word
    elif meant := [name for name, words in OTHER_WORDS.items() if word in words.split()]:
        yield meant[0].split()
    elif word in STAGES:
        yield "stage", "run", word
        yield *run, "full", "--until", word
    else:
        groups: Any = get_command(app)
        # Short forms of pipeline commands are suggested with these.
        if word in groups.commands and word not in groups.commands["pipeline"].commands:
            yield [word]
        for name, group in groups.commands.items():
            if isinstance(group, TyperGroup) and word in group.commands:
                yield name, word


def with_settings_file(message: str, arguments: Sequence[str] = ()) -> str:
    """Add the settings files of the arguments, else my.yaml, to an advised run."""
    files = [file for word, file in itertools.pairwise(arguments) if word in ("-c", "--config")]
    if not files and OWN_SETTINGS.is_file():
        files = [str(OWN_SETTINGS)]
    words = "".join(f" -c {shlex.quote(file)}" for file in files)
    return ADVISED_RUN.sub(lambda match: match[0] + words, message)


class _Root(CommandGroup):
    """Lists the commands in the order of their panels, and refuses empty words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else args
        for before, word in zip(("ttrain", *words), words, strict=False):
            if not word.strip() and before not in MAY_BE_EMPTY:
                raise UsageError(
                    f"an empty word follows '{before}': is a variable of the shell not set? "
                    "write a value there"
                )
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.split().index)


app = Typer(
    name="ttrain",
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Raw JSONL to a tokenizer, shards, a pretrained model, an SFT model, a LoRA adapter "
    "and an evaluation.",
    epilog="Begin with:  ttrain pipeline run full\n\nThen, with your own data:  ttrain init\n\n"
    "Short forms of `ttrain pipeline`:  ttrain run, plan, status, logs",
)


def command_group(name: str, panel: Panel, **settings: Any) -> Typer:
    """Add a group of commands to `ttrain`, in a panel of the help."""
    group = Typer(**{"cls": CommandGroup, "no_args_is_help": True, **settings})
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


def option(help_text: str, *names: str, **rules: Any) -> Any:
    """A parameter that is an option: help, names if not the parameter's, rules as of Typer."""
    return Option(*names, help=help_text, **rules)


def argument(help_text: str, *, metavar: str, **rules: Any) -> Any:
    """A parameter that is an argument; `metavar` is its name in the help."""
    return Argument(help=help_text, metavar=metavar, **rules)


Files = Annotated[
    list[Path] | None, option("YAML file with settings; several may be given", "--config", "-c")
]
Profiles = Annotated[
    list[str] | None, option("named settings that ship with ttrain, such as small")
]
RunName = Annotated[
    str | None,
    option("the run whose stages are used; default: the newest finished one", metavar="RUN"),
]
AsJson = Annotated[bool, option("print JSON for scripts", "--json")]
AdapterBase = Annotated[
    str | None, option("the full model of an adapter from elsewhere", metavar="REF")
]
Allow = Annotated[list[str] | None, option("a setting that may differ from the checkpoint's")]
Extend = Annotated[
    bool,
    option("for a larger training budget, continue from a shorter run's checkpoint", "--extend"),
]


class Table(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


class Spans(NamedTuple):
    """Lines of text in which tokens of the loss are marked."""

    lines: Iterable[Sequence[Span]]


@dataclass(frozen=True)
class Output:
    """What a command prints: `value` with --json, else the parts; then its exit code."""

    value: Any
    parts: Iterable[str | Table | Spans] = ()
    code: int = 0

    def print(self, *, as_json: bool = False) -> None:
        if as_json:
            print_json(self.value)
        before: str | Table | Spans = ""
        for part in () if as_json else self.parts:
            if isinstance(part, Table):
                print("\n" * isinstance(before, Table), end="")
                table(*part)
            elif isinstance(part, Spans):
                print_spans(part.lines)
            else:
                print_escaped(with_settings_file(part))
            before = part
        if self.code:
            raise Exit(self.code)


def with_option_groups(function: Callable[..., Output | None]) -> Callable[..., None]:
    """Replace parameters that are dataclasses by an option per field; print the output."""
    hints = get_type_hints(function, include_extras=True)
    result = hints.pop("return")
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options: list[tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            options += [
                (field.name, types[field.name], field.default) for field in fields(groups[name])
            ]
        else:
            options.append((name, hints[name], parameter.default))
    if result in (Output, Output | None) and "as_json" not in hints:
        options.append(("as_json", AsJson, False))

    @functools.wraps(function)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values[field.name] for field in fields(group)})
        output = function(**{name: values[name] for name in hints})
        if output is not None:
            output.print(as_json=values["as_json"])

    untyped: Any = call
    # Typer would keep line breaks.
    untyped.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")
    untyped.__annotations__ = {name: hint for name, hint, _ in options}
    untyped.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
            )
            for name, hint, default in options
        ]
    )
    return call


def command(
    group: Typer,
    epilog: str,
    panel: Panel | None = None,
    *,
    name: str = "",
    short: Panel | None = None,
) -> Callable[[Command], Command]:
    """Decorator: add a function as command NAME of its group (`GROUP_NAME` or NAME).

    `epilog`: examples. `panel`: of the help. `short`: the panel that also lists it as a short
    command.
    """

    def registered(function: Command) -> Command:
        word = name or function.__name__.rpartition("_")[2]
        made = with_option_groups(function)
        group.command(word, cls=_Command, epilog=epilog, rich_help_panel=panel)(made)
        if short:
            app.command(word, cls=_Command, epilog=epilog, rich_help_panel=short)(made)
        return function

    return registered


@dataclass(frozen=True)
class SettingsOptions:
    overrides: Annotated[list[str] | None, argument(SETTINGS_HELP, metavar="KEY=VALUE")] = None
    config: Files = None
    profile: Profiles = None
    seed: Annotated[
        int | None,
        option(
            "of weights, dropout and order in all trainings", min=0, show_default="as set, else 1"
        ),
    ] = None

    def load(self, **options: Any) -> LoadedSettings:
        from ttrain.config.loading import load
        from ttrain.config.training import SEEDS

        seeds = [] if self.seed is None else [f"{key}={self.seed}" for key in SEEDS]
        overrides = [*seeds, *(self.overrides or ())]
        return load(overrides, files=self.config or (), profiles=self.profile or (), **options)

    def over_run(self, run: JsonObject) -> LoadedSettings:
        """The settings of an earlier run with overrides.

        The environment sets only `runtime` and the unrecorded secrets of sources.
        """
        from ttrain.config.loading import ENVIRONMENT_PREFIX
        from ttrain.lineage.lookup import base_of, with_secrets

        prefix = f"{ENVIRONMENT_PREFIX}RUNTIME__"
        runtime = {
            key: value for key, value in os.environ.items() if key.upper().startswith(prefix)
        }
        return self.load(environment=runtime, base=base_of(with_secrets(run)))


@dataclass(frozen=True)
class SelectionOptions:
    extend: Extend = False
    force: Annotated[
        list[str] | None,
        option(
            "rerun this stage even if it is finished, and those that depend on it; repeatable",
            metavar="STAGE",
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        option(
            "only these stages (A,B, or repeated); their inputs must be in the store",
            metavar="STAGES",
        ),
    ] = None
    since: Annotated[
        str, option("this stage and what depends on it", "--from", metavar="STAGE")
    ] = ""
    until: Annotated[str, option("this stage and what it depends on", metavar="STAGE")] = ""
    resume_key: Annotated[
        str,
        option(
            "resume the unfinished work of this key, begun with other code or another "
            "learning rate",
            "--continue",
            metavar="KEY",
        ),
    ] = ""


@dataclass(frozen=True)
class RestartOptions:
    fresh: Annotated[
        bool, option("train from the start; unfinished work is set aside", "--fresh")
    ] = False
    from_step: Annotated[
        int | None,
        option(
            "continue at this older checkpoint, with its optimizer; newer work is set aside", min=1
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.fresh and self.from_step is not None:
            raise UsageError(
                f"--fresh cannot be combined with --from-step {self.from_step}; remove one of them"
            )

    def __bool__(self) -> bool:
        return self.fresh or self.from_step is not None

    def plan(self, pipeline: str, settings: Settings, only_of: str = "", **to_plan: Any) -> Plan:
        """Plan after preparing the stages' work; print what was renamed aside."""
        from ttrain import api
        from ttrain.engine.resume import restart

        planned = api.plan(pipeline, settings, **to_plan)
        if not self:
            return planned
        stages = [each for each in planned.stages if each.state == "run"]
        if only_of:
            stages = [each for each in stages if each.stage.name == only_of]
        for line in restart(planned.store, stages, self.from_step):
            print_escaped(line, stderr=True)
        return api.plan(pipeline, settings, **to_plan)


@dataclass(frozen=True)
class PipelineOptions:
    engine: Annotated[
        Literal["prefect", "none"], option("none: run the same graph without Prefect")
    ] = "prefect"
    note: Annotated[
        str | None, option("a note on the purpose of this run; shown with it", metavar="TEXT")
    ] = None
    tag: Annotated[
        list[str] | None,
        option("a label of this run to search for in MLflow; repeatable", metavar="KEY=VALUE"),
    ] = None
    run_name: Annotated[
        str | None,
        option("a short name of this run, for all commands that take a run", metavar="NAME"),
    ] = None
    yes: Annotated[
        bool,
        option(
            "without asking: what takes over a day or forty passes, or long for code alone",
            "--yes",
            "-y",
        ),
    ] = False

    def labels(self) -> JsonDict:
        from ttrain.engine.labels import labels_of, new_run_name

        return labels_of(self.note, self.tag, new_run_name(layout.home(), self.run_name))


def resolved_models(
    texts: Sequence[str | None],
    *,
    base: str | None = None,
    run: str | None = None,
    stderr: bool = True,
) -> list[Reference]:
    """Find the models of a command, and print a line about each."""
    from ttrain.lineage import lookup

    models = lookup.resolve_all(texts, base=base, run=run)
    for model in models:
        print_escaped(lookup.line_of(model), stderr=stderr)
    return models


def task_settings(overrides: list[str] | None, config: list[Path] | None) -> list[Override]:
    """Overrides of a task's settings, the weakest first, still as texts."""
    from ttrain.config.loading import layers

    return layers(overrides or (), config or (), environment=os.environ, root=None)


def check_output_file(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = (
            "is a directory" if path.is_dir() else f"is in {path.parent}, which does not exist"
        )
        raise UsageError(
            f"the file to write, {path}, {problem}; name a file in a directory that exists"
        )
