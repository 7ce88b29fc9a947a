"""Every error that ttrain raises on purpose.

    TTrainError                 a message for the user, without a traceback; exit code 1
    ├── UsageError              the user's mistake before anything ran: settings, arguments; exit code 2
    ├── DataError               bad input data; carries `file:line` where there is one
    ├── StageFailed             a stage's process ended without a result, or with an error
    ├── ArtifactError           the store holds something that cannot be trusted
    ├── TrackingError           MLflow cannot be asked for what only it knows
    ├── RankLost                another rank of the same training ended or does not answer
    └── Interrupted             SIGINT or SIGTERM, after the state was saved; exit code 130 or 143

A user's mistake raises one of these and says setting, value, rule and cure; a programmer's mistake asserts.
"""

from __future__ import annotations

import signal


class TTrainError(Exception):
    """Base of all; `str(error)` is meant for the user."""

    exit_code = 1
    is_mistake = False  # of settings or data, which no second try mends
    shown = False  # whether the user has read the message already


class UsageError(TTrainError):
    """The command or a setting is wrong; nothing was started."""

    exit_code = 2
    is_mistake = True


class DataError(TTrainError):
    """The input data cannot be used; the message names file, line and cure."""

    is_mistake = True


class StageFailed(TTrainError):
    """A stage did not end with a result; the message names its log. `kind`: the name of what its process raised."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.is_mistake = kind in (UsageError.__name__, DataError.__name__)


class ArtifactError(TTrainError):
    """An artifact or checkpoint is damaged, or does not fit what is asked of it."""


class TrackingError(TTrainError):
    """MLflow does not answer, or is not there; the message says which one was asked, and the cure."""


class RankLost(TTrainError):
    """What this rank waited for will not come: another rank ended, which has its own reason, or does not answer."""


class Interrupted(TTrainError):
    """A signal asked for the stop; what was done is saved."""

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signum = int(signum)
        self.exit_code = 128 + self.signum  # 130 for SIGINT, 143 for SIGTERM
