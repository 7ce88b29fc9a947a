"""A user's labels of a run, `--note TEXT` and `--tag KEY=VALUE`; they enter no key."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from ttrain.core import redact
from ttrain.core.files import JsonDict
from ttrain.errors import UsageError
from ttrain.store import name_syntax, runs
from ttrain.tasks import STAGES

TAG_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
RESERVED = ("mlflow.", "ttrain.")  # beginnings of the tags that MLflow and ttrain set themselves
RUN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
NOTE_CHARACTERS = 2000


def new_run_name(home: Path, text: str | None) -> str:
    """The short name of a new run; "" for None. Raises UsageError if it is invalid or taken.

    The name of an interrupted run may be used again, since the same command continues it.
    """
    if text is None:
        return ""
    if not RUN_NAME.fullmatch(text) or runs.NAME_TIME.search(text):
        raise UsageError(
            f"--run-name is {text[:80]!r}, but a name is a letter and then at most 39 letters, "
            f"digits, _ or -; "
            f"try --run-name baseline"
        )
    if text in {name_syntax.LATEST, *STAGES} or runs.is_generated(text):
        raise UsageError(
            f"--run-name is {text}, which has another meaning; try --run-name my-{text}"
        )
    names = runs.names(home)
    taken = {runs.short_name(name) for name in names}
    run = next((name for name in names if runs.short_name(name) == text), None)
    if run and not runs.is_cut_short(runs.read(home, run) or {"outcome": "unknown"}):
        free = next(
            f"{text}-{number}" for number in itertools.count(2) if f"{text}-{number}" not in taken
        )
        raise UsageError(f"--run-name is {text}, which the run {run} has; try --run-name {free}")
    return text


def labels_of(note: str | None, tags: Sequence[str] | None, run_name: str = "") -> JsonDict:
    """Note, tags and checked `run_name` for the record, without secrets. Raises UsageError."""
    pairs: dict[str, str] = {}
    for tag in tags or ():
        key, _, value = (word.strip() for word in tag.partition("="))
        if (
            not (value and value.isprintable())
            or not TAG_KEY.fullmatch(key)
            or key.lower().startswith(RESERVED)
        ):
            raise UsageError(
                f"--tag is {tag[:80]!r} but must be KEY=VALUE: a key of letters, digits, _, . "
                f"or -, which begins with a "
                f"letter and neither with {' nor '.join(RESERVED)}, and a value of one line; "
                f"try --tag purpose=baseline"
            )
        pairs[key] = value
    text = (note or "").strip()
    if len(text) > NOTE_CHARACTERS:
        raise UsageError(
            f"--note has {len(text)} characters, but at most {NOTE_CHARACTERS} are kept; shorten it"
        )
    labels = {"note": redact.text(text), "tags": redact.masked(pairs), runs.SHORT_NAME: run_name}
    return {name: value for name, value in labels.items() if value}
