"""Read files behind a URL through fsspec: resume after a broken connection, and detect changes by version."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from ttrain.core import redact
from ttrain.core.files import JsonDict, read_json, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.text import first_line
from ttrain.errors import CannotRead, DataError, TTrainError, UsageError

T = TypeVar("T")

PAUSES_SECONDS = (1.0, 2.0, 4.0)

CONNECT_SECONDS, SILENCE_SECONDS = 20, 60  # aiohttp itself would end any download after 300 s

TRANSIENT_STATUS = (408, 425, 429)  # timeout, too early, too many requests; and every 5xx
# Names that file systems give to identifiers of the bytes, and to times of change; in lower case, without - and _.
CHECKSUMS = (
    "etag", "md5hash", "contentmd5", "md5checksum", "contenthash", "digest", "crc32c", "sha", "versionid", "generation",
)  # fmt: skip

TIMES = ("lastmodified", "mtime", "modified", "updated", "modificationtime", "modify", "lastwritetime", "created")

_PERMANENT_ERRORS = (
    TTrainError, FileNotFoundError, PermissionError, IsADirectoryError,
    ImportError, ValueError, TypeError, NotImplementedError,
)  # fmt: skip

RUNS_CODE = frozenset({"dask"})  # protocols whose servers are sent pickles, and answer with some


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

        # The bytes as they are stored: a server's own compression would count neither in its ranges nor in its ETag.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        client = {"timeout": timeout, "auto_decompress": False, "trust_env": True}
        options = {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
    try:
        files, path = url_to_fs(location, **options)
    except Exception as error:  # an unknown protocol, a missing package, or missing credentials of that package
        raise UsageError(f"cannot open {redact.url(location)}: {reason(error)}") from None
    return files, path


def info(location: str) -> JsonDict:
    """Current details of a file, not from the file system's cache. Raises its errors, such as FileNotFoundError."""
    files, path = filesystem(location)

    def ask() -> JsonDict:
        files.invalidate_cache()
        return dict(files.info(path))

    return retried(ask)


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


def retried(call: Callable[[], T]) -> T:
    """The call's result; after a transient error it is retried after each of `PAUSES_SECONDS`."""
    pauses = iter(PAUSES_SECONDS)
    while True:
        try:
            return call()
        except Exception as error:  # every file system has errors of its own
            # fsspec reports any error of an HTTP server as a missing file, with the true one as its cause.
            cause, pause = error.__cause__, next(pauses, None)
            real = cause if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) else error
            if pause is None or not _is_transient(real):
                raise real from None
        time.sleep(pause)


