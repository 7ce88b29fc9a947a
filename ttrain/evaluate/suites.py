"""Find, load and check suite files, and list the files that their tasks read. Loads no torch."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ttrain.config.evaluate import HELDOUT, KINDS, Suite
from ttrain.config.loading import read_yaml
from ttrain.config.yaml_text import configs_directory, one_line
from ttrain.core.files import JsonDict, user_path
from ttrain.core.text import rule_of
from ttrain.errors import UsageError
from ttrain.evaluate.items import heldout_part
from ttrain.store import name_syntax

SENTENCES = {
    "missing": "missing",
    "extra_forbidden": "not a setting there; docs/evaluation.md lists them by kind",
    "union_tag_not_found": f"without a kind, which must be one of {', '.join(KINDS)}",
    "union_tag_invalid": "of kind {tag}, but must be of one of {expected_tags}",
    "value_error": "wrong: {error}",
    "[key]": 'wrong: a task is called "{input}"; take letters, digits, _, - and ., such as poems-2',
}

ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class LoadedSuite:
    """A suite with its requested name or path, and its file; paths in it are relative to `base`."""

    name: str
    suite: Suite
    file: Path | None
    base: Path


def names() -> list[str]:
    """Names of the suites that ship with ttrain."""
    return sorted(path.stem for path in (configs_directory() / "suites").glob("*.yaml"))


def load(name: str) -> LoadedSuite:
    """Load a suite by name or file. Raises UsageError if it does not exist or is invalid."""
    file = find(name)
    return LoadedSuite(name, checked(read_yaml(file), str(file)), file, file.parent)


def load_heldout() -> LoadedSuite:
    """Load the tasks on everything that a run may have held out, also by its optional stages."""
    heldout = load(HELDOUT)
    tasks = {**heldout.suite.tasks, **load("pairs").suite.tasks}
    return replace(heldout, suite=heldout.suite.model_copy(update={"tasks": tasks}))


def find(name: str) -> Path:
    """Find the file of a suite by name or path. Raises UsageError if there is none."""
    path = user_path(name)
    if path.suffix not in ENDINGS and os.sep not in name:
        path = configs_directory() / "suites" / f"{name}.yaml"
        if not path.is_file():
            raise name_syntax.unknown(
                "suite", name, names(), also="; or name a file that ends in .yaml"
            )
    if not path.is_file():
        raise UsageError(
            f"there is no suite file {name}; create it, or use one of {', '.join(names())}"
        )
    return path.absolute()


def of_tasks(tasks: Mapping[str, JsonDict], origin: str) -> LoadedSuite:
    """Build a suite from the user's tasks; paths are relative to the working directory."""
    return LoadedSuite(origin, checked({"tasks": tasks}, origin), None, Path.cwd())


def with_parts(loaded: LoadedSuite, parts: Collection[str]) -> LoadedSuite:
    """Drop tasks whose held-out part is not among `parts`. Raises UsageError if none is left."""
    tasks = {
        name: task
        for name, task in loaded.suite.tasks.items()
        if heldout_part(task) in (None, *parts)
    }
    if not tasks:
        missing = sorted({str(heldout_part(task)) for task in loaded.suite.tasks.values()})
        raise UsageError(
            f"{loaded.name} evaluates only held-out {' and '.join(missing)}, but the run held out "
            f"{' and '.join(parts) or 'nothing'}; add a task with a file"
        )
    return replace(loaded, suite=loaded.suite.model_copy(update={"tasks": tasks}))


def at_most(loaded: LoadedSuite, **limits: int) -> LoadedSuite:
    """Lower the limits of tasks: `limit` items of each task, `max_bytes` of each text task."""
    tree = loaded.suite.model_dump()
    for task in tree["tasks"].values():
        task |= {
            name: min(most, task[name] or most) for name, most in limits.items() if name in task
        }
    return replace(loaded, suite=checked(tree, loaded.name))


def checked(tree: Mapping[str, Any], origin: str) -> Suite:
    """Validate a suite's settings. Raises UsageError that names task, setting, value and rule."""
    try:
        return Suite.model_validate(tree)
    except ValidationError as error:
        lines: list[str] = []
        for wrong in error.errors():  # the place of a task's setting is tasks, name, kind, setting
            kind = (
                str(wrong["loc"][-1])
                if wrong["type"] == "string_pattern_mismatch"
                else wrong["type"]
            )
            sentence = SENTENCES.get(kind, "").format(input=wrong["input"], **wrong.get("ctx", {}))
            value = "" if sentence else f"{wrong['input']!r} but "
            lines.append(
                one_line(
                    f"{'.'.join(map(str, wrong['loc']))} is {value}{sentence or rule_of(wrong)}"
                )
            )
        raise UsageError(f"{origin}: {'; '.join(lines)}") from None


def files_of(loaded: LoadedSuite) -> list[Path]:
    """List the suite's own file and those of its tasks. Raises UsageError if one is missing."""
    files = [] if loaded.file is None else [loaded.file]
    for task, spec in loaded.suite.tasks.items():
        for setting in ("shots_file",) if heldout_part(spec) else ("file", "shots_file"):
            if (file := getattr(spec, setting, None)) is not None:
                path = loaded.base / user_path(file)
                if not path.is_file():
                    raise UsageError(
                        f"{loaded.name}: {task}.{setting} is {file}, but there is no file {path}"
                    )
                files.append(path)
    return list(dict.fromkeys(files))


def check_parts(loaded: LoadedSuite, parts: Collection[str]) -> None:
    """Raise UsageError for a task whose held-out part is not among `parts`."""
    for name, task in loaded.suite.tasks.items():
        if (part := heldout_part(task)) not in (None, *parts):
            raise UsageError(
                f"{loaded.name}: {name}.file is {getattr(task, 'file', part)}, "
                "but the model's own run held out no "
                f"{part}; set it to a file"
            )


def check_distinct_tasks(suites: Sequence[LoadedSuite]) -> None:
    """Raise UsageError if two suites have a task of the same name, and so the same metrics."""
    counts = Counter(task for loaded in suites for task in loaded.suite.tasks)
    for task in (task for task, count in counts.items() if count > 1):
        both = " and ".join(loaded.name for loaded in suites if task in loaded.suite.tasks)
        raise UsageError(f"both {both} have a task '{task}'; rename one of them")
