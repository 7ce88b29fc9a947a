"""Which settings the parameters of a flow run may set: none that names code or a command (`NAMES_CODE`).

Who reaches Prefect's API may give a run any parameters, and what such a setting names would run as the account that
serves. So these are the deployment's own, from its file in the home, which `ttrain pipeline schedule` wrote.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows import schedule_files
from ttrain.config import NAMES_CODE, Section, Settings, flatten
from ttrain.config.yaml_text import shown
from ttrain.errors import UsageError


def settings_to_run(home: Path, kind: str, settings: Settings) -> Settings:
    """What the flow run that this is called in runs with: its parameters and the secrets of its sources.

    A flow that a program of the user's calls itself has no deployment, and runs with what it is called with. Raises
    UsageError where the parameters set what they may not.
    """
    if not os.environ.get("PREFECT__FLOW_RUN_ID"):  # a runner or a worker sets it
        return schedule_files.with_secrets(settings, None)
    from prefect.runtime import deployment

    schedule = schedule_files.read_all(home).get(f"{kind}/{deployment.name}")
    path = schedule_files.folder_of(home) / f"{kind}-{deployment.name}.json"
    settings = schedule_files.with_secrets(settings, schedule)
    try:
        own = _in_this_home(Settings.model_validate(schedule.settings), path) if schedule else Settings()
        return with_code_of(own, settings, kind, path)
    except ValidationError:
        raise UsageError(
            f"{path} has settings of another version of ttrain; make it again with `ttrain pipeline schedule {kind}`"
        ) from None


def _in_this_home(settings: Settings, path: Path) -> Settings:
    """The settings of a schedule's file, whose webhook lies beside it: in a container the home has another name."""
    webhook = path.with_suffix(".webhook")
    if Path(settings.notify.webhook_file or "").name != webhook.name:
        return settings
    return settings.model_copy(update={"notify": settings.notify.model_copy(update={"webhook_file": str(webhook)})})


def with_code_of(own: Settings, settings: Settings, kind: str, path: Path) -> Settings:
    """The settings, with what names code as the deployment's own have it. Raises UsageError where another value is given.

    A default is no other value: who gives a run settings of its own need not repeat these.
    """
    values, trees = _naming_code(settings), [_naming_code(own), _naming_code(Settings())]
    for key, value in values.items():
        if all(tree.get(key) != value for tree in trees):
            raise UsageError(
                f"{key} is {shown(value)} in the parameters of this flow run, but what names code or a command comes from "
                f"the deployment's own file alone, {path}; leave it out, or set it there with "
                f"`ttrain pipeline schedule {kind} ... {key}=...`"
            )
    for key in NAMES_CODE:
        settings = _with(settings, key, own)
    return settings


def _naming_code(settings: Settings) -> dict[str, Any]:
    """As it is shown: without the part of a webhook's address that is secret."""
    prefixes = tuple(f"{key}." for key in NAMES_CODE)
    leaves = flatten(settings.model_dump(mode="json"))
    return {key: value for key, value in leaves if key in NAMES_CODE or key.startswith(prefixes)}


def _with(settings: Any, key: str, other: Section) -> Any:
    """The settings with one of them, or a section, as another tree has it."""
    name, _, rest = key.partition(".")
    value = getattr(other, name)
    return settings.model_copy(update={name: _with(getattr(settings, name), rest, value) if rest else value})
