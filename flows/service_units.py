"""What keeps `ttrain pipeline serve` up over reboots and crashes: a systemd unit, a launchd agent, or a line for cron."""

from __future__ import annotations

import os
import plistlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ttrain.errors import UsageError

LABEL: Final = "ttrain"
STOP_SECONDS: Final = 660  # a little more than serving waits for a checkpoint
RESTART_SECONDS: Final = 30
INHERITED: Final = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
SECRETS: Final = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
                  "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")  # fmt: skip
SECRETS_FILE: Final = Path(".config", "ttrain", "environment")  # below the user's own home: NAME=value, one a line


def unit(kind: str, home: Path) -> str:
    """The text of that kind for this home, this Python, and the servers that the environment names.

    Raises UsageError for another kind, and for a path that no unit can hold.
    """
    makers: dict[str, Callable[[Path], str]] = {"systemd": _systemd, "launchd": _launchd, "cron": _cron}
    if kind not in makers:
        raise UsageError(f"--unit is '{kind}' but must be one of {', '.join(makers)}")
    for text in (*command(), *environment(home).values()):
        if not text.isprintable():
            raise UsageError(f"{text!r} has characters that no unit can hold; choose another directory")
    return makers[kind](home.resolve())


def command() -> list[str]:
    """The command that serves, in full: the script of this environment, else this Python."""
    script = Path(sys.executable).with_name("ttrain")
    if script.is_file():
        return [str(script), "pipeline", "serve"]
    return [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()", "pipeline", "serve"]


def environment(home: Path) -> dict[str, str]:
    """What it needs of the environment; settings are in the schedules."""
    return {"TTRAIN_HOME": str(home.resolve()), **addresses()}


def addresses() -> dict[str, str]:
    """The servers that the environment names; without those whose address holds a password."""
    return {name: os.environ[name] for name in INHERITED if os.environ.get(name) and not _has_password(os.environ[name])}


def secrets() -> list[str]:
    """Names of the variables that are set here, are needed there too, and stand in no file that others may read."""
    return [name for name in (*SECRETS, *INHERITED) if os.environ.get(name) and name not in addresses()]


def _has_password(address: str) -> bool:
    return "@" in address.partition("://")[2].partition("/")[0]


def _about_secrets(before: str = "# ", after: str = "\n") -> str:
    """What to do about secrets, as a comment; nothing where there are none."""
    if not secrets():
        return ""
    told = f"Not written here: {', '.join(secrets())}. Put NAME=value lines into ~/{SECRETS_FILE}, and chmod 600 it."
    return f"{before}{told}{after}"


def _with_secrets(words: str) -> str:
    """A command of the shell that has the variables of that file, too; the command alone where there are none."""
    path = shlex.quote(str(Path.home() / SECRETS_FILE))
    return f"set -a && . {path} && set +a && exec {words}" if secrets() else words


def _systemd(home: Path) -> str:
    """A unit of the user's own systemd; see systemd.service(5) for the quoting.

    KillMode=mixed: only `serve` gets SIGTERM, which passes it on once. OOMPolicy=continue: a stage that runs out of memory
    fails alone. The file of EnvironmentFile=- may be missing.
    """
    variables = "\n".join(f"Environment={_quoted(f'{name}={value}')}" for name, value in environment(home).items())
    return f"""\
# ttrain pipeline serve --unit systemd > ~/.config/systemd/user/{LABEL}.service
# systemctl --user daemon-reload && systemctl --user enable --now {LABEL}
# loginctl enable-linger    (so that it starts with the machine, before you log in)
{_about_secrets()}[Unit]
Description=ttrain: what is scheduled in {_specifiers(str(home))}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={" ".join(_quoted(word).replace("$", "$$") for word in command())}
WorkingDirectory={_specifiers(str(home))}
{variables}
EnvironmentFile=-%h/{SECRETS_FILE}
Restart=on-failure
RestartSec={RESTART_SECONDS}
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


def _launchd(home: Path) -> str:
    """An agent of the user's; see launchd.plist(5)."""
    log = str(home / "schedules" / "serve.log")
    agent = {
        "Label": LABEL,
        "ProgramArguments": ["/bin/sh", "-c", _with_secrets(shlex.join(command()))] if secrets() else command(),
        "EnvironmentVariables": environment(home),
        "WorkingDirectory": str(home),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        "ExitTimeOut": STOP_SECONDS,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    head, first, rest = plistlib.dumps(agent, sort_keys=False).decode().partition("<plist")
    return head + _about_secrets("<!-- ", " -->\n") + first + rest


def _cron(home: Path) -> str:
    """A line for `crontab -e`: every five minutes it starts what is not up; where it is up, the second one ends at once."""
    words = shlex.join([*command(), "--unless-served"])
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment(home).items())
    log = shlex.quote(str(home / "schedules" / "serve.log"))
    folder = shlex.quote(str(home / "schedules"))
    line = f"mkdir -p {folder} && cd {folder} && ( {_with_secrets(f'env {variables} {words}')} ) >> {log} 2>&1"
    return f"{_about_secrets()}*/5 * * * * " + line.replace("%", "\\%") + "\n"  # cron takes a % for the end of the line


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_specifiers(escaped)}"'


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")
