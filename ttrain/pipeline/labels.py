"""A user's labels of a run, `--note TEXT` and `--tag KEY=VALUE`: shown with the run, not part of any key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ttrain.core import redact
from ttrain.errors import UsageError
from ttrain.store.runs import read_rows

TAG_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
RESERVED = ("mlflow.", "ttrain.")  # beginnings of the tags that MLflow and ttrain set themselves
NIGHT = "night"  # the tag of a run that trained in night mode
MOST_TAGS, TAG_CHARACTERS, NOTE_CHARACTERS = 20, 250, 2000


def trained_at_night(curve: Path) -> bool:
    """Whether any line of a stage's curve was logged in night mode."""
    with contextlib.suppress(OSError):  # a stage that does not train has no curve
        return any(row["metrics"].get(NIGHT) for row in read_rows(curve))
    return False


@dataclass(frozen=True)
class Labels:
    """The note and the tags of a run, checked, without secrets."""

    note: str = ""
    tags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def to_json(self) -> dict[str, object]:
        """The labels as stored in the run's record."""
        return {name: value for name, value in (("note", self.note), ("tags", dict(self.tags))) if value}


NO_LABELS = Labels()


def labels_of(note: str | None, tags: Sequence[str] | None) -> Labels:
    """Parse and check `--note` and `--tag`. Raises UsageError for an invalid text or key."""
    pairs: dict[str, str] = {}
    for tag in tags or ():
        key, value = _pair(tag)
        if pairs.get(key, value) != value:
            raise UsageError(f"--tag {key} is given twice, as {pairs[key]!r} and as {value!r}; leave one of them out")
        pairs[key] = value
    if len(pairs) > MOST_TAGS:
        raise UsageError(f"--tag is given {len(pairs)} times, but a run takes {MOST_TAGS} tags; leave some out")
    text = (note or "").strip()
    if len(text) > NOTE_CHARACTERS:
        raise UsageError(f"--note has {len(text)} characters, but at most {NOTE_CHARACTERS} are kept; shorten it")
    if not all(line.isprintable() for line in re.split(r"[\n\t]", text)):
        raise UsageError("--note has control characters, which a page or a terminal might obey; leave them out")
    return Labels(redact.text(text), {key: str(value) for key, value in redact.masked(pairs).items()})


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = (word.strip() for word in text.partition("="))
    if not equals or not value:
        raise UsageError(f"--tag is {text[:80]!r} but must be KEY=VALUE with a value; try --tag purpose=baseline")
    if not TAG_KEY.fullmatch(key) or key.lower().startswith(RESERVED) or key == NIGHT:
        raise UsageError(
            f"--tag has the key {key[:80]!r}, but a key is a letter and then at most 63 letters, digits, _, . or -, and "
            f"neither begins with {' or '.join(RESERVED)} nor is {NIGHT}, which ttrain sets; try --tag purpose={value[:20]}"
        )
    if len(value) > TAG_CHARACTERS or not value.isprintable():
        raise UsageError(
            f"--tag {key} has a value of {len(value)} characters, but a value is one line of at most {TAG_CHARACTERS} "
            f"printable characters; put longer text into --note"
        )
    return key, value
