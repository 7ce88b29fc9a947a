"""Headless Chromium over its DevTools protocol: opens a page, reads it back, keeps what its console said, takes pictures."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from support.waiting import wait_until
from websockets.sync.client import connect

SECONDS = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one headless Chromium with a profile of its own, gone when the `with` block ends."""

    def __init__(self, *, width: int = 1400, height: int = 900) -> None:
        self.errors: list[str] = []  # exceptions of the page, and what it logged as an error
        self.requests: list[str] = []  # addresses that the page sent a request to
        self._size = width, height
        self._profile = Path(tempfile.mkdtemp(prefix="ttrain-browser-"))
        self._number = 0

    def __enter__(self) -> Self:
        program = executable()
        assert program is not None, "no Chromium is installed"
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        flags += [
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile}",
            "--no-first-run",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port_file = self._profile / "DevToolsActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") > 0, SECONDS)
        port = port_file.read_text().splitlines()[0]

        def page() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                targets = json.load(answer)
            return next(
                (str(one["webSocketDebuggerUrl"]) for one in targets if one["type"] == "page"), ""
            )

        self._socket = connect(wait_until(page, SECONDS), max_size=None, open_timeout=SECONDS)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(*self._size)
        self.prefer("light")
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(SECONDS)
        shutil.rmtree(self._profile, ignore_errors=True)

    def prefer(self, scheme: str) -> None:
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        def ask() -> Any:
            try:
                return self.evaluate(expression)
            except AssertionError:
                return None

        def shown() -> str:
            page = self.evaluate("document.location + ' ' + document.body.innerText")
            return f"{expression}; the page shows {page[:2000]}; errors: {self.errors[-3:]}"

        return wait_until(ask, SECONDS, shown)

    def settle(self, seconds: float = 1.0) -> None:
        seen = [b"", b"x"]
        wait_until(
            lambda: time.sleep(seconds) or seen.append(self.picture()) or seen[-1] == seen[-2],
            SECONDS,
        )

    def picture(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=SECONDS))
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        method, said = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        is_error = (
            said.get("type") in ("error", "assert") or said.get("entry", {}).get("level") == "error"
        )
        if method == "Runtime.exceptionThrown" or (
            method in ("Runtime.consoleAPICalled", "Log.entryAdded") and is_error
        ):
            self.errors.append(json.dumps(said))
