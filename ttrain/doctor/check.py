"""What a check found: a line for people, an object for scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ttrain.errors import TTrainError, UsageError

Found = TypeVar("Found", bound="Check | None")


@dataclass(frozen=True)
class Check:
    """`figure`: what was measured. `cure`: what to do, where it is not ok."""

    name: str
    ok: bool
    figure: float | str
    cure: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judged(name: str, ok: bool, figure: float | str, cure: str) -> Check:
    """A check with its cure where it is not ok."""
    return Check(name, ok, figure, None if ok else cure)


def guarded(name: str, examine: Callable[[], Found]) -> Found | Check:
    """The check, or what it raised: a part that fails is a finding too, and must not hide those after it.

    UsageError rises: the settings are wrong, and there is nothing to examine.
    """
    try:
        return examine()
    except UsageError:
        raise
    except TTrainError as error:
        return Check(name, False, str(error), "do what the message says; training would meet it too")
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Check(name, False, f"{type(error).__name__}: {lines[0]}", "training would meet this error too; report it")
