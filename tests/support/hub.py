"""A Hugging Face Hub of tests."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_templates import CHATML, make

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


class Hub(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.split("?")[0].rpartition("/")[2]
        if "/api/models/someone/small" in self.path:
            entries = [{"rfilename": name, "type": "file", "path": name, "oid": "0" * 40, "size": len(data)}
                       for name, data in self.files.items()]  # fmt: skip
            about = {"id": "someone/small", "sha": COMMIT, "siblings": entries, "private": False, "tags": [], "downloads": 0}
            self._answer(json.dumps(entries if "/tree/" in self.path else about).encode())
        elif "/resolve/" in self.path and "someone/small" in self.path and name in self.files:
            self._answer(self.files[name])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.files = {path.name: path.read_bytes() for path in make(tmp_path / "source", CHATML).iterdir()}
    Hub.files["model.safetensors"] = b"weights"
    Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def use_hub(patch: pytest.MonkeyPatch, endpoint: str, home: Path) -> None:
    """Let the Hub's library, which has read its environment, ask this server and keep what it fetches in this home."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{template[template.index('{') :]}")
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
