"""What a setting names as input: local files, URLs that fsspec opens, and data sets on the Hugging Face Hub.

Asked by the planner, so nothing of fsspec or the Hub is imported before such a location is named.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from ttrain.core import redact
from ttrain.data import hub, remote
from ttrain.errors import UsageError

LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst", ".bz2", ".xz")
ROWS = (*LINES, *(kind + packed for kind in LINES for packed in PACKED), ".parquet")  # files of many records
TEXTS = (".txt", *(".txt" + packed for packed in PACKED))  # of one document each
TABLES = (".json", ".csv", ".tsv")  # read only where they are named
LOCAL = ("file://", "local://")
KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# How the Hub finds the split of a file in its path: the word between separators or digits, so that "constraints" is none.
_TRAIN = re.compile(r"(?:^|[-._ 0-9/])train(?:ing)?(?:[-._ 0-9/]|$)")


log = logging.getLogger("ttrain")
_logged: set[str] = set()


def is_remote(location: str) -> bool:
    """Whether it is a URL or lies on the Hub, instead of on this machine."""
    return bool(_URL.match(location)) and not location.startswith(LOCAL)


def local_path(location: str) -> Path:
    """The path of a local location; `~` is the user's home."""
    for protocol in LOCAL:
        location = location.removeprefix(protocol)
    return Path(location).expanduser()


def name(location: str) -> str:
    """The last part of the path, for messages."""
    location = redact.url(location)
    if remote.is_http(location):
        location = unquote(re.split("[?#]", location)[0])
    return PurePosixPath(location).name


def version(location: str) -> str | None:
    """What identifies the bytes behind a URL without reading them; None for a local file, whose bytes are at hand.

    Takes a location that `expand` returned. UsageError where the server says nothing that could tell a change.
    """
    if not is_remote(location):
        return None
    if location.startswith(hub.PREFIX):
        assert hub.parse(location).is_pinned, f"{location} is not a pinned file"
        return location
    try:
        found = remote.version_in(remote.info(location), location)
    except UsageError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise UsageError(f"cannot read {redact.url(location)}: {remote.reason(error)}") from None
    if found is None:
        raise UsageError(
            f"cannot tell {redact.url(location)} from a later version of it: its server gives no ETag, checksum or date; "
            "download it and name the file"
        )
    return found


def expand(patterns: Sequence[str], setting: str) -> list[str]:
    """Files that the patterns name, each once: a file, a glob, or a folder, in sorted order.

    A folder stands for its files that end as `ROWS`; where it has none, for those that end as `TEXTS`, so that a licence
    or a note beside the data is no document.
    A pattern may be a URL, or `hf://owner/name[@revision][/path or glob]`: without a path the training split, always pinned
    to a commit. UsageError where a pattern names nothing, or what cannot be read.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        shown = redact.url(pattern)
        if redact.is_hidden(pattern):
            raise UsageError(
                f"{setting} is '{shown}', as records show it: the secrets of a URL are not on record; "
                f"give it again in full, with {_how_to_set(setting)}"
            )
        try:
            if not is_remote(pattern):
                matches = _local(pattern)
            elif pattern.startswith(hub.PREFIX):
                matches = _on_the_hub(pattern)
            else:
                matches = _behind_url(pattern)
        except UsageError as error:
            raise UsageError(f"{setting} is '{shown}' but {error}") from None
        if not matches:
            raise UsageError(
                f"{setting} is '{shown}' but {_missing(pattern)}; name a .jsonl, .parquet or .txt file, a glob or a "
                "folder (commas separate several)"
            )
        for match in matches:
            if not match.isascii() and match != match.encode("utf-8", "replace").decode("utf-8"):
                raise UsageError(f"{setting} names the file {match!r}, whose name is not UTF-8; rename it")
        found.update(dict.fromkeys(matches))
    return list(found)


def _how_to_set(setting: str) -> str:
    """What a user writes to give a setting its value, or an argument."""
    if "." not in setting:
        return f"the whole URL as {setting}"
    return f"{setting}=URL, or TTRAIN__{setting.upper().replace('.', '__')} in the environment"


def _missing(pattern: str) -> str:
    """Why a pattern names nothing."""
    if is_remote(pattern):
        return "there is no such file"
    path = local_path(pattern)
    if path.is_dir():
        return "no file in that folder ends in .jsonl, .ndjson, .parquet or .txt"
    return "there is no such file" + ("" if path.is_absolute() else f" in {Path.cwd()}")


def _local(pattern: str) -> list[str]:
    path = local_path(pattern)
    if path.is_dir():
        matches = sorted(_in_folder(path))
    elif os.path.lexists(path):
        matches = [str(path)]
    else:
        matches = sorted(match for match in glob.glob(str(path), recursive=True) if not Path(match).is_dir())
    for match in matches:
        _check_regular(match)
    return matches


def _in_folder(root: Path) -> list[str]:
    """Data files below a folder, through links too, each folder once; hidden ones are left out, as a shell's globs do."""

    def fail(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}")

    found, seen = [], set()
    for directory, folders, files in os.walk(root, onerror=fail, followlinks=True):
        real = os.path.realpath(directory)
        folders[:] = [] if real in seen else sorted(folder for folder in folders if not folder.startswith("."))
        if real not in seen:
            found += [str(Path(directory) / file) for file in files if not file.startswith(".")]
        seen.add(real)
    return _data_files(found, str(root))


