"""Every error that ttrain raises on purpose.

    TTrainError                 a message for the user, without a traceback; exit code 1
    ├── UsageError              the user's mistake before anything ran: settings, arguments; exit code 2
    ├── DataError               bad input data; carries `file:line` where there is one
    │   ├── CannotRead          a file that is gone, closed to us or changing, whose bytes may be good
    │   └── TooFewRows          a training has fewer rows than one of its steps takes
    ├── NothingNew              all documents are near-duplicates of learnt ones, or held out by earlier nights
    ├── StageFailed             a stage's process ended without a result, or with an error
    ├── ArtifactError           the store holds something that cannot be trusted
    ├── RankLost                another rank of the same training ended or does not answer
    └── Interrupted             SIGINT, SIGTERM or SIGHUP, after the state was saved; exit code 130, 143 or 129

A user's mistake raises one of these and says setting, value, rule and cure; a programmer's mistake asserts.
"""

import errno
import signal
from collections.abc import Sequence
from pathlib import Path

from ttrain.core import redact

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
RUST_DISK_FULL = (
    f"(os error {errno.ENOSPC})"  # how safetensors and tokenizers say it, in errors of their own
)
FREE_SPACE = "free some space and run the same command again"


class TTrainError(Exception):
    """Base of all; `str(error)` is meant for the user."""

    exit_code = 1
    is_mistake = False  # of settings or data, which no second try mends
    is_usage_error = False  # of the command or of settings, also where these do not fit the data: no failed try of a night
    shown = False  # whether the user has read the message already

    def __init__(self, message: str = "") -> None:
        """Errors are logged, recorded, tracked and sent: their URLs hold no secrets."""
        super().__init__(redact.text(message))


def is_disk_full(error: object) -> bool:
    """Whether a file or a SQLite database could not be written for want of space, also by a library written in Rust."""
    text = str(error)
    return (
        getattr(error, "errno", None) in DISK_FULL
        or "database or disk is full" in text
        or RUST_DISK_FULL in text
    )


def exit_code_of(error: TTrainError | OSError) -> int:
    """The exit code of a command that ended with an error: 2 for what cannot be opened as asked, not for a full disk."""
    if isinstance(error, OSError):
        return 1 if is_disk_full(error) else UsageError.exit_code
    return error.exit_code


def with_fix(error: BaseException) -> str:
    """The error's message; that of a full disk with what to do."""
    return f"{error}; {FREE_SPACE}" if is_disk_full(error) else str(error)


class UsageError(TTrainError):
    """The command or a setting is wrong; nothing was started."""

    exit_code = 2
    is_mistake = is_usage_error = True


class DataError(TTrainError):
    """The input data cannot be used; the message names file, line and cure."""

    is_mistake = True

    def __init__(self, message: str = "", files: Sequence[str] = ()) -> None:
        """`files`: locations of those whose bytes are at fault, so that a night can leave them out."""
        super().__init__(message)
        self.files = tuple(files)


class CannotRead(DataError):
    """A file cannot be read now: it is gone, closed to us, changing, or its server does not answer."""


class TooFewRows(DataError):
    """A training has fewer rows than one step takes: the settings ask for a larger step than the data can fill.

    `fixes`: settings, key=value, with which it has enough.
    """

    is_usage_error = True

    def __init__(self, message: str = "", fixes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.fixes = tuple(fixes)


class NothingNew(TTrainError):
    """All documents are near-duplicates of documents that were learnt before, so that a night has nothing to learn.

    It is no failure: run and stage end as `nothing-new`.
    """

    is_mistake = True  # a second try finds the same


class StageFailed(TTrainError):
    """A stage did not end with a result; the message names its log. `kind`: the name of what its process raised.

    `damaged`: the file of the store that the process found damaged. `files`: locations of data files at fault.
    """

    def __init__(
        self, message: str, kind: str = "", damaged: Path | None = None, files: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.kind, self.damaged, self.files = kind, damaged, tuple(files)
        self.is_usage_error = kind in (UsageError.__name__, TooFewRows.__name__)
        self.is_mistake = self.is_usage_error or kind in MISTAKES


class ArtifactError(TTrainError):
    """An artifact or checkpoint is damaged, or does not fit what is asked of it."""


class NothingBuilt(ArtifactError):
    """A stage has no artifact yet."""

    exit_code = 2  # as with all that is missing since nothing has run


class DamagedFile(ArtifactError):
    """The bytes of a file are not those that were published; the message has both digests."""

    fix = "`ttrain artifacts verify --set-aside` moves what is damaged out of the store, so that the next run builds it anew"
    is_mistake = True  # a second try reads the same bytes

    def __init__(self, finding: str, path: Path, fix: str = fix) -> None:
        super().__init__(f"{finding}; {fix}")
        self.path = path


class RankLost(TTrainError):
    """What this rank waited for will not come: another rank ended, which has its own reason, or does not answer."""


class Interrupted(TTrainError):
    """A signal asked for the stop; what was done is saved."""

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signum = int(signum)
        self.exit_code = 128 + self.signum  # 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP


MISTAKES = frozenset(
    error.__name__ for error in (DataError, CannotRead, DamagedFile)
)  # kinds that no second try mends
