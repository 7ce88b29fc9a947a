"""Suites as files: found by name or path, read, checked; and the files that they read. Loads no torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from ttrain.config.loading import configs_directory, read_yaml
from ttrain.config.suite import HELDOUT, HELDOUT_PARTS, ChatsTask, HarnessTask, Suite, Task, TextTask
from ttrain.config.yaml_text import one_line
from ttrain.errors import UsageError
from ttrain.evaluate import suite_errors

SHOWN_ERRORS = 20
ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class Loaded:
    """A suite, the name or path that it was asked for by, and the file that it stands in; paths in it are relative to
    `base`. `named`: the options of the command line that brought tasks, such as "--choices"."""

    name: str
    suite: Suite
    file: Path | None
    base: Path
    named: Mapping[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """The suites that ship with ttrain."""
    return sorted(path.stem for path in _shipped().glob("*.yaml"))


def load(name: str) -> Loaded:
    """The suite of that name, or in that file. Raises UsageError where there is none, or where what it says is wrong."""
    file = find(name)
    tree = read_yaml(file)
    return Loaded(name, checked(tree, str(file)), file, file.parent)


def find(name: str) -> Path:
    """The file of a suite. Raises UsageError where there is none."""
    path = Path(name).expanduser()
    if path.suffix in ENDINGS or os.sep in name:
        if not path.is_file():
            raise UsageError(f"there is no suite {name}: no such file; write one, or take one of {', '.join(names())}")
        return path.absolute()
    shipped = _shipped() / f"{name}.yaml"
    if not shipped.is_file():
        near = difflib.get_close_matches(name, names(), n=1)
        said = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names())}; a file of your own ends in .yaml"
        raise UsageError(f"there is no suite '{name}'; {said}")
    return shipped


def of_tasks(tasks: Mapping[str, Mapping[str, Any]], origin: str, named: Mapping[str, str] = MappingProxyType({})) -> Loaded:
    """A suite of tasks that the user named one by one, with these options; paths are relative to where one stands."""
    return Loaded(origin, checked({"tasks": tasks}, origin), None, Path.cwd(), named)


def of_heldout(parts: Collection[str]) -> Loaded:
    """The suite `heldout` on what is there of documents, chats and domain; `parts` names one at least."""
    return within(load(HELDOUT), parts)


def within(loaded: Loaded, parts: Collection[str]) -> Loaded:
    """The same suite without the tasks that name a held-out part which is not among these. Raises UsageError where that
    leaves none."""
    tasks = {name: task for name, task in loaded.suite.tasks.items() if _part(task) in (None, *parts)}
    if not tasks:
        named = sorted({str(_part(task)) for task in loaded.suite.tasks.values()})
        raise UsageError(
            f"{loaded.name} asks about held-out {' and '.join(named)} alone, but here is "
            f"{' and '.join(parts) or 'nothing'}; add a task with a file"
        )
    return replace(loaded, suite=loaded.suite.model_copy(update={"tasks": tasks}))


def at_most(loaded: Loaded, items: int, text_bytes: int) -> Loaded:
    """The same suite with at most so many items of each task, and at most so many bytes of each text."""
    tree = loaded.suite.model_dump()
    for task in tree["tasks"].values():
        for name, most in (("limit", items), ("max_bytes", text_bytes)):
            if name in task:
                task[name] = most if task[name] is None else min(task[name], most)
    return replace(loaded, suite=checked(tree, loaded.name))


def changed(loaded: Loaded, **settings: Any) -> Loaded:
    """The same suite with these settings in each task that has them."""
    tree = loaded.suite.model_dump()
    for task in tree["tasks"].values():
        task.update({name: value for name, value in settings.items() if name in task})
    return replace(loaded, suite=checked(tree, loaded.name))


def checked(tree: Mapping[str, Any], origin: str) -> Suite:
    """The suite that a tree describes. Raises UsageError that names task, setting, value and rule."""
    try:
        return Suite.model_validate(tree)
    except ValidationError as error:
        errors = [one_line(suite_errors.explained(item, tree)) for item in error.errors(include_url=False)[:SHOWN_ERRORS]]
        raise UsageError(f"{origin}: {'; '.join(errors)}") from None


def files_of(loaded: Loaded) -> list[Path]:
    """What shapes its result: its own file, and all that its tasks read. Raises UsageError where one is missing."""
    found = [] if loaded.file is None else [loaded.file]
    for setting, path in read_by(loaded):
        if not path.is_file():
            raise UsageError(f"{loaded.name}: {setting}, but there is no file {path}")
        found.append(path)
    return list(dict.fromkeys(found))


def read_by(loaded: Loaded) -> Iterator[tuple[str, Path]]:
    """("poems.file is poems.jsonl", its path) of each file that a task reads, whether it is there or not."""
    for name, task in loaded.suite.tasks.items():
        for setting, file in _named(task):
            called = loaded.named.get(name) if setting == "file" else None
            yield f"{called or f'{name}.{setting}'} is {file}", loaded.base / Path(file).expanduser()


def without_chats(loaded: Loaded) -> Suite | None:
    """The suite without its tasks of kind chats; None where that leaves none."""
    tasks = {name: task for name, task in loaded.suite.tasks.items() if not isinstance(task, ChatsTask)}
    return loaded.suite.model_copy(update={"tasks": tasks}) if tasks else None


def check_parts(loaded: Loaded, parts: Collection[str]) -> None:
    """Raise UsageError for a task that names a held-out part which is not among these."""
    for name, task in loaded.suite.tasks.items():
        if (part := _part(task)) not in (None, *parts):
            raise UsageError(
                f"{loaded.name}: {name}.file is {getattr(task, 'file', part)}, the held-out {part} of the model's own run, "
                f"but there are none; name a file"
            )


def distinct(suites: Sequence[Loaded]) -> None:
    """Raise UsageError where two suites have a task of one name: their figures would have one name, too."""
    seen: dict[str, str] = {}
    for loaded in suites:
        for task in loaded.suite.tasks:
            if task in seen:
                raise UsageError(f"both {seen[task]} and {loaded.name} have a task '{task}'; rename one of them")
            seen[task] = loaded.name


def _shipped() -> Path:
    return configs_directory() / "suites"


def _part(task: Task) -> str | None:
    """Which held-out part a task names instead of a file."""
    return HELDOUT_PARTS.get(task.file) if isinstance(task, TextTask | ChatsTask) else None


def _named(task: Task) -> Iterable[tuple[str, str]]:
    """(setting, file) of the files that a task reads."""
    if isinstance(task, HarnessTask):
        return [("task", task.task)] if task.task.endswith(ENDINGS) else []
    found = [(name, getattr(task, name, None)) for name in ("file", "shots_file")]
    held_out = HELDOUT_PARTS if isinstance(task, TextTask | ChatsTask) else ()
    return [(name, file) for name, file in found if file is not None and file not in held_out]
