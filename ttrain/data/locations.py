"""Resolve the inputs that a setting names: local files, URLs that fsspec opens, and data sets on the Hugging Face Hub.

The planner uses this module, so fsspec and the Hub are imported only when such a location is named.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from ttrain.core import redact
from ttrain.core.files import user_path
from ttrain.core.text import first_of
from ttrain.data import remote
from ttrain.errors import UsageError

LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst", ".bz2", ".xz")
ROWS = (*LINES, *(kind + packed for kind in LINES for packed in PACKED), ".parquet")  # files of many records
TEXTS = (".txt", *(".txt" + packed for packed in PACKED))  # of one document each
TABLES = (".json", ".csv", ".tsv")  # read only if they are named explicitly
LOCAL = ("file://", "local://")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# How the Hub finds the split of a file in its path: the word between separators or digits, so that "constraints" is none.
_TRAIN = re.compile(r"(?:^|[-._ 0-9/])train(?:ing)?(?:[-._ 0-9/]|$)")


log = logging.getLogger("ttrain")


def is_remote(location: str) -> bool:
    """Whether the location is a URL or on the Hub, not on this machine."""
    return bool(_URL.match(location)) and not location.startswith(LOCAL)


def local_path(location: str) -> Path:
    """The path of a local location; `~` is the user's home."""
    for protocol in LOCAL:
        location = location.removeprefix(protocol)
    return user_path(location)


def name(location: str) -> str:
    """The last part of the path, for messages."""
    location = redact.url(location)
    if remote.is_http(location):
        location = unquote(re.split("[?#]", location)[0])
    return PurePosixPath(location).name


def version(location: str) -> str | None:
    """An identifier of the bytes behind a URL, without reading them; None for a local file.

    Takes a location that `expand` returned. Raises UsageError if the server gives nothing that would show a change.
    """
    if not is_remote(location):
        return None
    if location.startswith(remote.PREFIX):
        return location
    try:
        digest = remote.version_in(remote.info(location), location)
    except UsageError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise UsageError(f"cannot read {redact.url(location)}: {remote.reason(error)}") from None
    if digest is None:
        raise UsageError(
            f"cannot detect changes of {redact.url(location)}: its server gives no ETag, checksum or date; "
            "download it and name the file"
        )
    return digest


def expand(patterns: Sequence[str], setting: str) -> list[str]:
    """Files that the patterns name, each once: a file, a glob, or a folder, in sorted order.

    A folder means its files that end as in `ROWS`; if it has none, those that end as in `TEXTS`, so that a licence or a
    note beside the data is not read as a document.
    A pattern may be a URL, or `hf://owner/name[@revision][/path or glob]`: without a path the training split, always pinned
    to a commit. Raises UsageError if a pattern matches nothing, or a file that cannot be read.
    """
    paths: dict[str, None] = {}
    for pattern in patterns:
        shown = redact.url(pattern)
        if redact.is_hidden(pattern):
            variable = f"TTRAIN__{setting.upper().replace('.', '__')}"
            fix = f"{setting}=URL, or {variable} in the environment" if "." in setting else f"the whole URL as {setting}"
            raise UsageError(
                f"{setting} is '{shown}', a URL as runs record it, without its secrets; give it again in full, with {fix}"
            )
        try:
            if not is_remote(pattern):
                matches = local_matches(local_path(pattern))
            elif pattern.startswith(remote.PREFIX):
                matches = _hub_files(pattern)
            else:
                matches = _remote_files(pattern)
        except UsageError as error:
            raise UsageError(f"{setting} is '{shown}' but {error}") from None
        if not matches:
            raise UsageError(
                f"{setting} is '{shown}' but {_missing(pattern)}; name a .jsonl, .parquet or .txt file, a glob or a "
                "folder (commas separate several)"
            )
        paths.update(dict.fromkeys(matches))
    return list(paths)


