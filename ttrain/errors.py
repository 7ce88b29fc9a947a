"""Every error that ttrain raises on purpose.

    TTrainError           a message for the user, without a traceback; exit code 1
    ├── UsageError        a mistake in settings or arguments, before anything ran; exit code 2
    ├── DataError         bad input data; carries `file:line` where there is one
    │   ├── CannotRead    a missing, closed or changing file, whose bytes may be good
    │   └── TooFewRows    a training has fewer rows than one of its steps takes
    ├── NothingNew        all documents are near-duplicates or held out by earlier nights
    ├── StageFailed       a stage's process ended without a result, or with an error
    ├── ArtifactError     the store holds something that cannot be trusted
    ├── RankLost          another rank of the same training ended or does not answer
    └── Interrupted       a signal, after the state was saved; exit code 130, 143 or 129

A user's mistake raises one of these with setting, value, rule and fix; a programmer's asserts.
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
MISTAKES = frozenset({"DataError", "CannotRead", "DamagedFile"})  # a second try finds the same
FREE_SPACE = "free some space and run the same command again"


class TTrainError(Exception):
    """Base of all; `str(error)` is meant for the user."""

    exit_code = 1
    is_mistake = False  # of settings or data, which no second try mends
    is_usage_error = False  # of command or settings; a night does not count it as a failed try
    shown = False  # whether the user has read the message already

    def __init__(self, message: str = "") -> None:
        """Mask secrets of URLs: errors are logged, recorded, tracked and sent."""
        super().__init__(redact.text(message))


def is_disk_full(error: object) -> bool:
    """Whether the disk is full, also as SQLite or a Rust library reports it."""
    text = str(error)
    return (
        getattr(error, "errno", None) in DISK_FULL
        or "database or disk is full" in text
        or RUST_DISK_FULL in text
    )


def exit_code_of(error: TTrainError | OSError) -> int:
    """The exit code for an error: 2 for a path that cannot be opened, 1 for a full disk."""
    if isinstance(error, OSError):
        return 1 if is_disk_full(error) else UsageError.exit_code
    return error.exit_code


def with_fix(error: BaseException) -> str:
    """The error's message, with advice for a full disk."""
    return f"{error}; {FREE_SPACE}" if is_disk_full(error) else str(error)


class UsageError(TTrainError):
    """The command or a setting is wrong; nothing was started."""

    exit_code = 2
    is_mistake = is_usage_error = True


class DataError(TTrainError):
    """The input data cannot be used; the message names file, line and fix."""

    is_mistake = True

    def __init__(self, message: str = "", files: Sequence[str] = ()) -> None:
        """`files`: those with bad bytes, which a night can leave out."""
        super().__init__(message)
        self.files = tuple(files)


class CannotRead(DataError):
    """A file is missing, closed or changing, or its server does not answer."""


class TooFewRows(DataError):
    """A training has fewer rows than one step takes.

    `fixes`: settings, key=value, for which the rows suffice.
    """

    is_usage_error = True

    def __init__(self, message: str = "", fixes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.fixes = tuple(fixes)


class NothingNew(TTrainError):
    """All documents of a night are near-duplicates of earlier ones.

    Run and stage end as `nothing-new`, not as failed.
    """

    is_mistake = True  # a second try finds the same


class StageFailed(TTrainError):
    """A stage ended without a result; the message names its log.

    `kind`: name of the exception. `damaged`: a file of the store. `files`: bad data files.
    """

    def __init__(
        self, message: str, kind: str = "", damaged: Path | None = None, files: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.damaged = damaged
        self.files = tuple(files)
        self.is_usage_error = kind in (UsageError.__name__, TooFewRows.__name__)
        self.is_mistake = self.is_usage_error or kind in MISTAKES


class ArtifactError(TTrainError):
    """An artifact or checkpoint is damaged, or does not fit the request."""


class NothingBuilt(ArtifactError):
    """A stage has no artifact yet."""

    exit_code = 2  # as with all that is missing since nothing has run


class DamagedFile(ArtifactError):
    """A file's bytes differ from the published ones; the message has both digests."""

    fix = (
        "`ttrain artifacts verify --set-aside` moves what is damaged out of the store, so "
        "that the next run builds it anew"
    )
    is_mistake = True  # a second try reads the same bytes

    def __init__(self, finding: str, path: Path, fix: str = fix) -> None:
        super().__init__(f"{finding}; {fix}")
        self.path = path


class RankLost(TTrainError):
    """Another rank ended, for a reason of its own, or does not answer."""


class Interrupted(TTrainError):
    """A signal asked for the stop; what was done is saved."""

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signum = int(signum)
        self.exit_code = 128 + self.signum  # 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP
