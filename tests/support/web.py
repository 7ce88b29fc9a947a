"""Servers of this machine: files over HTTP with real servers' failures, and a Hugging Face Hub."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from support.chat_templates import CHATML, make

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Site:
    files: dict[str, bytes]
    etags: bool = True
    dates: bool = False
    statuses: list[int] = field(default_factory=list)  # errors that answer the next requests
    failing: str = ""  # a path that is always answered with 503
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # (method, path, range)
    url: str = ""


@dataclass
class FakeHub:
    """Repositories with their revisions: {repo: {revision: commit}} and {commit: {path: bytes}}."""

    repos: dict[str, dict[str, str]]
    commits: dict[str, dict[str, bytes]]
    site: Site = field(default_factory=lambda: Site({}))


class _Handler(BaseHTTPRequestHandler):
    site: ClassVar[Site]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.site.asked.append((self.command, path, self.headers.get("Range", "")))
        self._answer(path)

    do_HEAD = do_GET
    log_message = staticmethod(lambda *_: None)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a reader that has seen enough hangs up
            super().handle()

    def _answer(self, path: str) -> None:
        site = self.site
        if site.statuses or path == site.failing:
            self._send(site.statuses.pop(0) if site.statuses else 503)
        elif path.endswith("/"):
            below = [name[len(path) :] for name in site.files if name.startswith(path)]
            names = sorted({name.partition("/")[:2] for name in below})
            links = "".join(f'<a href="{name}{slash}">{name}</a>' for name, slash in names)
            self._send(200, links.encode(), {"Content-Type": "text/html"})
        elif any(name.startswith(f"{path}/") for name in site.files):
            self._send(301, headers={"Location": f"{path}/"})
        elif path in site.files:
            self._send_file(site.files[path])
        else:
            self._send(404)

    def _send_file(self, data: bytes) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {"ETag": f'"{hashlib.md5(data).hexdigest()}"'} if self.site.etags else {}
        headers |= {"Last-Modified": "Tue, 03 Mar 2026 10:00:00 GMT"} if self.site.dates else {}
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            data = data[int(first) : end]
        self._send(206 if wanted else 200, data, headers)

    def _send(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _HubHandler(_Handler):
    """Answers what `huggingface_hub` asks for: a repository's commit, its list of files, files."""

    hub: ClassVar[FakeHub]

    def _answer(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if parts[0] not in ("api", "datasets"):  # a model's file
            parts = ["models", *parts]
        is_api = parts[0] == "api"
        repo = "/".join(parts[2:4] if is_api else parts[1:3])
        action, *rest = parts[4 if is_api else 3 :] or ["revision", "main"]
        commits = self.hub.repos.get(repo)
        if commits is None:
            return self._refuse(401, "RepoNotFound")
        revision = "/".join(rest) if action == "revision" else rest[0]
        commit = revision if revision in commits.values() else commits[revision]
        files = self.hub.commits[commit]
        if not is_api:
            data = files.get("/".join(rest[1:]))
            if data is None:
                return self._refuse(404, "EntryNotFound")
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self._send(200, data, {"X-Repo-Commit": commit, "ETag": etag})
        entry = {"type": "file", "oid": "0" * 40}
        tree = [{**entry, "path": path, "size": len(data)} for path, data in files.items()]
        about = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        about |= {"tags": [], "downloads": 0, "likes": 0}
        answer = json.dumps(tree if action == "tree" else about).encode()
        return self._send(200, answer, {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})


@contextmanager
def served(site: Site, hub: FakeHub | None = None) -> Iterator[Site]:
    """The site, or the Hub, whose `site.url` belongs into HF_ENDPOINT."""
    handler = type("Handler", (_HubHandler if hub else _Handler,), {"site": site, "hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def served_hub(hub: FakeHub) -> Iterator[FakeHub]:
    with served(hub.site, hub):
        yield hub


def cache(home: Path, files: dict[str, bytes]) -> Path:
    """Put a model's files where the Hub's library keeps what it has fetched."""
    repository = home / "hub" / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, data in files.items():
        (snapshot / name).write_bytes(data)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in make(tmp_path / "source", CHATML).iterdir()}
    files["model.safetensors"] = b"weights"
    with served_hub(FakeHub({"someone/small": {"main": COMMIT}}, {COMMIT: files})) as opened:
        yield opened


def use_hub(patch: pytest.MonkeyPatch, endpoint: str, home: Path) -> None:
    """Let the Hub's library ask this server and keep its files in this home.

    It has read its environment already.
    """
    from huggingface_hub import constants

    _, brace, template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{")
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{brace}{template}")
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
