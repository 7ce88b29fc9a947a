"""Files behind a URL, through fsspec, and data sets on the Hugging Face Hub."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ttrain.core import redact
from ttrain.core.files import JsonDict
from ttrain.core.hashing import digest_of
from ttrain.core.text import first_line
from ttrain.errors import CannotRead, UsageError

# Names that file systems give to identifiers of the bytes, and to times of change; in lower case,
# without - and _.
CHECKSUMS = (
    "etag", "md5hash", "contentmd5", "md5checksum", "contenthash", "digest", "crc32c", "sha", "versionid", "generation",
)  # fmt: skip
TIMES = ("lastmodified", "mtime", "modified", "updated", "modificationtime", "modify", "lastwritetime", "created")
RUNS_CODE = frozenset({"dask"})  # protocols whose servers are sent pickles, and answer with some
PREFIX = "hf://"
FORM = "write hf://owner/name, hf://owner/name@revision or hf://owner/name/path, where the path may be a glob"
# `datasets/` is how fsspec and pandas spell it. Revisions with a slash are those of converted files and of pull requests.
_LOCATION = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.DOTALL)


def is_http(location: str) -> bool:
    """Whether the protocol is HTTP, whose URLs have queries."""
    return location.lower().startswith(("http://", "https://"))


def options(location: str) -> JsonDict:
    """Options of fsspec for a URL: over HTTP the proxy that the environment names."""
    return {"client_kwargs": {"trust_env": True}} if is_http(location) else {}


def filesystem(location: str) -> tuple[Any, str]:
    """(the file system, the path there).

    Raises UsageError if the protocol is unknown, refused, or lacks its package.
    """
    from fsspec.core import url_to_fs

    for link in location.split("::"):
        protocol = link.partition(":")[0].lower()
        if protocol in RUNS_CODE:
            raise UsageError(f"{protocol}:// is refused, since its servers may run code here; name the files themselves")
    try:
        files, path = url_to_fs(location, **options(location))
    except Exception as error:  # an unknown protocol, a missing package, or missing credentials of that package
        raise UsageError(f"cannot open {redact.url(location)}: {reason(error)}") from None
    return files, path


def open_file(location: str) -> Any:
    """Open the stored bytes of a file behind a URL."""
    files, path = filesystem(location)
    return files.open(path, "rb")


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


def reason(error: BaseException) -> str:
    """A one-line message for the error, without secrets of URLs.

    fsspec reports any error of an HTTP server as a missing file, with the true one as its cause.
    """
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    if isinstance(error, FileNotFoundError) and cause is None:
        return "there is no such file"
    return redact.text(first_line(cause or error))


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

    Raises UsageError if the Hub does not answer with it.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(repo, revision=revision)
    except Exception as error:  # of the network, of the Hub, of the name
        raise UsageError(
            f"the Hub shows no data set {repo}{f'@{revision}' if revision else ''}: {reason(error)}; correct it, "
            f"log in with `hf auth login`, or fetch it elsewhere with `hf download --repo-type dataset {repo}` "
            "and name the folder"
        ) from None
    return str(found.sha), tuple(file.rfilename for file in found.siblings or ())


def fetch(location: str) -> Path:
    """Local path of a pinned file, downloaded into the cache if missing. Raises CannotRead if it cannot be fetched."""
    from huggingface_hub import hf_hub_download

    hub = parse(location)
    try:
        return Path(hf_hub_download(hub.repo, hub.path, repo_type="dataset", revision=hub.revision))
    except Exception as error:  # of the network, of the Hub
        raise CannotRead(
            f"cannot read {location}, which is not in the cache of the Hub: {reason(error)}; connect to the Hub"
        ) from None
