"""Names that a tracker may get: none that leads out of a run's directory, or that MLflow or a terminal cannot take."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Final
from urllib.parse import unquote

NAME_BYTES: Final = 240  # of one part of a path: file systems take 255, and a file that is being written has a longer name
PATH_BYTES: Final = 2000
RUN_NAME_CHARACTERS: Final = 250  # what MLflow's databases take

CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def run_name(name: str) -> str:
    """The name as MLflow and terminals take it: no control characters, not too long, not empty."""
    plain = "".join(" " if unicodedata.category(letter)[0] == "C" else letter for letter in name)
    return plain.strip()[:RUN_NAME_CHARACTERS] or "unnamed"


def artifact_path(text: str) -> str:
    """The path below a run's directory, as it was given. Raises ValueError where it could lead out of there.

    Refused is whatever any layer on the way could read so: "..", absolute paths, backslashes and drives, control
    characters, the same after percent-decoding (as often as it changes something) or Unicode's compatibility forms.
    """
    form = text
    for _ in range(5):
        for one in (form, unicodedata.normalize("NFKC", form)):
            _check(one, text)
        decoded = unquote(form, errors="replace")
        if decoded == form:
            break
        form = decoded
    else:
        raise ValueError(f"{_quoted(text)} is no path below a run: it is encoded many times over")
    return text


def below(root: Path, path: str) -> Path:
    """The place of a path below `root`, also where links stand in between. Raises ValueError where that is elsewhere."""
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
        "has an empty part, . or ..": any(part.strip() in ("", ".", "..") for part in parts),
        "has too long a part": any(len(part.encode(errors="replace")) > NAME_BYTES for part in parts),
    }
    for problem, there in problems.items():
        if there:
            raise ValueError(f"{_quoted(text)} is no path below a run: it {problem}")


def _quoted(text: str) -> str:
    return ascii(text[:80])
