"""The grammar of names on the command line, and the message about an unknown name.

full-20261121-160222-1a2b4       a run, also by an unambiguous beginning or end; `latest`
baseline                         the run that its user called so, by --run-name
RUN:sft, sft                     a stage of that run; a stage
NAME@ALIAS, NAME/VERSION         a registered model or set of models; also as models:/NAME@ALIAS
./directory                      a directory
"""

import contextlib
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ttrain.errors import UsageError
from ttrain.store import layout, runs

LATEST = "latest"
LISTED = 5  # names in a message
SHORTEST_END = 4  # characters of the end of a run's name
BEGIN = "begin with `ttrain pipeline run full`"
PATTERN = re.compile(r"(?:models:/)?(?P<name>[^@/:]+)(?:@(?P<alias>[^@/:]+)|/(?P<version>\d+))")


class Registered(NamedTuple):
    """The name of a registered model, and its alias or its version."""

    name: str
    alias: str | None
    version: str | None

    def __str__(self) -> str:
        return f"{self.name}@{self.alias}" if self.alias else f"{self.name}/{self.version}"


def registered(text: str) -> Registered | None:
    """The parts of NAME@ALIAS or NAME/VERSION; None for any other text."""
    match = PATTERN.fullmatch(text)
    return Registered(**match.groupdict()) if match else None


def run_and_stage(text: str) -> tuple[str, str]:
    """The parts of RUN:STAGE; (text, "") for any other text."""
    run, _, stage = (text, "", "") if registered(text) else text.partition(":")
    return run, stage


def is_path(text: str) -> bool:
    return text.startswith((".", "~")) or Path(text).is_absolute()


def directory(text: str) -> Path | None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = Path(text).expanduser().absolute()
        return path if path.is_dir() else None
    return None


def matching(text: str, names: Sequence[str], kind: str = "run") -> str | None:
    """The name that equals `text`, or the only one that begins or ends so; None if none does.

    `names`: newest first. Raises UsageError if several match.
    """
    if text == LATEST:
        return names[0] if names else None
    ends = len(text) >= SHORTEST_END
    matches = [
        name for name in names if text and (name.startswith(text) or (ends and name.endswith(text)))
    ]
    if text in names:
        return text
    called = [name for name in matches if runs.short_name(name) == text]
    if called and not runs.is_generated(text):
        return called[0]  # the newest: one before it was cut short, and its command was given again
    if len(matches) > 1:
        raise UsageError(
            f"'{text}' is the beginning or end of {len(matches)} {kind}s: {listed(matches)}; "
            "write more of the name"
        )
    return matches[0] if matches else None


def need_stage(text: str, stages: Iterable[str], owner: str = "") -> str:
    """The name of a stage, unchanged. Raises UsageError if it is not among `stages`."""
    names = list(stages)
    if text not in names:
        raise unknown("stage", text, names, owner=owner, shown=len(names))
    return text


def unknown(
    kind: str,
    text: str,
    names: Iterable[str],
    *,
    owner: str = "",
    shown: int = LISTED,
    begin: str = BEGIN,
    also: str = "",
) -> UsageError:
    """The error about an unknown name, with similar and existing names.

    `kind`: what was looked for; `owner`: where, if not in the home; `begin`: how to make the first
    one.
    """
    existing = list(dict.fromkeys(names))
    near = difflib.get_close_matches(text[:200], existing, n=3, cutoff=0.6)
    place = "" if owner else f" in {layout.home().absolute()}"
    subject = f"{owner} has no {kind} '{text}'" if owner else f"there is no {kind} '{text}'"
    hint = f"; did you mean {' or '.join(near)}" if near else ""
    suggestion = (
        f"there {'is' if len(existing) == 1 else 'are'} {listed(existing, shown)}"
        if existing
        else f"there is none yet{place}, {begin}"
    )
    return UsageError(f"{subject}{hint}{'? ' if near else '; '}{suggestion}{also}")


def ambiguous(text: str, kind: str, names: Sequence[str]) -> UsageError:
    return UsageError(
        f"'{text}' is the beginning of {len(names)} {kind}: {listed(names)}; write more of it"
    )


def listed(names: Sequence[str], shown: int = LISTED) -> str:
    """The first names, and dots if there are more."""
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
