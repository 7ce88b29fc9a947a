"""Fill in the files of templates/: what keeps `ttrain pipeline serve` up over reboots and crashes, by systemd, launchd or
cron, and the prefect.yaml of a work pool."""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from dataclasses import replace
from importlib import resources
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

import yaml

from ttrain.core.machine import VERSION
from ttrain.data import locations
from ttrain.errors import UsageError
from ttrain.flows import prefect_api, schedule_files, schedules
from ttrain.flows.flow_runs import TAG, home_tag
from ttrain.flows.schedule_files import Schedule

INHERITED = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")

SECRETS = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
                  "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")  # fmt: skip

SECRETS_FILE = Path(".config", "ttrain", "environment")  # below the user's own home: NAME=value, one a line


def unit(kind: str, home: Path) -> str:
    """The text of that kind for this home, this Python, and the servers that the environment names.

    Raises UsageError for a path that a unit cannot hold.
    """
    for text in (*command(), *environment(home).values()):
        if not text.isprintable():
            raise UsageError(f"{text!r} has characters that a unit cannot hold; choose another directory")
    return {"systemd": _systemd, "launchd": _launchd, "cron": _cron}[kind](home.resolve())


def _filled(template: str, **values: str) -> str:
    """A file of templates/ with its $names filled in."""
    text = resources.files("ttrain.flows").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def command() -> list[str]:
    """The command that serves, in full: the script of this environment, else this Python."""
    script = Path(sys.executable).with_name("ttrain")
    if script.is_file():
        return [str(script), "pipeline", "serve"]
    return [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()", "pipeline", "serve"]


def environment(home: Path) -> dict[str, str]:
    """The variables that the service needs; settings are in the schedules."""
    return {"TTRAIN_HOME": str(home.resolve()), **addresses()}


def addresses() -> dict[str, str]:
    """The servers that the environment names; without those whose address holds a password."""
    values = {name: os.environ.get(name, "") for name in INHERITED}
    return {
        name: value for name, value in values.items() if value and "@" not in value.partition("://")[2].partition("/")[0]
    }


def secrets() -> list[str]:
    """Names of the variables that are set here, are needed there too, and must not be in a file that others may read."""
    return [name for name in (*SECRETS, *INHERITED) if os.environ.get(name) and name not in addresses()]


def _about_secrets(prefix: str = "# ", suffix: str = "\n") -> str:
    """What to do about secrets, as a comment; nothing where there are none."""
    if not secrets():
        return ""
    text = f"Not written here: {', '.join(secrets())}. Put NAME=value lines into ~/{SECRETS_FILE}, and chmod 600 it."
    return f"{prefix}{text}{suffix}"


def _with_secrets(shell_command: str) -> str:
    """A shell command with the variables of the secrets' file; the command alone where there are none."""
    path = shlex.quote(str(Path.home() / SECRETS_FILE))
    return f"set -a && . {path} && set +a && exec {shell_command}" if secrets() else shell_command


def _systemd(home: Path) -> str:
    """A unit of the user's own systemd; see systemd.service(5) for the quoting."""
    return _filled(
        "ttrain.service",
        secrets=_about_secrets(),
        home=str(home).replace("%", "%%"),
        command=" ".join(_quoted(word).replace("$", "$$") for word in command()),
        variables="\n".join(f"Environment={_quoted(f'{name}={value}')}" for name, value in environment(home).items()),
    )


def _launchd(home: Path) -> str:
    """An agent of the user's; see launchd.plist(5)."""
    arguments = ["/bin/sh", "-c", _with_secrets(shlex.join(command()))] if secrets() else command()
    variables = environment(home).items()
    return _filled(
        "ttrain.plist",
        secrets=_about_secrets("<!-- ", " -->\n"),
        home=escape(str(home)),
        arguments="\n\t\t".join(f"<string>{escape(word)}</string>" for word in arguments),
        variables="\n\t\t".join(f"<key>{name}</key>\n\t\t<string>{escape(value)}</string>" for name, value in variables),
    )


def _cron(home: Path) -> str:
    """A line for `crontab -e`: starts `serve` every five minutes; where one is up, the second ends at once."""
    serve_command = shlex.join([*command(), "--unless-served"])
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment(home).items())
    log = shlex.quote(str(home / "schedules" / "serve.log"))
    folder = shlex.quote(str(home / "schedules"))
    line = f"mkdir -p {folder} && cd {folder} && ( {_with_secrets(f'env {variables} {serve_command}')} ) >> {log} 2>&1"
    return f"{_about_secrets()}*/5 * * * * " + line.replace("%", "\\%") + "\n"  # cron takes a % for the end of the line


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


HOME_INSIDE = "/ttrain"  # of the container; a volume of the host or of the cluster


def prefect_yaml(home: Path, schedule: Schedule) -> str:
    """The text for one schedule in a pool of the kind `schedule.pool`."""
    kind, slots = schedule.pool, []
    if schedule.cron:
        os.environ.update(prefect_api.prefect_environment(home))
        schedules.check(schedule.cron, schedule.timezone)
        schedule = schedules.with_slots(schedule)
        slots = [{"cron": schedule.cron, "timezone": schedule.timezone, "active": True}]
    earlier = schedule_files.read_all(home).get(schedule.full_name)
    schedule = replace(schedule, settings=schedule_files.parameters(schedule), paused=bool(earlier and earlier.paused))
    mounts = [f"{folder}:{folder}:ro" for folder in _data_folders(schedule)] if kind == "docker" else []
    values = {
        "name": schedule.name,
        "tags": [TAG, home_tag(home)],
        "schedules": slots,
        "home": str(home.resolve()),
        "environment": {"TTRAIN_HOME": str(home.resolve()) if kind == "process" else HOME_INSIDE, **addresses()},
        "volumes": [f"{home.resolve()}:{HOME_INSIDE}", *mounts],
    }
    settings = yaml.safe_dump(schedule.settings, sort_keys=False, allow_unicode=True, width=120)
    schedule_files.write(home, schedule)
    return _filled(
        f"prefect-{kind}.yaml",
        secrets=f"# Set where the worker runs, not here: {', '.join(secrets())}\n" if secrets() else "",
        flow=schedule.kind,
        version=VERSION,
        settings=textwrap.indent(settings, " " * 6).rstrip(),
        **{name: json.dumps(value, ensure_ascii=False) for name, value in values.items()},  # JSON is YAML, too
    )


def _data_folders(schedule: Schedule) -> list[str]:
    """The folders of this machine that the data lies in, each once; of a glob the part without wildcards."""
    folders: dict[str, None] = {}
    for sources in schedule.settings["data"].values():
        for source in sources:
            location = source["path"] if isinstance(source, dict) else source
            if locations.is_remote(location) or not location.startswith("/"):
                continue
            path = Path(location)
            while any(letter in component for component in path.parts for letter in "*?["):
                path = path.parent
            if not path.is_dir() and path.suffix:  # a file, here or where the worker runs
                path = path.parent
            if path == Path(path.anchor):
                raise UsageError(f"'{location}' lies in {path}, which a container cannot mount; put the data into a folder")
            folders[str(path)] = None
    return list(folders)
