"""Files behind a URL, through fsspec: read on after a broken connection, and told from a later version of themselves."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ttrain.core import redact
from ttrain.core.hashing import digest_of
from ttrain.errors import DataError, TTrainError, UsageError

T = TypeVar("T")
PAUSES_SECONDS = (1.0, 2.0, 4.0)
CONNECT_SECONDS, SILENCE_SECONDS = 20, 60  # aiohttp itself would end a download after 300 s, however well it goes
PASSING_STATUS = (408, 425, 429)  # timeout, too early, too many requests; and every 5xx
# How file systems call what identifies the bytes, and when they last changed; in lower case, without - and _.
CHECKSUMS = (
    "etag", "md5hash", "contentmd5", "md5checksum", "contenthash", "digest", "crc32c", "sha", "versionid", "generation",
)  # fmt: skip
TIMES = ("lastmodified", "mtime", "modified", "updated", "modificationtime", "modify", "lastwritetime", "created")
_LASTING = (
    TTrainError, FileNotFoundError, PermissionError, IsADirectoryError,
    ImportError, ValueError, TypeError, NotImplementedError,
)  # fmt: skip


RUNS_CODE = frozenset({"dask"})  # protocols whose servers are sent pickles, and answer with some


def is_http(location: str) -> bool:
    """Whether the protocol is HTTP, whose URLs have queries and whose servers may give whole files only."""
    return location.lower().startswith(("http://", "https://"))


def filesystem(location: str) -> tuple[Any, str]:
    """(the file system, the path there). UsageError where the protocol is unknown, refused, or its package is missing."""
    from fsspec.core import url_to_fs

    for link in location.split("::"):
        protocol = link.partition(":")[0].lower()
        if protocol in RUNS_CODE:
            raise UsageError(f"{protocol}:// is refused, since its servers may run code here; name the files themselves")
    options: dict[str, Any] = {}
    if is_http(location):
        import aiohttp

        # The bytes as they are stored: what a server packs by itself would count neither in its ranges nor in its ETag.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        client = {"timeout": timeout, "auto_decompress": False, "trust_env": True}
        options = {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
    try:
        found: tuple[Any, str] = url_to_fs(location, **options)
    except Exception as error:  # an unknown protocol, a missing package, or missing credentials of that package
        raise UsageError(f"nothing can open {redact.url(location)}: {reason(error)}") from None
    return found


def info(location: str) -> dict[str, Any]:
    """What the file system tells about a file now, not from its memory. Raises its errors, FileNotFoundError among them."""
    files, path = filesystem(location)

    def ask() -> dict[str, Any]:
        files.invalidate_cache()
        return dict(files.info(path))

    return retried(ask)


def version_in(details: Mapping[str, Any], location: str) -> str | None:
    """Digest of what tells this file from a later one at the same place; None where the details hold no such thing.

    The place is part of it, since an ETag means something there only (nginx makes it of time and size). It is the same place
    after a signature or a password was renewed.
    """
    values = {name.lower().replace("-", "").replace("_", ""): value for name, value in details.items() if value}
    size = values.get("size", 0)
    for name in (*CHECKSUMS, *TIMES):
        if name in values and (name in CHECKSUMS or size):
            return digest_of([redact.without_signature(location), name, str(values[name]), size])
    return None


def retried(call: Callable[[], T]) -> T:
    """The call's result; it is made again after each of `PAUSES_SECONDS` where what went wrong may pass."""
    pauses = iter(PAUSES_SECONDS)
    while True:
        try:
            return call()
        except Exception as error:  # every file system has errors of its own
            real, pause = _real(error), next(pauses, None)
            if pause is None or not _may_pass(real):
                raise real from None
        time.sleep(pause)


def status_of(error: BaseException) -> int | None:
    """The HTTP status with which a server answered, where it did."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def reason(error: BaseException) -> str:
    """One line that says what went wrong, without the secrets of URLs in it."""
    if isinstance(error, FileNotFoundError) or status_of(error) in (404, 410):
        return "there is no such file"
    if status_of(error) and hasattr(error, "message"):
        return redact.text(f"its server says {status_of(error)} {error.message}")
    lines = str(error).strip().splitlines()
    return redact.text(lines[0]) if lines else type(error).__name__


def is_missing(error: BaseException) -> bool:
    """Whether the error says that there is no such file."""
    return isinstance(error, FileNotFoundError) or status_of(error) in (404, 410)


def _real(error: Exception) -> Exception:
    """fsspec calls a file missing whatever went wrong with an HTTP server, and keeps the true error as the cause."""
    hidden = isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception)
    return error.__cause__ if hidden else error  # type: ignore[return-value]


def _may_pass(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in PASSING_STATUS
    return not isinstance(error, _LASTING)


class RemoteFile(io.RawIOBase):
    """A remote file, taken up where its connection broke; over HTTP read by one request until something seeks.

    With `in_parts`, what is read is asked for and nothing ahead of it. Reading raises DataError, which names the location.
    """

    def __init__(self, location: str, *, in_parts: bool = False) -> None:
        self._location, self._shown = location, redact.url(location)
        self._files, self._path = filesystem(location)
        details = self._told(lambda: info(location))
        if details.get("type") == "directory":
            raise DataError(f"cannot read {redact.url(location)}: it is a folder, not a file")
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
            raise DataError(f"cannot read {self._shown}: its server does not tell its size; download it first")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size or 0}[whence]
        if base + offset != self._position and self._front_to_back:
            self._front_to_back = False
            self._let_go()
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._told(lambda: retried(lambda: self._read(len(buffer))))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._let_go()
        super().close()

    def _told(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except TTrainError:
            raise
        except Exception as error:
            raise DataError(f"cannot read {self._shown}: {reason(error)}") from None

    def _read(self, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = self._stream() if self._front_to_back else self._opened()
            if not self._front_to_back:
                self._file.seek(self._position)
            return bytes(self._file.read(size))
        except ValueError:  # so fsspec says that a server answers with the whole file, whatever part is asked for
            raise DataError(f"cannot read {self._shown}: its server gives whole files only; download it first") from None
        except Exception:
            self._let_go()
            raise

    def _opened(self) -> Any:
        self._check_it_is_the_same()
        return self._files.open(self._path, "rb", **({"cache_type": "none"} if self._in_parts else {}))

    def _stream(self) -> Any:
        """The rest of the file in one answer, whether or not the server can leave out what is read already."""
        self._check_it_is_the_same()
        rest = {"headers": {**self._files.kwargs["headers"], "Range": f"bytes={self._position}-"}} if self._position else {}
        size = self._size or 1  # any, so that it does not ask the server again
        file = self._files.open(self._path, "rb", block_size=0, size=size, **rest)
        missing = self._position if file.r.status != 206 else 0
        while missing and (data := file.read(min(missing, io.DEFAULT_BUFFER_SIZE))):
            missing -= len(data)
        return file

    def _check_it_is_the_same(self) -> None:
        if self._was_open and version_in(info(self._location), self._location) != self._version:
            raise DataError(f"{self._shown} changed while it was read; run the same command again")
        self._was_open = True

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
