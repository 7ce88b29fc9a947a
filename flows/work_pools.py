"""A `prefect.yaml` for work pools: schedules that Prefect's workers run, on other machines, in containers, on Kubernetes.

`prefect deploy --all` reads it, after `prefect work-pool create --type TYPE NAME`; `prefect worker start --pool NAME` then
takes the place of `ttrain pipeline serve`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from flows import schedule_files, schedules, servers
from flows.flow_runs import TAG, home_tag
from flows.schedule_files import Schedule
from flows.service_units import addresses, secrets
from ttrain import __version__
from ttrain.data import locations
from ttrain.errors import UsageError

KINDS: Final = ("process", "docker", "kubernetes")
HOME_INSIDE: Final = "/ttrain"  # of the container; a volume of the host or of the cluster


def prefect_yaml(home: Path, schedule: Schedule) -> str:
    """The text for one schedule in a pool of the kind `schedule.pool`. Raises UsageError for another kind."""
    kind = schedule.pool
    if kind not in KINDS:
        raise UsageError(f"--prefect-yaml is '{kind}' but must be one of {', '.join(KINDS)}")
    if schedule.cron:
        os.environ.update(servers.prefect_environment(home))
        schedules.check(schedule.cron, schedule.timezone)
    pool, schedule = f"ttrain-{kind}", replace(schedule, settings=schedule_files.parameters(schedule))
    deployment = {
        "name": schedule.name,
        "entrypoint": f"flows.deployments.{schedule.kind}",
        "tags": [TAG, home_tag(home)],
        "version": __version__,
        "schedules": [{"cron": schedule.cron, "timezone": schedule.timezone, "active": True}] if schedule.cron else [],
        "parameters": {"settings": schedule.settings},
        "work_pool": {"name": pool, "job_variables": _job_variables(home, schedule)},
        "pull": [],
    }
    schedule_files.write(home, schedule)
    text = yaml.safe_dump(
        {"name": "ttrain", "build": None, "push": None, "pull": None, "deployments": [deployment]},
        sort_keys=False,
        allow_unicode=True,
        width=120,
    )
    return f"{_head(kind, pool)}{text}"


def _head(kind: str, pool: str) -> str:
    needs = {
        "process": "# Workers need ttrain installed and this directory at the same path.\n",
        "docker": "# The image has ttrain, and its name stands below; folders of data are mounted where they are.\n",
        "kubernetes": "# The image has ttrain; the pool's base job template must mount a volume at /ttrain, and the data.\n",
    }
    left_out = f"# Set where the worker runs, not here: {', '.join(secrets())}\n" if secrets() else ""
    return (
        f"# prefect work-pool create --type {kind} {pool}\n"
        f"# prefect deploy --all --prefect-file prefect.yaml\n"
        f"# prefect worker start --pool {pool}\n{needs[kind]}{left_out}"
    )


def _job_variables(home: Path, schedule: Schedule) -> dict[str, Any]:
    named = addresses()
    if schedule.pool == "process":
        return {"env": {"TTRAIN_HOME": str(home.resolve()), **named}, "working_dir": str(home.resolve())}
    inside = {"image": f"ttrain:{__version__}", "env": {"TTRAIN_HOME": HOME_INSIDE, **named}}
    if schedule.pool == "kubernetes":
        return {**inside, "namespace": "default", "finished_job_ttl": 86_400, "image_pull_policy": "IfNotPresent"}
    mounts = [f"{home.resolve()}:{HOME_INSIDE}", *(f"{folder}:{folder}:ro" for folder in _data_folders(schedule))]
    return {**inside, "volumes": mounts, "auto_remove": True, "image_pull_policy": "IfNotPresent"}


def _data_folders(schedule: Schedule) -> list[str]:
    """The folders of this machine that the data lies in, each once; of a glob the part without wildcards."""
    found: dict[str, None] = {}
    for sources in schedule.settings["data"].values():
        for source in sources:
            location = source["path"] if isinstance(source, dict) else source
            if locations.is_remote(location) or not location.startswith("/"):
                continue
            path = Path(location)
            while any(letter in part for part in path.parts for letter in "*?["):
                path = path.parent
            if not path.is_dir() and path.suffix:  # a file, or what shall be one where the worker runs
                path = path.parent
            if path == Path(path.anchor):
                raise UsageError(f"'{location}' lies in {path}, which no container can mount; put the data into a folder")
            found[str(path)] = None
    return list(found)
