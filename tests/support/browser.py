"""Headless Chromium over its DevTools protocol: opens pages and reads them."""

import json
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Self

from support.waiting import wait_until
from websockets.sync.client import connect

SECONDS = 60.0
SIZE = {"width": 1600, "height": 900, "deviceScaleFactor": 1, "mobile": False}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-port=0", "--no-first-run"),
)


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A page with a profile of its own, gone when the `with` block ends."""

    def __init__(self) -> None:
        self.errors: list[str] = []  # exceptions of the page, and what it logged as an error
        self.requests: list[str] = []  # addresses that the page sent a request to
        self._profile = Path(tempfile.mkdtemp(prefix="ttrain-browser-"))
        self._number = 0

    def __enter__(self) -> Self:
        program = executable()
        assert program is not None, "no Chromium is installed"
        command = [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=null, stderr=null)
        port_file = self._profile / "DevToolsActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") > 0, SECONDS)
        port = port_file.read_text().splitlines()[0]

        def page() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            return str(pages[0]["webSocketDebuggerUrl"]) if pages else ""

        self._socket = connect(wait_until(page, SECONDS), max_size=None, open_timeout=SECONDS)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", **SIZE)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(SECONDS)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        options = {"awaitPromise": True, "returnByValue": True}
        answer = self.send("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        def value() -> Any:
            try:
                return self.evaluate(expression)
            except AssertionError:
                return None

        return wait_until(value, SECONDS, lambda: f"{expression}; errors: {self.errors[-3:]}")

    def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=SECONDS))
            self._note(message.get("method", ""), message.get("params", {}))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        is_logged = event.get("entry", event).get("level", event.get("type")) in ("error", "assert")
        is_log = method in ("Runtime.consoleAPICalled", "Log.entryAdded")
        if method == "Runtime.exceptionThrown" or (is_log and is_logged):
            self.errors.append(json.dumps(event))
