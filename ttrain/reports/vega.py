"""Vega, Vega-Lite and Vega-Embed as one script for pages, out of the package vl-convert, which brings them along.

To bundle them takes a JavaScript engine two seconds, so the text is kept in the user's cache directory, one file a version.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from ttrain.errors import TTrainError

PACKAGE = "vl-convert-python"
LICENCES = "/* Vega, Vega-Lite, Vega-Embed: https://vega.github.io, BSD-3-Clause; D3: https://d3js.org, ISC */"
SNIPPET = "window.vegaEmbed=vegaEmbed;"  # what the script leaves behind
BUNDLE = f"import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle({SNIPPET!r}).encode())"

log = logging.getLogger(__name__)


def script() -> str:
    """The script's text: from the cache, else made and kept there; where there is no room for it, only made."""
    path = cache_directory() / f"charts-{version(PACKAGE)}.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        text = _bundle()
    try:
        _keep(path, text)
    except OSError as error:
        log.info("the library for charts could not be kept in %s: %s", path, error)
    return text


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/ttrain`, by default `~/.cache/ttrain` (https://specifications.freedesktop.org/basedir-spec/latest/)."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "ttrain"


def _bundle() -> str:
    """From a process of its own: the engine holds the interpreter's lock all the time, and its memory for good."""
    done = subprocess.run([sys.executable, "-P", "-c", BUNDLE], capture_output=True, text=True, encoding="utf-8")
    made = f"{PACKAGE} {version(PACKAGE)}, which draws charts,"
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        raise TTrainError(f"{made} does not work here: {told[-1]}; `pip install --force-reinstall {PACKAGE}`")
    if "</script" in done.stdout.lower() or "<!--" in done.stdout:  # would end the script of a page
        raise TTrainError(f"{made} makes a script that cannot stand in a page; `pip install {PACKAGE}==1.9.0.post1`")
    return f"{LICENCES}\n{done.stdout.strip()}"


def _keep(path: Path, text: str) -> None:
    """In one rename: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
