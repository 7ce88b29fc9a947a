"""Detect task files of lm-evaluation-harness that run Python, without running any.

`!function` in such a file imports a module, and a metric that is not the harness's own is a script that the library
`evaluate` runs. Included files and the files that a group names count as well; the harness's own do not. Prompt templates
can run Python, too: the harness renders them in an environment that reaches every module (0.4.13), so they get a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ttrain.config import yaml_text
from ttrain.core.files import user_path
from ttrain.errors import DataError, UsageError

FUNCTION = "!function"
MAX_BYTES, MAX_FILES = yaml_text.MOST_BYTES, 1000
FIX = "to run it with your full rights, read the file and the module that it names, then set allow_code: true in the suite"


def check(path: Path, setting: str) -> None:
    """Raise UsageError, with file and line, if the task file at `path` or one that it reads runs Python.

    Raises DataError for a file that cannot be read.
    """
    pending, visited = [path.resolve()], set[Path]()
    while pending:
        file = pending.pop()
        if file in visited or _is_of_the_harness(file):
            continue
        visited.add(file)
        if len(visited) > MAX_FILES:
            raise DataError(f"{setting}: {path} reads more than {MAX_FILES} files; split it")
        try:
            tree = _parsed(file)
        except _FunctionCall as call:
            name, line = call.args
            message = f"{setting} is {path}, which runs Python: {FUNCTION} {name} in {file}, line {line}; {FIX}"
            raise UsageError(message) from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise DataError(f"{setting}: cannot read {file}: {' '.join(str(error).split())}") from None
        for metric in _metrics(tree):
            if not _is_metric_of_the_harness(metric):
                script = metric["metric"]
                raise UsageError(
                    f"{setting} is {path}, which runs Python: the metric {script!r} in {file} is not the harness's own "
                    f"but a script; {FIX}"
                )
        pending += [linked.resolve() for linked in _files_named(tree, file.parent, path.parent) if linked.is_file()]


def sandbox_templates() -> None:
    """Make the harness render the templates of task files in Jinja's sandbox."""
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    if not isinstance(utils.env, SandboxedEnvironment):
        sandboxed = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
        sandboxed.filters.update(utils.env.filters)
        utils.env = sandboxed


class _FunctionCall(Exception):
    """A file names a function, which the harness would import: (name, line)."""


def _parsed(file: Path) -> Any:
    """The contents of a file. Raises _FunctionCall."""
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return yaml.load(file.read_bytes().decode("utf-8-sig"), _Loader)


class _Loader(yaml_text.Loader):
    """Loads the harness's files, within the limits of settings files, without importing the functions that they name."""

    tags = yaml_text.PLAIN | {FUNCTION}


def _refuse(loader: yaml.Loader, node: yaml.Node) -> None:
    raise _FunctionCall(node.value, node.start_mark.line + 1)


_Loader.add_constructor(FUNCTION, _refuse)


def _nested(tree: Any) -> Iterator[Any]:
    """Yield every value in a tree, each once, so that nested aliases do not multiply."""
    pending, visited = [tree], set[int]()
    while pending:
        value = pending.pop()
        if id(value) not in visited:
            visited.add(id(value))
            yield value
            pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _metrics(tree: Any) -> Iterator[dict[str, Any]]:
    for value in _nested(tree):
        listed = value.get("metric_list") if isinstance(value, dict) else None
        for metric in listed if isinstance(listed, list) else ():
            if isinstance(metric, dict) and "metric" in metric:
                yield metric


def _is_metric_of_the_harness(metric: dict[str, Any]) -> bool:
    from lm_eval.api import metrics, registry

    assert metrics, "the import fills the registry"
    return metric.get("hf_evaluate") is not True and metric["metric"] in list(registry.metric_registry)


def _files_named(tree: Any, directory: Path, working_directory: Path) -> Iterator[Path]:
    """Yield the files that a file includes, in its own directory, and a group's task files, in the working directory."""
    if not isinstance(tree, dict):
        return
    for key in ("include", "task"):
        references = tree.get(key)
        for name in references if isinstance(references, list) else [references]:
            if isinstance(name, str):
                yield directory / name
                yield working_directory / user_path(name)


def _is_of_the_harness(file: Path) -> bool:
    import lm_eval

    return file.is_relative_to(Path(lm_eval.__file__).resolve().parent)
