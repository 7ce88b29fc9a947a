"""An endpoint for clients of OpenAI's interface, on 127.0.0.1: transformers' own server in a process of its own.

The program of that process is the caller's, since it puts the guard of all servers in front, which is not ours to import.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from ttrain.core.files import read_object, temporary_directory
from ttrain.core.signals import PARENT
from ttrain.errors import TTrainError, UsageError
from ttrain.export.export import DTYPES, Request, export
from ttrain.store.model_files import Reference
from ttrain.store.server_records import ACCESS, HOST, listens

NEEDED = ("openai", "fastapi", "uvicorn")
COMMIT = "0" * 40  # of a repository that does not exist
REFUSALS = (401, 403)  # of the guard
POLL_SECONDS, ENDING_SECONDS = 0.2, 5.0


def check() -> None:
    """Raise UsageError, with the command that installs it, where something is missing that the server needs."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"ttrain serve needs {' and '.join(missing)}; install with: pip install 'ttrain[serve]'")


@contextlib.contextmanager
def served(
    reference: Reference,
    *,
    program: str,
    port: int,
    device: str,
    dtype: str,
    max_requests: int,
    token: str = "",
    options: Sequence[str] = (),
) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """(address, name of the model for clients, process) of a server that answers, until the block ends.

    `program` is the module that runs the server, `token` what clients must show as their API key. An adapter is merged into
    a copy first. Raises UsageError for what cannot be served, TTrainError where the server ends, or answers what the guard
    should have refused.
    """
    if any(option.split("=")[0] in ("--host", "--port") for option in options):
        raise UsageError("--host and --port are not for the server's own options: it listens on 127.0.0.1, see --port")
    port = _free(port)
    with temporary_directory("serve") as directory:
        name = re.sub(r"[^\w.]+", "-", reference.text.rstrip("/").rpartition("/")[2], flags=re.ASCII).strip("-.") or "model"
        _provide(reference, directory, name, dtype)
        command = [sys.executable, "-P", "-m", program, str(port), str(max_requests),
                   "serve", name, "--device", device, "--dtype", DTYPES[dtype],
                   *options, "--host", HOST, "--port", str(port)]  # fmt: skip
        environment = {**os.environ, PARENT: str(os.getpid()), ACCESS: token}
        environment |= {"HF_HUB_CACHE": str(directory), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, cwd=directory, stdout=sys.stderr, env=environment)
        try:
            wait_until_ready(port, process)
            yield f"http://{HOST}:{port}/v1", name, process
        finally:
            process.terminate()
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free(port: int) -> int:
    """The port, or a free one for 0. Raises UsageError where another program has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"--port is {port}, which is taken ({error.strerror}); --port 0 finds a free one") from None
        return int(probe.getsockname()[1])


def _provide(reference: Reference, cache: Path, name: str, dtype: str) -> None:
    """Lay the model out as the Hub's cache has a model of this name, so that `/v1/models` lists it: as links, or as a copy
    with the adapter merged into it.

    The layout is that of huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    model = reference.model
    if reference.adapter is not None:
        model = export(reference, cache / "merged", Request(dtype=dtype, merge=True)).directory
    else:
        _check_architecture(reference)
    repository = cache / f"models--{name}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file():
            (snapshot / file.name).symlink_to(file.resolve())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


def _check_architecture(reference: Reference) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    config = read_object(reference.model / "config.json")
    architecture = (config.get("architectures") or ["model without a named architecture"])[0]
    if architecture not in KNOWN.values():
        raise UsageError(
            f"'{reference.text}' is a {architecture}, which transformers serve does not know; talk to it with `ttrain chat`"
        )


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return once the server answers, with a refusal: the request bears the name of another host."""
    request = urllib.request.Request(f"http://{HOST}:{port}/health", headers={"Host": "guard.invalid"})
    while process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                status = answer.status
        except urllib.error.HTTPError as refusal:
            status = refusal.code
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
            continue
        if status in REFUSALS and listens(psutil.Process(process.pid), port):
            return
        if status in REFUSALS:  # of another program, which took the port while the model was loaded
            raise TTrainError(f"port {port} was taken by another program before the server had it; try again, or --port 0")
        raise TTrainError(
            f"transformers serve answers other sites (status {status}), since ttrain's guard is not in front of it; install "
            "the version of transformers that constraints.txt names"
        )
    raise TTrainError(f"transformers serve ended with code {process.returncode} before it answered; its output is above")