def status_of(error: BaseException) -> int | None:
    """The HTTP status of a server's error response, if there was one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def reason(error: BaseException) -> str:
    """A one-line message for the error, without secrets of URLs."""
    if is_missing(error):
        return "there is no such file"
    if status_of(error) and hasattr(error, "message"):
        return redact.text(f"its server says {status_of(error)} {error.message}")
    return redact.text(first_line(error))


def is_missing(error: BaseException) -> bool:
    """Whether the error says that there is no such file."""
    return isinstance(error, FileNotFoundError) or status_of(error) in (404, 410)


def _is_transient(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in TRANSIENT_STATUS
    return not isinstance(error, _PERMANENT_ERRORS)


class RemoteFile(io.RawIOBase):
    """A remote file, resumed after a broken connection; over HTTP read by one request until something seeks.

    With `in_parts`, only the requested bytes are read, nothing ahead. Reading raises DataError, which names the location.
    """

    def __init__(self, location: str, *, in_parts: bool = False) -> None:
        self._location, self._shown = location, redact.url(location)
        self._files, self._path = filesystem(location)
        details = self._with_data_errors(lambda: info(location))
        if details.get("type") == "directory":
            raise CannotRead(f"cannot read {self._shown}: it is a folder, not a file")
        self._size: int | None = details.get("size")
        self._version = version_in(details, location)
        self._position = 0
        self._file: Any = None
        self._was_open = False
        self._in_parts = in_parts
        self._front_to_back = is_http(location) and not in_parts

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size is None:
            raise CannotRead(f"cannot read {self._shown}: its server does not report its size; download it first")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size or 0}[whence]
        if base + offset != self._position and self._front_to_back:
            self._front_to_back = False
            self._close_file()
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._with_data_errors(lambda: retried(lambda: self._read(len(buffer))))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._close_file()
        super().close()

    def _with_data_errors(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except TTrainError:
            raise
        except Exception as error:
            raise CannotRead(f"cannot read {self._shown}: {reason(error)}") from None

    def _read(self, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = self._stream() if self._front_to_back else self._opened()
            if not self._front_to_back:
                self._file.seek(self._position)
            return bytes(self._file.read(size))
        except ValueError:  # fsspec's error for a server that always answers with the whole file
            raise CannotRead(f"cannot read {self._shown}: its server gives whole files only; download it first") from None
        except Exception:
            self._close_file()
            raise

    def _opened(self) -> Any:
        self._check_version()
        return self._files.open(self._path, "rb", **({"cache_type": "none"} if self._in_parts else {}))

    def _stream(self) -> Any:
        """Open the rest of the file as one response, also if the server does not support ranges."""
        self._check_version()
        range_options = (
            {"headers": {**self._files.kwargs["headers"], "Range": f"bytes={self._position}-"}} if self._position else {}
        )
        size = self._size or 1  # any number, so that fsspec does not request it again
        file = self._files.open(self._path, "rb", block_size=0, size=size, **range_options)
        missing = self._position if file.r.status != 206 else 0
        while missing and (data := file.read(min(missing, io.DEFAULT_BUFFER_SIZE))):
            missing -= len(data)
        return file

    def _check_version(self) -> None:
        if self._was_open and version_in(info(self._location), self._location) != self._version:
            raise CannotRead(f"{self._shown} changed while it was read; run the same command again")
        self._was_open = True

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


PREFIX = "hf://"

TIMEOUT_SECONDS = 10.0

FORM = "write hf://owner/name, hf://owner/name@revision or hf://owner/name/path, where the path may be a glob"
# `datasets/` is how fsspec and pandas spell it. Revisions with a slash are those of converted files and of pull requests.
_LOCATION = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.DOTALL)

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubLocation:
    """A parsed `hf://` location. An empty path is the whole data set; no revision is its main branch."""

    repo: str
    revision: str | None
    path: str

    @property
    def is_pinned(self) -> bool:
        """Whether the location is one file of one commit, which never changes."""
        return bool(self.path and self.revision and _COMMIT.fullmatch(self.revision))


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
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi()
    try:
        commit = str(api.dataset_info(repo, revision=revision, timeout=TIMEOUT_SECONDS).sha)
        files = tuple(api.list_repo_files(repo, repo_type="dataset", revision=commit))
    except GatedRepoError:
        raise UsageError(
            f"{repo} is gated; accept its conditions at {api.endpoint}/datasets/{repo} and log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise UsageError(f"the Hub shows no data set {repo}; correct its name, or log in with `hf auth login`") from None
    except RevisionNotFoundError:
        raise UsageError(f"{repo} has no branch, tag or commit '{revision}'; correct it, or leave it out") from None
    except HFValidationError:
        raise UsageError(f"the Hub does not allow this name; {FORM}") from None
    except Exception as error:  # of requests, httpx or httpx2, by version; or invalid JSON from a captive portal
        if 400 <= (status_of(error) or 500) < 500:
            raise UsageError(f"the Hub refuses {repo}: {reason(error)}") from None
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
    from huggingface_hub.errors import LocalEntryNotFoundError

    hub_location = parse(location)
    assert hub_location.is_pinned, f"{location} is not a pinned file: what names inputs goes through locations.expand"

    def download() -> str:
        try:
            return str(
                hf_hub_download(hub_location.repo, hub_location.path, repo_type="dataset", revision=hub_location.revision)
            )
        except LocalEntryNotFoundError as error:  # the library has retried by itself, unless it is configured not to
            cause = error.__cause__ or error
            download_arguments = f"{hub_location.repo} {hub_location.path} --revision {hub_location.revision}"
            raise CannotRead(
                f"cannot read {location}: it is not in the cache of the Hub, which cannot be reached ({reason(cause)}); "
                f"connect, unset HF_HUB_OFFLINE, or run `hf download --repo-type dataset {download_arguments}`"
            ) from None

    try:
        return Path(retried(download))
    except DataError:
        raise
    except Exception as error:
        raise CannotRead(f"cannot read {location}: {reason(error)}") from None


def _cached_listing(repo: str, revision: str | None) -> tuple[str, tuple[str, ...]] | None:
    """(commit, paths) from the cache: the stored listing of the commit, else the files that are in the cache."""
    ref = _folder(repo) / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
    if not _COMMIT.fullmatch(commit):
        return None
    snapshot = _folder(repo) / "snapshots" / commit
    lying = (path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if not path.is_dir())
    files = read_json(_listing_path(repo, commit)) or sorted(lying)
    return (commit, tuple(files)) if files else None


def _cache_listing(repo: str, revision: str | None, commit: str, files: tuple[str, ...]) -> None:
    """Store the commit of the revision and its listing in the cache, for use without a network.

    A download by commit stores no listing, so a partly downloaded commit would be taken for complete.
    """
    ref, listing_path = _folder(repo) / "refs" / (revision or "main"), _listing_path(repo, commit)
    try:
        listing_path.parent.mkdir(parents=True, exist_ok=True)
        write_json(listing_path, files)
        if revision != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit, encoding="utf-8")
    except OSError:
        return  # a shared read-only cache works too


def _listing_path(repo: str, commit: str) -> Path:
    return _folder(repo) / "ttrain" / f"{commit}.json"


def _folder(repo: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}"