def _check_regular(path: str) -> None:
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        raise UsageError(f"{path} is {kind}, which cannot be read twice; write what it gives to a file and name that")


def _behind_url(pattern: str) -> list[str]:
    files, path = remote.filesystem(pattern)
    magic = re.search(r"[*[]" if remote.is_http(pattern) else r"[*?[]", path)
    files.invalidate_cache()
    try:
        if magic:
            root = path[: path.rfind("/", 0, magic.start()) + 1]
            depth = None if "**" in path else path[len(root) :].count("/") + 1
            wanted = _glob(path)
            matches = [match for match in remote.retried(lambda: _listed(files, root, depth)) if wanted.match(match)]
        elif _is_folder(remote.info(pattern), pattern):
            root = path.rstrip("/") + "/"
            listed = remote.retried(lambda: _listed(files, root, None))
            shown = [match for match in listed if not _is_hidden(match.removeprefix(root))]
            matches = _data_files(shown, pattern.rstrip("/"))
        else:
            return [pattern]
    except Exception as error:  # every file system has errors of its own
        if remote.is_missing(error):
            return []
        raise UsageError(f"it cannot be read: {remote.reason(error)}") from None
    return sorted(files.unstrip_protocol(match) for match in matches)


def _listed(files: Any, folder: str, depth: int | None) -> list[str]:
    """All files below a folder. fsspec's own `find` and `glob` pass over a folder that fails, and would give less data."""
    found: list[str] = []
    for details in files.ls(folder, detail=True):
        if details["type"] != "directory":
            found.append(details["name"])
        elif depth is None or depth > 1:
            found += _listed(files, details["name"], depth and depth - 1)
    return found


def _glob(pattern: str) -> re.Pattern[str]:
    from fsspec.utils import glob_translate

    return re.compile(glob_translate(pattern))


def _is_folder(details: dict[str, object], location: str) -> bool:
    """Over HTTP a folder is a page with links, and the name of none of our files."""
    is_page = details.get("mimetype") == "text/html" and not name(location).endswith((*ROWS, *TEXTS))
    return is_page or details["type"] == "directory"


def _on_the_hub(pattern: str) -> list[str]:
    named = hub.parse(pattern)
    commit, files = hub.listing(named.repo, named.revision)
    matches = _matching(files, named.path, pattern.rstrip("/"))
    if not matches:
        shown = ", ".join(sorted(files)[:5]) or "nothing"
        raise UsageError(
            f"there is no such file: {named.repo} holds {shown}{', ...' if len(files) > 5 else ''}; name some that end in "
            f"{', '.join(LINES)} (packed or not) or .parquet, or try hf://{named.repo}@refs/convert/parquet"
        )
    return [f"{hub.PREFIX}{named.repo}@{commit}/{match}" for match in sorted(matches)]


def _matching(files: Sequence[str], path: str, location: str) -> list[str]:
    if path in files:
        return [path]
    if any(sign in path for sign in "*?["):
        return [file for file in files if _glob(path).match(file)]
    shown = [file for file in files if not _is_hidden(file)]
    if path:
        return _data_files([file for file in shown if file.startswith(f"{path}/")], location)
    below = [file for file in shown if file.endswith(ROWS)]  # the texts of a whole repository are notes and vocabularies
    return [file for file in below if _TRAIN.search(file)] or below


def _data_files(paths: Sequence[str], folder: str) -> list[str]:
    """Of the files of a folder those that hold data: rows, or, where no file has any, texts. What looks like data and is
    left out is logged."""
    rows = [path for path in paths if path.endswith(ROWS)]
    texts = [path for path in paths if path.endswith(TEXTS)]
    _log_left_out([path for path in paths if path.endswith((*TABLES, *(TEXTS if rows else ())))], folder)
    return rows or texts


def _log_left_out(paths: Sequence[str], folder: str) -> None:
    """A line with the numbers of files by their endings, once for a folder, which a run looks up several times."""
    endings = Counter(next(ending for ending in (*TEXTS, *TABLES) if path.endswith(ending)) for path in paths)
    if not endings:
        return
    shown = redact.url(folder)
    ordered = sorted(endings, key=(*TEXTS, *TABLES).index)
    counts = ", ".join(f"{endings[ending]} {ending}" for ending in ordered)
    line = f"left out of {shown}: {counts}; name {shown}/*{ordered[0]} too"
    if line not in _logged:
        _logged.add(line)
        log.warning("%s", line)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))
