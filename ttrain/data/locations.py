"""Resolve the inputs that a setting names: local files, URLs, data sets on the Hub.

The planner imports this module, so fsspec and the Hub are imported only when needed.
"""

import glob
import logging
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from ttrain.core import redact
from ttrain.core.files import user_path
from ttrain.core.hashing import digest_of
from ttrain.core.text import first_line, first_of
from ttrain.errors import UsageError

LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst", ".bz2", ".xz")
# Of many records.
ROWS = (*LINES, *(kind + packed for kind in LINES for packed in PACKED), ".parquet")
TEXTS = (".txt", *(".txt" + packed for packed in PACKED))  # of one document each
TABLES = (".json", ".csv", ".tsv")  # read only if they are named explicitly
LOCAL = ("file://", "local://")
HUB = "hf://"
HTTP = ("http://", "https://")
# What file systems tell of the bytes of a file, the surest first.
MARKS = (
    "etag",
    "md5|hash|digest|crc|sha",
    "version|generation",
    "modif|mtime|updated|write|created",
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# `datasets/` is how fsspec and pandas spell it. Revisions with a slash are those of converted files
# and of pull requests.
_HUB = re.compile(
    r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?",
    re.DOTALL,
)
# How the Hub finds the split of a file in its path: the word between separators or digits, so that
# "constraints" is none.
_TRAIN = re.compile(r"(?:^|[-._ 0-9/])train(?:ing)?(?:[-._ 0-9/]|$)")

log = logging.getLogger("ttrain")


def is_remote(location: str) -> bool:
    """Whether the location is a URL or on the Hub."""
    return bool(_URL.match(location)) and not location.startswith(LOCAL)


def local_path(location: str) -> Path:
    """The path of a local location; `~` is the user's home."""
    for protocol in LOCAL:
        location = location.removeprefix(protocol)
    return user_path(location)


def name(location: str) -> str:
    """The last part of the path, for messages."""
    location = redact.url(location)
    if _is_http(location):
        location = unquote(re.split("[?#]", location)[0])
    return PurePosixPath(location).name


def is_text(location: str) -> bool:
    """Whether its name is that of a text, packed or not."""
    return name(location).lower().endswith(TEXTS)


def _is_http(location: str) -> bool:
    return location.lower().startswith(HTTP)


def version(location: str) -> str | None:
    """An identifier of the bytes behind a URL, without reading them; None for a local file.

    Takes what `expand` returned. Raises UsageError if the server gives nothing that shows a change.
    """
    if not is_remote(location):
        return None
    if location.startswith(HUB):
        return location
    files, path = filesystem(location)
    try:
        files.invalidate_cache()
        details = files.info(path)
    except Exception as error:  # every file system has errors of its own
        raise UsageError(f"cannot read {redact.url(location)}: {reason(error)}") from None
    # One mark: an object that is only touched has the ETag that it had, with a new date.
    names = {name.lower(): name for name, value in details.items() if value}
    mark = next((names[n] for mark in MARKS for n in names if re.search(mark, n)), None)
    if mark is None:
        raise UsageError(
            f"cannot detect changes of {redact.url(location)}: its server gives no ETag, checksum "
            "or date; download it and name the file"
        )
    # The location counts too, without a signature that is renewed: an ETag is unique there only
    # (nginx makes it from time and size).
    return digest_of(
        [redact.without_signature(location), mark, str(details[mark]), details.get("size")]
    )


def expand(patterns: Sequence[str], setting: str) -> list[str]:
    """Files that the patterns name, each once, in sorted order: a file, a glob, a folder or a URL.

    A folder means its files that end as in `ROWS`, or, if it has none, as in `TEXTS`.
    `hf://owner/name[@revision][/path or glob]` means, without a path, the training split, pinned to
    a commit. Raises UsageError if a pattern matches nothing, or a file that cannot be read.
    """
    paths: dict[str, None] = {}
    for pattern in patterns:
        shown = redact.url(pattern)
        if redact.is_hidden(pattern):
            raise UsageError(
                f"{setting} is '{shown}', a URL as runs record it, without its secrets; "
                f"give it in full, with {setting}=URL, or "
                f"TTRAIN__{setting.upper().replace('.', '__')} in the environment"
            )
        try:
            if is_remote(pattern):
                find = hub_matches if pattern.startswith(HUB) else remote_matches
                matches = find(pattern)
            else:
                matches = local_matches(local_path(pattern))
            if not matches:
                raise UsageError(
                    f"{_missing(pattern)}; name a .jsonl, .parquet or .txt file, a glob or a "
                    "folder (commas separate several)"
                )
        except UsageError as error:
            raise UsageError(f"{setting} is '{shown}' but {error}") from None
        paths.update(dict.fromkeys(matches))
    return list(paths)


def _missing(pattern: str) -> str:
    if is_remote(pattern):
        return "there is no such file"
    path = local_path(pattern)
    if path.is_dir():
        return "no file in that folder ends in .jsonl, .ndjson, .parquet or .txt"
    return "there is no such file" + (
        "" if path.is_absolute() else f" in {Path.cwd()}, where the command runs"
    )


def local_matches(path: Path) -> list[str]:
    """What a local path or glob names, in sorted order, also files that cannot be read."""
    if os.path.lexists(path) and not path.is_dir():
        return [str(path)]
    pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
    matches = sorted(
        match for match in glob.glob(pattern, recursive=True) if not Path(match).is_dir()
    )
    return _data_files(matches, str(path)) if path.is_dir() else matches


def _data_files(paths: Sequence[str], folder: str) -> list[str]:
    # A licence or a note beside rows is not read as a document.
    rows = [path for path in paths if path.endswith(ROWS)]
    data = rows or [path for path in paths if path.endswith(TEXTS)]
    left_out = [path for path in paths if path.endswith((*TABLES, *(TEXTS if rows else ())))]
    if left_out:
        _log_left_out(redact.url(folder), first_of(map(name, left_out), 3))
    return data


@cache  # a run looks a folder up several times
def _log_left_out(folder: str, names: str) -> None:
    log.warning("left out of %s: %s; name them, or a glob, to read them too", folder, names)


def _is_hidden(path: str) -> bool:
    return any(segment.startswith(".") for segment in path.split("/"))


# --- URLs


def filesystem(location: str) -> tuple[Any, str]:
    """(the file system, the path there).

    Raises UsageError if the protocol is unknown, refused, or lacks its package.
    """
    from fsspec.core import url_to_fs

    # A link of a chain may be a bare protocol.
    if any(link.partition(":")[0].lower() == "dask" for link in location.split("::")):
        raise UsageError(
            "dask:// is refused, since its servers may run code here; name the files themselves"
        )
    options = {"client_kwargs": {"trust_env": True}} if _is_http(location) else {}  # the proxy
    try:
        files, path = url_to_fs(location, **options)
    except Exception as error:  # also missing credentials of that package
        raise UsageError(f"cannot open {redact.url(location)}: {reason(error)}") from None
    return files, path


def remote_matches(pattern: str) -> list[str]:
    """What a URL, a glob of URLs or the URL of a folder names. Raises UsageError."""
    files, path = filesystem(pattern)
    try:
        files.invalidate_cache()
        if re.search(r"[*[]" if _is_http(pattern) else r"[*?[]", path):
            # Without on_error a folder that fails is passed over.
            details = files.glob(path, detail=True, on_error="raise")
            matches = [match for match, info in details.items() if info["type"] == "file"]
        elif files.info(path)["type"] == "directory":
            root = path.rstrip("/") + "/"
            paths = files.find(root, on_error="raise")
            shown = [match for match in paths if not _is_hidden(match.removeprefix(root))]
            matches = _data_files(shown, pattern.rstrip("/"))
        else:
            return [pattern]
    except Exception as error:  # every file system has errors of its own
        raise UsageError(f"it cannot be read: {reason(error)}") from None
    return sorted(files.unstrip_protocol(match) for match in matches)


def reason(error: BaseException) -> str:
    """A one-line message for the error."""
    # fsspec reports any error of an HTTP server as a missing file, with the true one as its cause.
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
    # aiohttp's has the secrets of the URL.
    return first_line(cause).partition(", url=")[0] if cause else "there is no such file"


# --- data sets on the Hub


def _hub_parts(location: str) -> tuple[str, str | None, str]:
    match = _HUB.fullmatch(location)
    if match is None:
        raise UsageError(
            "it is not the name of a data set on the Hub; write hf://owner/name, "
            "hf://owner/name@revision or hf://owner/name/path, where the path may be a glob"
        )
    repo, revision, path = match.groups()
    return repo, unquote(revision) if revision else None, (path or "").strip("/")


@cache
def listing(repo: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    """(commit, paths of all its files), requested once per process."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(repo, revision=revision)
    except Exception as error:  # of the network, of the Hub, of the name
        raise UsageError(
            f"the Hub shows no data set {repo}{f'@{revision}' if revision else ''}: "
            f"{reason(error)}; correct it, log in with `hf auth login`, or fetch it elsewhere with "
            f"`hf download --repo-type dataset {repo}` and name the folder"
        ) from None
    return str(info.sha), tuple(file.rfilename for file in info.siblings or ())


def hub_matches(pattern: str) -> list[str]:
    """What a name on the Hub means, each file pinned to a commit. Raises UsageError."""
    repo, revision, path = _hub_parts(pattern)
    commit, files = listing(repo, revision)
    shown = [file for file in files if not _is_hidden(file)]
    if path in files:
        matches = [path]
    elif any(sign in path for sign in "*?["):
        from fsspec.utils import glob_translate

        matches = list(filter(re.compile(glob_translate(path)).match, files))
    elif path:
        matches = _data_files(
            [file for file in shown if file.startswith(f"{path}/")], pattern.rstrip("/")
        )
    else:  # the texts of a whole repository are notes and vocabularies
        rows = [file for file in shown if file.endswith(ROWS)]
        matches = [file for file in rows if _TRAIN.search(file)] or rows
    if not matches:
        raise UsageError(
            f"there is no such file: {repo} holds {first_of(sorted(files), 5) or 'nothing'}; "
            f"name some that end in {', '.join(LINES)} (packed or not) or .parquet, "
            f"or try hf://{repo}@refs/convert/parquet"
        )
    return [f"{HUB}{repo}@{commit}/{match}" for match in sorted(matches)]


def fetch(location: str) -> Path:
    """Local path of a pinned file, downloaded into the cache if missing."""
    from huggingface_hub import hf_hub_download

    repo, revision, path = _hub_parts(location)
    return Path(hf_hub_download(repo, path, repo_type="dataset", revision=revision))
