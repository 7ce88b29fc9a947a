"""What was measured to be fastest on this machine, remembered in the home by machine, model and shape of the rows.

It decides about speed alone, so a file that is damaged or gone costs a minute of measuring, and nothing else.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, StrictBool, StrictInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ttrain.core.files import PRIVATE_FILE, JsonObject, need_object, write_json
from ttrain.core.hashing import digest_of

FILE = Path("cache", "tuning.json")
LOCK = Path("cache", "tuning.lock")
LARGEST_BYTES = 1_000_000
ENTRIES = 200  # the newest so many
Attention = Literal["records", "masked"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
Number = Annotated[StrictInt, Field(le=1 << 31)]

log = logging.getLogger("ttrain")


WHOLE = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=WHOLE)
class Choice:
    """Values of settings of `runtime`, all of them resolved."""

    rows_per_device: Annotated[Number, Field(ge=1)]
    attention: Attention
    loss_chunk_tokens: Annotated[Number, Field(ge=0)]
    compile: StrictBool

    def __str__(self) -> str:
        return (
            f"rows_per_device={self.rows_per_device} attention={self.attention} "
            f"loss_chunk_tokens={self.loss_chunk_tokens} compile={'true' if self.compile else 'false'}"
        )


@dataclass(frozen=True, config=WHOLE)
class Tuning:
    """A choice, how many times as fast as the settings it was, and what it was measured on."""

    choice: Choice
    gain: float
    subject: JsonObject
    time: float

    def __str__(self) -> str:
        device, model, parameters, length = (
            self.subject.get(name) for name in ("device", "model", "parameters", "row_length")
        )
        shape = f"{model} of {parameters} parameters on {device}, rows of {length}"
        return f"{shape}: {self.choice}, {self.gain:.2f} times the speed of the settings"


def recall(home: Path, subject: JsonObject) -> Tuning | None:
    """What was chosen for a subject: machine, model, shape of the rows, versions and settings."""
    return read(home).get(digest_of(subject))


def remember(home: Path, subject: JsonObject, choice: Choice, gain: float) -> None:
    """Add a choice to what is remembered; the caller holds `LOCK`. A home that cannot be written costs a line of the log."""
    tunings = {**read(home), digest_of(subject): Tuning(choice, gain, subject, time.time())}
    newest = sorted(tunings.items(), key=lambda item: item[1].time)[-ENTRIES:]
    try:
        (home / FILE).parent.mkdir(parents=True, exist_ok=True)
        write_json(home / FILE, {key: asdict(tuning) for key, tuning in newest}, PRIVATE_FILE)
    except OSError as error:
        log.warning("what was tuned cannot be remembered: %s", error)


def of_machine(home: Path, processor: str) -> list[Tuning]:
    """All that is remembered of machines with this CPU, the newest first."""
    tunings = [tuning for tuning in read(home).values() if tuning.subject.get("processor") == processor]
    return sorted(tunings, key=lambda tuning: -tuning.time)


def read(home: Path) -> dict[str, Tuning]:
    """All entries by the digest of their subject; entries, or a whole file, that are damaged are left out with a line."""
    path = home / FILE
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
        entries = need_object(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s is ignored: %s; it is written anew when something is tuned", path, error)
        return {}
    tunings = {key: tuning for key, entry in entries.items() if (tuning := _parsed(key, entry)) is not None}
    if len(tunings) < len(entries):
        log.warning("%s: %d of its %d entries are damaged, and ignored", path, len(entries) - len(tunings), len(entries))
    return tunings


def _parsed(key: str, entry: Any) -> Tuning | None:
    """The tuning of an entry; None where it is not what `remember` wrote."""
    try:
        tuning = TypeAdapter(Tuning).validate_python(entry)
    except ValidationError:
        return None
    return tuning if digest_of(tuning.subject) == key else None