def _missing(pattern: str) -> str:
    """Why a pattern matches nothing."""
    if is_remote(pattern):
        return "there is no such file"
    path = local_path(pattern)
    if path.is_dir():
        return "no file in that folder ends in .jsonl, .ndjson, .parquet or .txt"
    return "there is no such file" + ("" if path.is_absolute() else f" in {Path.cwd()}, where the command runs")


def local_matches(path: Path) -> list[str]:
    """What a path or glob of this machine names, in sorted order, among it what cannot be read."""
    if os.path.lexists(path) and not path.is_dir():
        return [str(path)]
    pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
    matches = sorted(match for match in glob.glob(pattern, recursive=True) if not Path(match).is_dir())
    return _data_files(matches, str(path)) if path.is_dir() else matches


def _remote_files(pattern: str) -> list[str]:
    files, path = remote.filesystem(pattern)
    files.invalidate_cache()
    try:
        if re.search(r"[*[]" if remote.is_http(pattern) else r"[*?[]", path):
            found = files.glob(path, detail=True, on_error="raise")  # else a folder that fails is passed over
            matches = [match for match, details in found.items() if details["type"] == "file"]
        elif _is_folder(remote.info(pattern), pattern):
            root = path.rstrip("/") + "/"
            found = files.find(root, on_error="raise")
            shown = [match for match in found if not _is_hidden(match.removeprefix(root))]
            matches = _data_files(shown, pattern.rstrip("/"))
        else:
            return [pattern]
    except Exception as error:  # every file system has errors of its own
        raise UsageError(f"it cannot be read: {remote.reason(error)}") from None
    return sorted(files.unstrip_protocol(match) for match in matches)


def _is_folder(details: dict[str, object], location: str) -> bool:
    """Whether the location is a folder; over HTTP, a page of links whose name has none of our extensions."""
    is_page = details.get("mimetype") == "text/html" and not name(location).endswith((*ROWS, *TEXTS))
    return is_page or details["type"] == "directory"


def is_text(location: str) -> bool:
    """Whether its name is that of a text, packed or not."""
    return name(location).lower().endswith(TEXTS)


def _hub_files(pattern: str) -> list[str]:
    dataset = remote.parse(pattern)
    commit, files = remote.listing(dataset.repo, dataset.revision)
    matches = _matching(files, dataset.path, pattern.rstrip("/"))
    if not matches:
        raise UsageError(
            f"there is no such file: {dataset.repo} holds {first_of(sorted(files), 5) or 'nothing'}; name some that end in "
            f"{', '.join(LINES)} (packed or not) or .parquet, or try hf://{dataset.repo}@refs/convert/parquet"
        )
    return [f"{remote.PREFIX}{dataset.repo}@{commit}/{match}" for match in sorted(matches)]


def _matching(files: Sequence[str], path: str, location: str) -> list[str]:
    if path in files:
        return [path]
    if any(sign in path for sign in "*?["):
        from fsspec.utils import glob_translate

        return list(filter(re.compile(glob_translate(path)).match, files))
    shown = [file for file in files if not _is_hidden(file)]
    if path:
        return _data_files([file for file in shown if file.startswith(f"{path}/")], location)
    below = [file for file in shown if file.endswith(ROWS)]  # the texts of a whole repository are notes and vocabularies
    return [file for file in below if _TRAIN.search(file)] or below


def _data_files(paths: Sequence[str], folder: str) -> list[str]:
    """The data files of a folder: files of rows, or, if there are none, texts. Files that look like data and are left out
    are logged."""
    rows = [path for path in paths if path.endswith(ROWS)]
    for ending in (*(TEXTS if rows else ()), *TABLES):
        if count := sum(path.endswith(ending) for path in paths):
            _log_left_out(redact.url(folder), ending, count)
    return rows or [path for path in paths if path.endswith(TEXTS)]


@cache  # a run looks a folder up several times
def _log_left_out(folder: str, ending: str, count: int) -> None:
    log.warning("left out of %s: %d files that end in %s; name %s/*%s too", folder, count, ending, folder, ending)


def _is_hidden(path: str) -> bool:
    return any(segment.startswith(".") for segment in path.split("/"))
