"""Helpers for calls to MLflow: errors as values, their classification, and valid names and texts."""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from ttrain.core import redact
from ttrain.core.sqlite_files import is_damage

log = logging.getLogger("ttrain")

Result = TypeVar("Result")
Tags = Mapping[str, str]  # of a run, or of a version of a registered model

KEY_CHARACTERS = 250
DIGEST_CHARACTERS = 8  # 32 bits, among the few keys that differ in refused characters alone
MADE = re.compile(rf"--[0-9a-f]{{{DIGEST_CHARACTERS}}}$")  # the end of a name that `clean` made

AUTOFLUSH = "(raised as a result of Query-invoked autoflush"
# Errors of file names that no file system, or not this one, can hold, or that clash with existing files.
PERMANENT_ERRNOS = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


class RefusedError(Exception):
    """The request can never succeed, so it is not retried."""


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Call `action`; return (result, error) instead of raising, since MLflow may raise anything."""
    try:
        return action(), None
    except Exception as error:
        log.debug("from MLflow", exc_info=True)
        return None, error


def is_refusal(error: Exception) -> bool:
    """Whether MLflow understood and refused, so that a retry is useless."""
    if isinstance(error, OSError) and error.errno in PERMANENT_ERRNOS:
        return True
    if isinstance(error, RefusedError | UnicodeEncodeError):
        return True
    return code_of(error) in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")


def is_out_of_use(error: object) -> bool:
    """Whether the SQLite file is damaged, or another program keeps it locked, so that the same call may succeed later."""
    return "database is locked" in str(error) or is_damage(error)


def create_if_missing(create: Callable[[], object]) -> None:
    """Call `create`, ignoring the error that another thread or process has created it already."""
    try:
        create()
    except Exception as error:
        if code_of(error) != "RESOURCE_ALREADY_EXISTS":
            raise


def all_pages(search: Callable[..., Any]) -> list[Any]:
    """All results of an MLflow search, from all pages."""
    page = search()
    entities = list(page)
    while page.token:
        page = search(page_token=page.token)
        entities += page
    return entities


def code_of(error: Exception) -> str:
    return getattr(error, "error_code", "")


def first_line(error: Exception) -> str:
    """The error on one line; of a long one the beginning and the end, where the cause is.

    SQLAlchemy may put a remark of its own before the database's message.
    """
    lines = (line for line in str(error).split("\n") if not line.startswith(AUTOFLUSH))
    text = redact.text(next(lines, ""))
    return (text if len(text) <= 300 else f"{text[:140]} ... {text[-150:]}") or type(error).__name__


def clean(key: str) -> str:
    """A name that MLflow accepts, another one for each key: only its characters, no upward path, no empty segments.

    A key that MLflow would refuse ends in a digest of what it was, so that "r&d" and "r#d" stay apart and each has
    the same name in every run. So does a key that looks like such a name.
    """
    parts = re.sub(r"[^/\w.\- :]", "_", key).split("/")
    name = "/".join(segment for segment in parts if segment not in ("", ".", ".."))[:KEY_CHARACTERS].rstrip("/.")
    name = f"_{name[1:]}" if name.startswith("..") else name
    if key and name == key and not MADE.search(key):
        return key
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]
    return f"{name[: KEY_CHARACTERS - DIGEST_CHARACTERS - 2] or '_'}--{digest}"


def plain(value: object) -> str:
    """A text that databases and JSON accept: without NUL and without lone surrogates."""
    return str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode()


NAME_BYTES = 240  # of one part of a path: file systems allow 255, and a temporary file has a longer name

PATH_BYTES = 2000

RUN_NAME_CHARACTERS = 250  # the limit of MLflow's databases

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def run_name(name: str) -> str:
    """A run's name that MLflow and terminals accept: no control characters, not too long, not empty."""
    plain = "".join(" " if unicodedata.category(letter)[0] == "C" else letter for letter in name)
    return plain.strip()[:RUN_NAME_CHARACTERS] or "unnamed"


def artifact_path(text: str) -> str:
    """Return the path unchanged if it is safe below a run's directory. Raises ValueError if it could lead out of it.

    Refuses whatever any layer could read that way: "..", absolute paths, backslashes and drives, control characters, and
    the same after percent-decoding (as often as it changes something) or in Unicode's compatibility forms.
    """
    form = text
    for _ in range(5):
        for variant in (form, unicodedata.normalize("NFKC", form)):
            _check(variant, text)
        decoded = unquote(form, errors="replace")
        if decoded == form:
            break
        form = decoded
    else:
        raise ValueError(f"{_quoted(text)} is not a path below a run: it is percent-encoded too many times")
    return text


def below(root: Path, path: str) -> Path:
    """The location of a path below `root`. Raises ValueError if links lead it out of there."""
    target = root / artifact_path(path) if path else root
    if not target.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{_quoted(path)} leads out of {root} through a link")
    return target


def _check(form: str, text: str) -> None:
    parts = form.split("/")
    problems = {
        "is too long": len(form.encode(errors="replace")) > PATH_BYTES,
        "is absolute": form.startswith(("/", "~")) or re.match(r"[A-Za-z]:", form) is not None,
        "has a backslash": "\\" in form,
        "has control characters": CONTROLS.search(form) is not None,
        "has an empty part, '.' or '..'": any(segment.strip() in ("", ".", "..") for segment in parts),
        "has a part that is too long": any(len(segment.encode(errors="replace")) > NAME_BYTES for segment in parts),
    }
    for problem, is_present in problems.items():
        if is_present:
            raise ValueError(f"{_quoted(text)} is not a path below a run: it {problem}")


def _quoted(text: str) -> str:
    return ascii(text[:80])
