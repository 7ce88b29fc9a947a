"""Calls to MLflow: what comes of them as a value, and what may stand in a name or in a log."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from typing import TypeVar

from ttrain.core import redact
from ttrain.core.sqlite_files import is_damage

log = logging.getLogger("ttrain")
Result = TypeVar("Result")

KEY_CHARACTERS = 250
AUTOFLUSH = "(raised as a result of Query-invoked autoflush"
# Of files whose names no file system, or not this one, can hold, or hold beside those that are there.
NEVER = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


class RefusedError(Exception):
    """What was asked makes no sense, so that asking again is of no use."""


def outcome(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What a call gave, or its error as a value: nothing settles what MLflow may raise, and none of it may pass."""
    try:
        return action(), None
    except Exception as error:
        log.debug("from MLflow", exc_info=True)
        return None, error


def is_refusal(error: Exception) -> bool:
    """Whether MLflow understood and said no, so that asking again is of no use."""
    if isinstance(error, OSError) and error.errno in NEVER:
        return True
    if isinstance(error, RefusedError | UnicodeEncodeError):
        return True
    return code_of(error) in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")


def is_locked(error: object) -> bool:
    """Whether another program writes to the SQLite file, and did so for longer than was waited for."""
    return "database is locked" in str(error)


def is_out_of_use(error: object) -> bool:
    """Whether it is the SQLite file, not what was asked: locked or damaged, so that the same may be asked later."""
    return is_locked(error) or is_damage(error)


def unless_there(create: Callable[[], object]) -> None:
    """Creates what another thread or process may be creating, too."""
    try:
        create()
    except Exception as error:
        if code_of(error) != "RESOURCE_ALREADY_EXISTS":
            raise


def code_of(error: Exception) -> str:
    return getattr(error, "error_code", "")


def first_line(error: Exception) -> str:
    """What went wrong, on one line; of a long one the beginning and the end, where the cause stands.

    SQLAlchemy may put a remark of its own before the database's words.
    """
    lines = (line for line in str(error).split("\n") if not line.startswith(AUTOFLUSH))
    text = redact.text(next(lines, ""))
    return (text if len(text) <= 300 else f"{text[:140]} ... {text[-150:]}") or type(error).__name__


def clean(key: str) -> str:
    """A name that MLflow takes: of its characters, and no path that leads upward or says a part twice."""
    parts = re.sub(r"[^/\w.\- :]", "_", key).split("/")
    name = "/".join(part for part in parts if part not in ("", ".", ".."))[:KEY_CHARACTERS].rstrip("/.") or "_"
    return f"_{name[1:]}" if name.startswith("..") else name


def plain(value: object) -> str:
    """A text as databases and JSON take it: without NUL, and without the halves of letters that are no UTF-8."""
    return str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
