"""The table of what an outbox can hold: what tells it, and what a warning calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ttrain.tracking import delivery, links, registrations
from ttrain.tracking.journal import Entry
from ttrain.tracking.runs import Run


@dataclass(frozen=True)
class Kind:
    """What is done with an entry, and what a warning calls it."""

    tell: Callable[[Run, Entry], Any]
    words: str
    uploads: bool = False  # it may take long: told in a thread of its own where files go over the network, in their order


SENDING: Final = "sending metrics (they wait on disk)"
KINDS: Final[Mapping[str, Kind]] = {
    "params": Kind(delivery.params, "logging parameters"),
    "tags": Kind(delivery.tags, "setting tags"),
    "continued": Kind(delivery.continued, "continuing a run"),
    "summary": Kind(delivery.summary, "logging a summary"),
    "rows": Kind(delivery.rows, SENDING),
    "follow": Kind(delivery.follow, SENDING),
    "end": Kind(delivery.end, "ending a run"),
    "stages": Kind(links.stages, "linking a stage's run"),
    "to_parent": Kind(links.to_parent, "linking a stage's run"),
    "made_by": Kind(links.made_by, "linking a stage's run"),
    "inputs": Kind(delivery.log_inputs, "noting data sets"),
    "text": Kind(delivery.text, "keeping a text", uploads=True),
    "file": Kind(delivery.file, "keeping a file", uploads=True),
    "directory": Kind(delivery.directory, "keeping files", uploads=True),
    "register": Kind(registrations.register, "registering a model", uploads=True),
    "register_models": Kind(registrations.register_models, "registering a set of models", uploads=True),
}
