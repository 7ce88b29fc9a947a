"""Calls to MLflow: what comes of them as a value, and what may stand in a name or in a log."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("ttrain")
Result = TypeVar("Result")


def outcome(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What a call gave, or its error as a value: nothing settles what MLflow may raise, and none of it may pass."""
    try:
        return action(), None
    except Exception as error:
        log.debug("from MLflow", exc_info=True)
        return None, error


def is_refusal(error: Exception) -> bool:
    """Whether MLflow understood and said no, so that asking again is of no use."""
    return code_of(error) in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")


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
    return shown(str(error).partition("\n")[0])[:300] or type(error).__name__


def shown(text: str) -> str:
    """Without the user name and password that a URI can carry."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def clean(key: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^/\w.\- :]", "_", key)[:250]
