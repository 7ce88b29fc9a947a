"""Settings that mean the same in every directory: what is on record, and what runs elsewhere, names its files in full."""

from __future__ import annotations

from pathlib import Path

from ttrain.config import PYTHON_DOCS, Settings
from ttrain.data import locations


def absolute(settings: Settings) -> Settings:
    """The same settings for a process that runs in another directory: paths, globs and folders of this machine in full."""
    tree = settings.model_dump()  # JSON hides the secrets of URLs
    for dataset, sources in tree["data"].items():
        tree["data"][dataset] = [
            {**source, "path": _absolute(source["path"])} if isinstance(source, dict) else _absolute(source)
            for source in sources
        ]
    tree["tokenizer"]["existing"] = _folder(tree["tokenizer"]["existing"])
    for stage, start in settings.starts.items():
        if start == settings.existing_model:
            tree[stage]["start_from"] = _folder(start)
    for model, named in tree["evaluate"]["suites"].items():
        tree["evaluate"]["suites"][model] = [_file(name) for name in named]
    tree["shards"]["decontaminate"] = [_file(name) for name in settings.shards.decontaminate]
    if settings.runtime.eval_suite:
        tree["runtime"]["eval_suite"] = _file(settings.runtime.eval_suite)
    if settings.notify.webhook_file:
        tree["notify"]["webhook_file"] = _absolute(settings.notify.webhook_file)
    if settings.notify.command and "/" in settings.notify.command[0]:
        program, *arguments = settings.notify.command
        tree["notify"]["command"] = [_absolute(program), *arguments]
    return Settings.model_validate(tree)


def _absolute(location: str) -> str:
    """A path or glob in full; a URL, a name on the Hub and `python-docs` as they are."""
    if locations.is_remote(location) or location == PYTHON_DOCS:
        return location
    return str(locations.local_path(location).absolute())


def _folder(name: str | None) -> str | None:
    """A folder that is there, in full; else it is a name on the Hub."""
    return str(Path(name).expanduser().absolute()) if name and Path(name).expanduser().is_dir() else name


def _file(name: str) -> str:
    """A file that is there, in full; else it is the name of a suite that ships with ttrain."""
    return str(Path(name).expanduser().absolute()) if Path(name).expanduser().is_file() else name
