"""Descriptions of registered models and their versions, as MLflow's pages show them. What a user writes there stays.

A text of ours ends with its own digest, in a comment that the pages leave out: so it is told from one that somebody edited,
by one write.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ttrain.core.hashing import digest_of
from ttrain.tracking.calls import plain

HERE: Final = "<NAME/VERSION>"  # in a text: the version that it describes
CHARACTERS: Final = 5000  # that MLflow's database holds
DECISION: Final = "\n\n## Decision\n\n"
MARK: Final = re.compile(r"\n\n<!-- ttrain ([0-9a-f]{12}) -->\Z")
MARK_CHARACTERS: Final = 30


def marked(text: str) -> str:
    """A text of ours, cut to what MLflow takes, with its digest."""
    text = plain(text)[: CHARACTERS - MARK_CHARACTERS]
    return f"{text}\n\n<!-- ttrain {digest_of(text)[:12]} -->"


def is_ours(description: str | None) -> bool:
    """Whether nobody has written it but ttrain."""
    found = MARK.search(description or "")
    return not description or (found is not None and marked(description[: found.start()]) == description)


def describe(client: Any, version: Any, text: str) -> None:
    """Gives a version this description, before the decision about it; one that a user wrote stays as it is."""
    before = version.description or ""
    if text and is_ours(before):
        _, heading, decision = MARK.sub("", before).partition(DECISION)
        new = marked(text.replace(HERE, f"{version.name}/{version.version}") + heading + decision)
        if new != before:
            client.update_model_version(version.name, str(version.version), new)


def add_decision(client: Any, version: Any, table: str) -> None:
    """Puts a decision below the description of a version, in the place of an earlier one."""
    before = version.description or ""
    new = MARK.sub("", before).partition(DECISION)[0] + DECISION + table
    client.update_model_version(version.name, str(version.version), marked(new) if is_ours(before) else new[:CHARACTERS])
