"""What is made of a schedule: a deployment on a Prefect server, a systemd unit, a prefect.yaml."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from importlib import resources
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import yaml

from ttrain.core.machine import VERSION
from ttrain.errors import UsageError
from ttrain.flows.flow_runs import TAG, home_tag
from ttrain.flows.schedules import Schedule, parameters, settings_of

INHERITED = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
SECRETS = (
    "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN",
)  # fmt: skip
HOME_INSIDE = "/ttrain"  # of a container; a volume of the host or of the cluster


def apply(home: Path, schedule: Schedule) -> None:
    """Create or change the deployment on the server that the environment names."""
    from prefect.schedules import Cron
    from prefect.types.entrypoint import EntrypointType

    from ttrain.flows import deployments

    settings, flow = settings_of(home, schedule), getattr(deployments, schedule.kind)
    is_cron = schedule.cron is not None
    deployment = flow.to_deployment(
        name=schedule.name,
        schedule=Cron(schedule.cron, timezone=schedule.timezone, slug="cron") if is_cron else None,
        paused=schedule.paused,
        parameters={"settings": parameters(settings.model_dump(mode="json"))},
        description=f"{flow.description}\n\nIts home is `{home.resolve()}`.",
        tags=[TAG, home_tag(home)],
        version=VERSION,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    if not is_cron:
        deployment.schedules = []  # removes an earlier cron
    deployment.apply()


def unit(home: Path) -> str:
    """The text of a unit of the user's systemd; see systemd.service(5) for the quoting."""
    variables = {"TTRAIN_HOME": str(home.resolve()), **_addresses()}
    for text in (*command(), *variables.values()):
        if not text.isprintable():
            rule = "has characters that a unit cannot hold"
            raise UsageError(f"{text!r} {rule}; choose another directory")
    lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()]
    note = "Not written here: {}. Put NAME=value lines into ~/.config/ttrain/environment, mode 600."
    return _filled(
        "ttrain.service",
        secrets=_secrets_note(note),
        home=str(home.resolve()).replace("%", "%%"),
        command=" ".join(_quoted(word).replace("$", "$$") for word in command()),
        variables="\n".join(lines),
    )


def command() -> list[str]:
    """The command that serves, in full: the script of this environment, else this Python."""
    script = Path(sys.executable).with_name("ttrain")
    start = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]
    return [*([str(script)] if script.is_file() else start), "pipeline", "serve"]


def prefect_yaml(home: Path, schedule: Schedule) -> str:
    """The text for one schedule in a pool of the kind `schedule.pool`."""
    inside = str(home.resolve()) if schedule.pool == "process" else HOME_INSIDE
    slots = [{"cron": schedule.cron, "timezone": schedule.timezone, "active": True}]
    mounts = [f"{folder}:{folder}:ro" for folder in _data_folders(schedule)]
    values = {
        "name": schedule.name,
        "tags": [TAG, home_tag(home)],
        "schedules": slots if schedule.cron else [],
        "home": str(home.resolve()),
        "environment": {"TTRAIN_HOME": inside, **_addresses()},
        "volumes": [f"{home.resolve()}:{HOME_INSIDE}", *mounts],
    }
    shown = parameters(schedule.settings)
    settings = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100)
    return _filled(
        f"prefect-{schedule.pool}.yaml",
        secrets=_secrets_note("Set where the worker runs, not here: {}"),
        flow=schedule.kind,
        version=VERSION,
        settings=textwrap.indent(settings, " " * 6).rstrip(),
        # JSON is YAML, too
        **{name: json.dumps(value, ensure_ascii=False) for name, value in values.items()},
    )


def _data_folders(schedule: Schedule) -> list[str]:
    """The folders of this machine that hold the data; of a glob its part without wildcards."""
    sources = [source for sources in schedule.settings["data"].values() for source in sources]
    paths = [source["path"] if isinstance(source, dict) else source for source in sources]
    here = [path for path in paths if path.startswith("/")]
    fixed = [re.split(r"/[^/]*[*?[]", path)[0].rstrip("/") for path in here]
    is_file = {path: bool(Path(path).suffix) and not Path(path).is_dir() for path in fixed}
    folders = [path.rpartition("/")[0] if is_file[path] else path for path in fixed]
    if "" in folders:
        raise UsageError("data lies in /, which a container cannot mount; put it into a folder")
    return list(dict.fromkeys(folders))


def _filled(template: str, **values: str) -> str:
    """A file of templates/ with its $names filled in."""
    path = resources.files("ttrain.flows").joinpath("templates", template)
    return Template(path.read_text(encoding="utf-8")).substitute(values)


def _addresses() -> dict[str, str]:
    """The servers that the environment names; without those whose address holds a password."""
    named = {name: os.environ[name] for name in INHERITED if os.environ.get(name)}
    return {name: url for name, url in named.items() if "@" not in urlsplit(url).netloc}


def _secrets_note(text: str) -> str:
    """A comment with the names of the variables that are needed there, but must not be shown."""
    given = [name for name in (*SECRETS, *INHERITED) if os.environ.get(name)]
    names = [name for name in given if name not in _addresses()]
    return f"# {text.format(', '.join(names))}\n" if names else ""


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
