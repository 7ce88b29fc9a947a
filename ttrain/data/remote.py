"""Files behind a URL, through fsspec, and data sets on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ttrain.core import redact
from ttrain.core.files import JsonDict, read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.text import first_line
from ttrain.errors import CannotRead, UsageError

SILENCE_SECONDS = 60  # aiohttp itself would end any download after 300 s
# Names that file systems give to identifiers of the bytes, and to times of change; in lower case,
# without - and _.
CHECKSUMS = (
    "etag", "md5hash", "contentmd5", "md5checksum", "contenthash", "digest", "crc32c", "sha", "versionid", "generation",
)  # fmt: skip
TIMES = ("lastmodified", "mtime", "modified", "updated", "modificationtime", "modify", "lastwritetime", "created")
RUNS_CODE = frozenset({"dask"})  # protocols whose servers are sent pickles, and answer with some
PREFIX = "hf://"
TIMEOUT_SECONDS = 10.0
FORM = "write hf://owner/name, hf://owner/name@revision or hf://owner/name/path, where the path may be a glob"
# `datasets/` is how fsspec and pandas spell it. Revisions with a slash are those of converted files and of pull requests.
_LOCATION = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.DOTALL)


def is_http(location: str) -> bool:
    """Whether the protocol is HTTP, whose URLs have queries and whose servers may give whole files only."""
    return location.lower().startswith(("http://", "https://"))


def filesystem(location: str) -> tuple[Any, str]:
    """(the file system, the path there). Raises UsageError if the protocol is unknown, refused, or lacks its package."""
    from fsspec.core import url_to_fs

    for link in location.split("::"):
        protocol = link.partition(":")[0].lower()
        if protocol in RUNS_CODE:
            raise UsageError(f"{protocol}:// is refused, since its servers may run code here; name the files themselves")
    options: JsonDict = {}
    if is_http(location):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
        # The bytes as they are stored: a server's own compression would not be in its ETag.
        client = {"timeout": timeout, "auto_decompress": False, "trust_env": True}
        options = {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
    try:
        files, path = url_to_fs(location, **options)
    except Exception as error:  # an unknown protocol, a missing package, or missing credentials of that package
        raise UsageError(f"cannot open {redact.url(location)}: {reason(error)}") from None
    return files, path


def open_file(location: str, *, in_parts: bool = False) -> Any:
    """Open a file behind a URL; over HTTP it comes as one response, unless it is read `in_parts`."""
    files, path = filesystem(location)
    one_response = {"block_size": 0} if is_http(location) and not in_parts else {}
    return files.open(path, "rb", **one_response)


def info(location: str) -> JsonDict:
    """Current details of a file, not from the file system's cache. Raises its errors, such as FileNotFoundError."""
    files, path = filesystem(location)
    files.invalidate_cache()
    return dict(files.info(path))


def version_in(details: JsonDict, location: str) -> str | None:
    """Digest that changes with the content of the file; None if the details have no checksum or time.

    The location is part of it, since an ETag is unique there only (nginx makes it from time and size). A renewed signature
    or password does not change the location.
    """
    values = {name.lower().replace("-", "").replace("_", ""): value for name, value in details.items() if value}
    size = values.get("size", 0)
    for name in (*CHECKSUMS, *TIMES):
        if name in values and (name in CHECKSUMS or size):
            return digest_of([redact.without_signature(location), name, str(values[name]), size])
    return None


def status_of(error: BaseException) -> int | None:
    """The HTTP status of a server's error response, if there was one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def reason(error: BaseException) -> str:
    """A one-line message for the error, without secrets of URLs."""
    if is_missing(error):
        return "there is no such file"
    real = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
    if status_of(real) and hasattr(real, "message"):
        return redact.text(f"its server says {status_of(real)} {real.message}")
    return redact.text(first_line(real))


def is_missing(error: BaseException) -> bool:
    """Whether the error says that there is no such file.

    fsspec reports any error of an HTTP server as a missing file, with the true one as its cause.
    """
    if isinstance(error, FileNotFoundError):
        return error.__cause__ is None or is_missing(error.__cause__)
    return status_of(error) in (404, 410)


class HubLocation(NamedTuple):
    """A parsed `hf://` location. An empty path is the whole data set; no revision is its main branch."""

    repo: str
    revision: str | None
    path: str


def parse(location: str) -> HubLocation:
    """Parse `hf://...`. Raises UsageError if it has another form."""
    match = _LOCATION.fullmatch(location)
    if match is None:
        raise UsageError(f"it is not the name of a data set on the Hub; {FORM}")
    repo, revision, path = match.groups()
    return HubLocation(repo, unquote(revision) if revision else None, (path or "").strip("/"))


@cache
def listing(repo: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    """(commit, paths of all its files), requested once per process, so that a whole run uses the same commit.

    If the Hub cannot be reached, taken from its cache. Raises UsageError if the cache lacks the revision too.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    try:
        commit = str(api.dataset_info(repo, revision=revision, timeout=TIMEOUT_SECONDS).sha)
        files = tuple(api.list_repo_files(repo, repo_type="dataset", revision=commit))
    except HFValidationError:
        raise UsageError(f"the Hub does not allow this name; {FORM}") from None
    except Exception as error:  # of requests, httpx or httpx2, by version; or invalid JSON from a captive portal
        if 400 <= (status_of(error) or 500) < 500:
            shown = " ".join(str(error).split())
            raise UsageError(
                f"the Hub shows no data set {repo}{f'@{revision}' if revision else ''}; correct it, or accept its "
                f"conditions at {api.endpoint}/datasets/{repo} and log in with `hf auth login`: {shown}"
            ) from None
        cached = _cached_listing(repo, revision)
        if cached is None:
            raise UsageError(
                f"the Hub cannot be reached ({reason(error)}) and its cache does not hold {repo}; "
                f"connect, or fetch it elsewhere with `hf download --repo-type dataset {repo}` and copy the cache"
            ) from None
        return cached
    _cache_listing(repo, revision, commit, files)
    return commit, files


def fetch(location: str) -> Path:
    """Local path of a pinned file, downloaded into the cache if missing. Raises DataError if it cannot be fetched."""
    from huggingface_hub import hf_hub_download

    hub = parse(location)
    try:
        return Path(hf_hub_download(hub.repo, hub.path, repo_type="dataset", revision=hub.revision))
    except Exception as error:
        command = f"hf download --repo-type dataset {hub.repo} {hub.path} --revision {hub.revision}"
        raise CannotRead(
            f"cannot read {location}, which is not in the cache of the Hub: {reason(error.__cause__ or error)}; "
            f"connect, unset HF_HUB_OFFLINE, or run `{command}`"
        ) from None


def _cached_listing(repo: str, revision: str | None) -> tuple[str, tuple[str, ...]] | None:
    """(commit, paths) from the cache: the stored listing, else the files that are in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if stored := read_object(_listing_path(repo, revision or "main")):
        return stored["commit"], tuple(stored["files"])
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return folder.name, tuple(sorted(files))


def _cache_listing(repo: str, revision: str | None, commit: str, files: tuple[str, ...]) -> None:
    """Store the listing in the Hub's cache, where a partly downloaded commit looks complete."""
    with contextlib.suppress(OSError):  # a shared read-only cache works too
        for name in (revision or "main", commit):
            path = _listing_path(repo, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"commit": commit, "files": files})


def _listing_path(repo: str, revision: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, f"datasets--{repo.replace('/', '--')}", "ttrain", f"{revision}.json")
