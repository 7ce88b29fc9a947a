"""Calls to MLflow: what comes of them as a value, and what may stand in a name or in a log."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("ttrain")
Result = TypeVar("Result")

KEY_CHARACTERS = 250
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


def is_locked(error: Exception) -> bool:
    """Whether another program writes to the SQLite file, and did so for longer than was waited for."""
    return "database is locked" in str(error)


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
    """What went wrong, on one line; of a long one the beginning and the end, where the cause stands."""
    text = shown(str(error).partition("\n")[0])
    return (text if len(text) <= 300 else f"{text[:140]} ... {text[-150:]}") or type(error).__name__


def shown(text: str) -> str:
    """Without the user name and password that a URI can carry, up to its last "@": a password may hold one, too."""
    return re.sub(r"//[^/?#\s]*@", "//", text)


def clean(key: str) -> str:
    """A name that MLflow takes: of its characters, and no path that leads upward or says a part twice."""
    parts = re.sub(r"[^/\w.\- :]", "_", key).split("/")
    name = "/".join(part for part in parts if part not in ("", ".", ".."))[:KEY_CHARACTERS].rstrip("/.") or "_"
    return f"_{name[1:]}" if name.startswith("..") else name


def plain(value: object) -> str:
    """A text as databases and JSON take it: without NUL, and without the halves of letters that are no UTF-8."""
    return str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
