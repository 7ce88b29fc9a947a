"""Servers of the machine itself: files over HTTP with the habits and failures of real servers, and a Hugging Face Hub."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from support.chat_templates import CHATML, make


@dataclass
class Site:
    files: dict[str, bytes]
    etags: bool = True
    dates: bool = False
    statuses: list[int] = field(
        default_factory=list
    )  # errors with which the next requests are answered, one each
    failing: str = ""  # a path that is always answered with 503
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # (method, path, range)
    url: str = ""

    def requests(self, method: str) -> list[tuple[str, str]]:
        return [(path, wanted) for asked, path, wanted in self.asked if asked == method]


class _Handler(BaseHTTPRequestHandler):
    site: ClassVar[Site]

    def do_HEAD(self) -> None:
        self._answer(self.path, with_body=False)

    def do_GET(self) -> None:
        self._answer(self.path, with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        return

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a reader that has seen enough hangs up
            super().handle()

    def _answer(self, url: str, *, with_body: bool) -> None:
        site, path = self.site, unquote(urlsplit(url).path)
        wanted = self.headers.get("Range", "")
        site.asked.append((self.command, path, wanted))
        if site.statuses or path == site.failing:
            self._send(site.statuses.pop(0) if site.statuses else 503, b"", {}, with_body=False)
        elif path.endswith("/"):
            names = {
                name[len(path) :].partition("/") for name in site.files if name.startswith(path)
            }
            links = "".join(
                f'<a href="{name}{slash}">{name}</a>' for name, slash, _ in sorted(names)
            )
            self._send(200, links.encode(), {"Content-Type": "text/html"}, with_body=with_body)
        elif any(name.startswith(f"{path}/") for name in site.files):
            self._send(301, b"", {"Location": f"{path}/"}, with_body=False)
        elif path not in site.files:
            self._send(404, b"", {}, with_body=False)
        else:
            data = site.files[path]
            headers = {"Content-Type": "application/octet-stream"}
            if site.etags:
                headers["ETag"] = f'"{hashlib.md5(data).hexdigest()}"'
            if site.dates:
                headers["Last-Modified"] = "Tue, 03 Mar 2026 10:00:00 GMT"
            status = 200
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                end = min(int(last) + 1 if last else len(data), len(data))
                status, headers["Content-Range"] = 206, f"bytes {first}-{end - 1}/{len(data)}"
                data = data[int(first) : end]
            self._send(status, data, headers, with_body=with_body)

    def _send(
        self, status: int, data: bytes, headers: Mapping[str, str], *, with_body: bool
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)


class _HubHandler(_Handler):
    """Answers what `huggingface_hub` asks: the commit of a repository, the list of its files, and each of them."""

    hub: ClassVar["FakeHub"]

    def _answer(self, url: str, *, with_body: bool) -> None:
        hub, parts = self.hub, unquote(urlsplit(url).path).strip("/").split("/")
        self.site.asked.append((self.command, "/" + "/".join(parts), self.headers.get("Range", "")))
        if parts[0] not in ("api", "datasets"):  # a model's file
            parts = ["models", *parts]
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[1:3])
        if repo.endswith("/gated"):
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        commits = hub.repos.get(repo)
        if commits is None:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        revision = "/".join(parts[5:]) if parts[4:5] == ["revision"] else "main"
        if parts[4:5] == ["tree"] or parts[3:4] == ["resolve"]:
            revision = parts[5] if parts[0] == "api" else parts[4]
        commit = revision if revision in commits.values() else commits.get(revision)
        if commit is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        files = hub.commits[commit]
        if parts[0] != "api":
            data = files.get("/".join(parts[5:]))
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body=False)
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            return self._send(200, data, headers, with_body=with_body)
        if parts[4:5] == ["tree"]:
            tree = [
                {"type": "file", "path": path, "oid": "0" * 40, "size": len(data)}
                for path, data in files.items()
            ]
            return self._send(
                200,
                json.dumps(tree).encode(),
                {"Content-Type": "application/json"},
                with_body=with_body,
            )
        siblings = [{"rfilename": name} for name in files]
        about = json.dumps(
            {
                "id": repo,
                "sha": commit,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
        )
        return self._send(
            200, about.encode(), {"Content-Type": "application/json"}, with_body=with_body
        )


@dataclass
class FakeHub:
    """Repositories with their revisions: {repo: {revision: commit}} and {commit: {path: bytes}}."""

    repos: dict[str, dict[str, str]]
    commits: dict[str, dict[str, bytes]]
    site: Site = field(default_factory=lambda: Site({}))


@contextmanager
def served(site: Site, hub: FakeHub | None = None) -> Iterator[Site]:
    """The site, or the Hub, whose `site.url` belongs into HF_ENDPOINT."""
    handler = type("Handler", (_HubHandler if hub else _Handler,), {"site": site, "hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
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


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache(home: Path, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    repository = home / "hub" / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, data in files.items():
        (snapshot / name).write_bytes(data)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in make(tmp_path / "source", CHATML).iterdir()}
    with served_hub(
        FakeHub(
            {"someone/small": {"main": COMMIT}},
            {COMMIT: {**files, "model.safetensors": b"weights"}},
        )
    ) as opened:
        yield opened


def use_hub(patch: pytest.MonkeyPatch, endpoint: str, home: Path) -> None:
    """Let the Hub's library, which has read its environment, ask this server and keep what it fetches in this home."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    patch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{template[template.index('{') :]}"
    )
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
